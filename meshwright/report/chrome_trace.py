"""Steps as traces for https://ui.perfetto.dev or chrome://tracing, in their JSON format.

In a predicted step of one rank a stream is a thread. On the compute stream every phase is a slice that encloses its
tasks. A blocking collective is there too, since it occupies the stream. Clicking a slice shows the module, operator or
collective, axes, bytes sent, and the seconds that the task takes alone. A pipeline has a process for each of its ranks,
and a measured step one for each rank of the world (`schedule_trace.py`). Format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.predict.timeline import COMPUTE, Timeline

Event = dict[str, Any]
NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Slice:
    """An interval from `begin` to `end` in seconds. `about` is shown on click."""

    name: str
    kind: str
    begin: float
    end: float
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Process:
    """A named group of threads. Slices of a thread are disjoint or nested."""

    name: str
    threads: Mapping[str, Sequence[Slice]]


def save_trace(timeline: Timeline, path: str | Path) -> None:
    """Write a timeline as a trace file (UTF-8 JSON)."""
    save(trace(timeline), path)


def trace(timeline: Timeline) -> dict[str, Any]:
    """Return the trace of a timeline as JSON data."""
    summary = {
        "step_seconds": timeline.step_seconds,
        "compute_seconds": timeline.compute_seconds,
        "exposed_seconds": timeline.exposed_seconds,
        "hidden_seconds": timeline.hidden_seconds,
    }
    return written([timeline_process(timeline, "predicted step")], summary)


def timeline_process(timeline: Timeline, title: str) -> Process:
    """Return a predicted step of one rank, with a thread for each stream."""
    threads: dict[str, list[Slice]] = {stream: [] for stream in timeline.streams}
    threads[COMPUTE] += _phases(timeline)
    for task, start, end in zip(timeline.tasks, timeline.starts, timeline.ends, strict=True):
        about = {**task.about, "seconds_alone": task.seconds}
        for stream in task.streams:
            threads[stream].append(Slice(task.name, task.kind, start, end, about))
    return Process(title, {s if s == COMPUTE else f"send over {s}": found for s, found in threads.items()})


def written(processes: Iterable[Process], summary: Mapping[str, Any] = NOTHING) -> dict[str, Any]:
    """Return the trace of some processes as JSON data, in their order. Times are in microseconds, to the nanosecond."""
    events: list[Event] = []
    for pid, process in enumerate(processes, 1):
        events.append(_meta("process_name", pid, 0, {"name": process.name}))
        events.append(_meta("process_sort_index", pid, 0, {"sort_index": pid}))
        for tid, (name, slices) in enumerate(process.threads.items(), 1):
            events.append(_meta("thread_name", pid, tid, {"name": name}))
            events.append(_meta("thread_sort_index", pid, tid, {"sort_index": tid}))
            events += (_event(one, pid, tid) for one in slices)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(summary)}


def save(data: Mapping[str, Any], path: str | Path) -> None:
    """Write a trace as a file (UTF-8 JSON)."""
    Path(path).write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")


def _phases(timeline: Timeline) -> Iterator[Slice]:
    """Yield a slice around each run of tasks of one kind on the compute stream."""
    mine = [
        (task.kind, start, end)
        for task, start, end in zip(timeline.tasks, timeline.starts, timeline.ends, strict=True)
        if COMPUTE in task.streams
    ]
    for kind, run in itertools.groupby(mine, key=lambda entry: entry[0]):
        spans = list(run)
        yield Slice(kind, "phase", spans[0][1], spans[-1][2], {"tasks": len(spans)})


def _event(one: Slice, pid: int, tid: int) -> Event:
    # Both ends are rounded, not the length, so that neighbours touch and never overlap.
    first, last = round(one.begin * 1e9), round(one.end * 1e9)
    return {
        "ph": "X", "name": one.name, "cat": one.kind, "pid": pid, "tid": tid,
        "ts": first / 1000, "dur": (last - first) / 1000, "args": dict(one.about),
    }  # fmt: skip


def _meta(what: str, pid: int, thread: int, args: Event) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": thread, "args": args}


__all__ = ["Process", "Slice", "save", "save_trace", "timeline_process", "trace", "written"]
