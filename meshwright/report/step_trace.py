"""A measured step beside its prediction: as bars of text, in sentences, and as a trace file."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.pipeline.actions import BACKWARD, FORWARD
from meshwright.pipeline.draw import SHOWN, WAVE, Bar, bars, named, rows_of
from meshwright.pipeline.measured import Measured, Span
from meshwright.pipeline.play import Played
from meshwright.predict.timeline import Timeline
from meshwright.report.chrome_trace import save, timeline_process, written
from meshwright.report.schedule_trace import measured_processes, side_by_side
from meshwright.report.stages import WIDTH
from meshwright.report.units import show_seconds


@dataclass(frozen=True)
class StepTrace:
    """The result of `TrainStep.trace`. It is the same on all ranks except for the `loss`, which is this rank's tensor.

    `measured`: each rank's actions with their times. `predicted`: the predicted schedule of a plan with stages, after
    so many seconds of a `prologue`; `timeline`: that of a rank of other plans. Print it, or `save` it for
    https://ui.perfetto.dev.
    """

    loss: Any
    measured: Measured
    predicted: Played | None = None
    prologue: float = 0.0
    timeline: Timeline | None = None

    @property
    def step_seconds(self) -> float:
        """The seconds from the first rank's beginning to the last one's end."""
        return self.measured.end

    @property
    def predicted_seconds(self) -> float | None:
        """The predicted seconds, if there are any."""
        if self.predicted is not None:
            return self.prologue + self.predicted.end
        return None if self.timeline is None else self.timeline.step_seconds

    def save(self, path: str | Path) -> None:
        """Write both as a trace file, a process for each rank and kind."""
        if self.predicted is not None:
            processes = side_by_side(self.predicted, self.prologue, self.measured)
        else:
            processes = measured_processes(self.measured, pipeline=False)
            if self.timeline is not None:
                processes.insert(0, timeline_process(self.timeline, "a rank, predicted"))
        summary = {"step_seconds": self.step_seconds, "predicted_seconds": self.predicted_seconds}
        save(written(processes, summary), path)

    def __str__(self) -> str:
        seconds = self.predicted_seconds
        longest = max(self.measured.end, seconds or 0.0)
        several = len(set(self.measured.places)) > 1
        head = f"measured: {show_seconds(self.measured.end)}"
        head += f", bubble {100 * self.measured.bubble:.1f} %" if several else ""
        lines = [head, *bars(_rows(self.measured, several), longest, WIDTH)]
        if self.predicted is not None:
            lines.append(
                f"predicted: {show_seconds(seconds or 0.0)}, bubble {100 * self.predicted.bubble:.1f} %"
            )
            late = [
                (
                    f"ranks of pp {place}".ljust(14) if _shared(self.measured) else name,
                    [(text, begin + self.prologue, end + self.prologue) for text, begin, end in found],
                    "",
                )
                for place, (name, found, _) in enumerate(rows_of(self.predicted))
            ]
            lines += bars(late, longest, WIDTH)
        elif seconds is not None:
            lines.append(f"predicted: {show_seconds(seconds)}")
        return "\n".join([*lines, *(stage_times(self.measured, self.predicted) if several else ())])


def stage_times(measured: Measured, predicted: Played | None) -> list[str]:
    """Return a line for each stage with its measured and predicted seconds per micro-batch, and the slowest one."""
    found = measured.stages()
    expected = _predicted_stages(predicted) if predicted is not None else {}
    totals = {stage: sum(halves.values()) for stage, halves in found.items()}
    mean, slowest = statistics.fmean(totals.values()), max(totals, key=totals.__getitem__)
    lines: list[str] = []
    for stage, halves in found.items():
        texts = [
            f"{way} {show_seconds(halves[way])}"
            + (f" ({show_seconds(expected[stage][way])} predicted)" if stage in expected else "")
            for way in (FORWARD, BACKWARD)
        ]
        more = f"; the slowest, {100 * (totals[stage] / mean - 1):.0f} % more than the mean of the stages"
        lines.append(f"stage {stage}: {', '.join(texts)}" + (more if stage == slowest else ""))
    return lines


def _predicted_stages(played: Played) -> dict[int, Mapping[str, float]]:
    """Return the predicted seconds of each stage, as a measured step has them."""
    spans = tuple(tuple(Span(a, begin, end) for a, begin, end in times) for times in played.times)
    return Measured(spans, tuple(range(len(spans)))).stages()


def _rows(measured: Measured, several: bool) -> list[tuple[str, list[Bar], str]]:
    rows: list[tuple[str, list[Bar], str]] = []
    for rank, spans in enumerate(measured.spans):
        # A rank waits at the beginning of an action.
        shown = [s for s in spans if s.action.kind in SHOWN]
        found = named((s.action, s.begin + s.waited, s.end) for s in shown)
        found += [(WAVE, begin, end) for s in shown for begin, end in s.talks]
        behind = [f"waits {100 * measured.idle(rank):.0f} %"] if several else []
        if measured.talking(rank):
            behind.append(f"{WAVE} {100 * measured.talking(rank):.0f} % for collectives")
        place = f", pp {measured.places[rank]}" if _shared(measured) else ""
        rows.append((f"rank {rank:>3}{place}", found, ", ".join(behind)))
    return rows


def _shared(measured: Measured) -> bool:
    """Return whether several ranks of the world share a place in the pipeline."""
    return 1 < len(set(measured.places)) < len(measured.places)


__all__ = ["StepTrace", "stage_times"]
