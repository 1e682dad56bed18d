"""What ranks have written of their steps (`bench.recovery_run`), and what it says about an event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

TAIL_BYTES = 400  # of a file, which its last line is in


@dataclass(frozen=True, slots=True)
class Line:
    """A step that a process has done: its loss, when (seconds since the epoch), and among how many ranks."""

    step: int
    loss: float
    at: float
    ranks: int
    pid: int


@dataclass(frozen=True, slots=True)
class Found:
    """What an event cost: `seconds` until the next step, `lost` steps, which were done once more."""

    seconds: float
    lost: int


def read(folder: Path) -> list[Line]:
    """The lines of all ranks, as they were written. One that was truncated by a kill counts as none."""
    found = []
    for file in folder.glob("losses*"):
        for text in file.read_text().splitlines(keepends=True):
            if text.endswith("\n"):
                found.append(_line(text.split()))
    return sorted(found, key=lambda line: line.at)


def _line(words: Sequence[str]) -> Line:
    step, loss, at, ranks, pid = words
    return Line(int(step), float.fromhex(loss), float(at), int(ranks), int(pid))


def latest(folder: Path, rank: int) -> Line | None:
    """The last step that a rank has written."""
    try:
        with (folder / f"losses{rank}").open("rb") as source:
            source.seek(max(0, source.seek(0, 2) - TAIL_BYTES))
            words = source.read().decode().rpartition("\n")[0].rpartition("\n")[2].split()
    except OSError:
        return None
    return _line(words) if words else None


def after(lines: Iterable[Line], moment: float, new: Callable[[Line], bool]) -> Found | None:
    """What an event cost, if there has been a step since. `new`: whether a line belongs to what came after it, as it
    does where its process or its number of ranks is another."""
    lines = list(lines)
    later = [line for line in lines if line.at > moment and new(line)]
    if not later:
        return None
    before = [line.step for line in lines if line.at < later[0].at and not new(line)]
    return Found(later[0].at - moment, max(0, max(before, default=0) + 1 - later[0].step))


def longest(lines: Iterable[Line], begin: float, end: float) -> float:
    """The longest time without a step of a process, from one of its steps to the next, in which a moment of a time
    lies."""
    last: dict[int, float] = {}
    most = 0.0
    for line in lines:
        if line.pid in last and line.at > begin and last[line.pid] < end:
            most = max(most, line.at - last[line.pid])
        last[line.pid] = line.at
    return most


def redone(lines: Iterable[Line]) -> int:
    """How many steps were done once more: by more processes than took part in it, or when others were further. `lines`
    in the order of time; of ranks that do steps together, one may be a step behind."""
    top, again, done = 0, set[int](), Counter[int]()
    for line in lines:
        done[line.step] += 1
        if line.step < top - 1 or done[line.step] > line.ranks:
            again.add(line.step)
        top = max(top, line.step)
    return len(again)


def furthest(lines: Iterable[Line], other: Iterable[Line]) -> float:
    """The largest relative difference of a loss from that of another run at the same step; infinite for a step that the
    other has not done."""
    theirs = {line.step: line.loss for line in other}
    return max(
        abs(line.loss - theirs[line.step]) / abs(theirs[line.step]) if line.step in theirs else float("inf")
        for line in lines
    )


__all__ = ["Found", "Line", "after", "furthest", "latest", "longest", "read", "redone"]
