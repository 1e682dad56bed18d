"""Draws a schedule as bars of text: a line for each rank, time to the right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshwright.pipeline.actions import COMPUTE, Action
from meshwright.pipeline.play import Played

SHOWN = (*COMPUTE, "reduce", "update")
WAVE = "~"  # what fills the bars of collectives that a rank waits for
Bar = tuple[str, float, float]  # name, begin, end


def draw(played: Played, width: int = 100) -> str:
    """Each rank's actions in time: ``F0`` is forward of micro-batch 0, ``B`` backward, ``I`` and ``W`` are its halves,
    ``R`` sums of gradients, ``U`` the update; dots where a rank waits. Small letters are of every second stage of a
    rank. Names that do not fit into their bar are cut."""
    head = (
        f"{played.schedule.name}: {played.schedule.stages} stages, {played.schedule.micro_batches} micro-batches, "
        f"bubble {100 * played.bubble:.1f} %"
    )
    return "\n".join([head, *bars(rows_of(played), played.end, width)])


def rows_of(played: Played) -> list[tuple[str, list[Bar], str]]:
    """A row for each rank, as `bars` takes them."""
    return [
        (
            f"rank {rank:>3}",
            named((action, begin, end) for action, begin, end in times if action.kind in SHOWN),
            f"at most {played.peaks[rank]} in memory",
        )
        for rank, times in enumerate(played.times)
    ]


def named(times: Iterable[tuple[Action, float, float]]) -> list[Bar]:
    """The actions of a rank as bars, those of every second of its stages in small letters."""
    times = list(times)
    stages = sorted({action.stage for action, _, _ in times if action.kind in COMPUTE})
    small = set(stages[1::2])
    return [
        (
            action.short.lower() if action.kind in COMPUTE and action.stage in small else action.short,
            begin,
            end,
        )
        for action, begin, end in times
    ]


def bars(rows: Sequence[tuple[str, Sequence[Bar], str]], seconds: float, width: int) -> list[str]:
    """A line for each row (its name, its bars, what is said behind them), so many columns for so many `seconds`."""
    columns = width / seconds if seconds else 0.0
    lines: list[str] = []
    for name, found, behind in rows:
        line = ["·"] * width
        for text, begin, end in found:
            left, right = round(begin * columns), round(end * columns)
            if right <= left:
                continue
            if text == WAVE:  # within the bar of an action, whose name stays
                line[left:right] = [WAVE if c == "─" else c for c in line[left:right]]
                continue
            shown = text[: right - left].ljust(right - left, "─" if right - left > 2 else " ")
            line[left:right] = list(shown[:-1] + " " if right - left > len(text) else shown)
        lines.append(f"{name} │{''.join(line)}│ {behind}".rstrip())
    return lines
