"""Schedules as processes of a trace: one for each predicted rank of the pipeline or measured rank of the world."""

from __future__ import annotations

from meshwright.pipeline.actions import COMPUTE, MESSAGES, Action
from meshwright.pipeline.measured import Measured, Span
from meshwright.pipeline.play import Played
from meshwright.report.chrome_trace import Process, Slice


def played_processes(played: Played, prologue: float = 0.0) -> list[Process]:
    """Return a predicted schedule, with a process for each rank of the pipeline.

    `prologue`: seconds before its first action.
    """
    found: list[Process] = []
    for place, times in enumerate(played.times):
        slices = [Slice("sums", "sums", 0.0, prologue)] if prologue else []
        slices += [_slice(a, begin + prologue, end + prologue) for a, begin, end in times]
        found.append(Process(f"rank {place} of the pipeline, predicted", {"actions": slices}))
    return found


def measured_processes(measured: Measured, *, pipeline: bool) -> list[Process]:
    """Return a measured step, with a process for each rank of the world: its actions, and its waits within them."""
    found: list[Process] = []
    for rank, spans in enumerate(measured.spans):
        place = f" ({measured.places[rank]} of the pipeline)" if pipeline else ""
        slices = [one for span in spans for one in _slices(span)]
        found.append(Process(f"rank {rank}{place}, measured", {"actions": slices}))
    return found


def side_by_side(played: Played, prologue: float, measured: Measured) -> list[Process]:
    """Return each rank of the pipeline as predicted, followed by the measured ranks of the world at its place."""
    found: list[Process] = []
    ran = measured_processes(measured, pipeline=True)
    for place, predicted in enumerate(played_processes(played, prologue)):
        found.append(predicted)
        found += [ran[rank] for rank, at in enumerate(measured.places) if at == place]
    return found


def _slice(action: Action, begin: float, end: float) -> Slice:
    name = action.short if action.kind in COMPUTE else action.kind
    about = {"stage": action.stage, "micro_batch": action.micro_batch}
    return Slice(name, action.kind, begin, end, about if action.kind in (*COMPUTE, *MESSAGES) else {})


def _slices(span: Span) -> list[Slice]:
    waits = [Slice("wait for a stage", "wait", begin, end) for begin, end in span.waits]
    talks = [Slice("wait for a collective", "collective", begin, end) for begin, end in span.talks]
    return [_slice(span.action, span.begin, span.end), *sorted((*waits, *talks), key=lambda s: s.begin)]


__all__ = ["measured_processes", "played_processes", "side_by_side"]
