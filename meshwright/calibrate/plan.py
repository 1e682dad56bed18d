"""The plan of a calibration: its rows, their time limits and their names. Plain data that travels as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.core.collectives import COLLECTIVES

WAITED = tuple(f"{kind} waited for" for kind in COLLECTIVES)  # rows of the same, within what is computed
POST = "post"  # a row: what starting a message takes
LEVEL = "rank"  # all ranks of one machine are neighbours: one level
NODES = "node"  # the level above it, where there are several machines
SUFFIX = {LEVEL: "", NODES: " over nodes"}  # of the names of rows, by the level that they measure
QUICK, FULL = "quick", "full"


@dataclass(frozen=True)
class Pace:
    """How thoroughly: seconds for a point of each kind of row. `few`: two sizes of each row, a small one and one that
    is not the largest. A row may be measured `attempts` times; none begins when `limit_seconds` have passed since the
    command was given."""

    point_seconds: float
    link_seconds: float
    waited_seconds: float
    few: bool
    attempts: int
    limit_seconds: float
    step_seconds: float  # of timed training steps of a model; 0: none

    def chosen(self, sizes: Sequence[int]) -> list[int]:
        """The sizes to measure, ascending."""
        return [sizes[0], *sizes[len(sizes) * 2 // 3 :][: len(sizes) > 1]] if self.few else list(sizes)


PACES = {
    FULL: Pace(0.1, 0.1, 0.2, False, 4, 75.0, 0.4),
    QUICK: Pace(0.01, 0.01, 0.02, True, 1, 60.0, 0.0),
}


@dataclass(frozen=True)
class Point:
    """One time: `seconds` of a call with so much `work` (FLOP or bytes), or over `ranks` ranks of which each sends so
    many bytes."""

    work: float
    seconds: float
    ranks: int = 1


@dataclass(frozen=True)
class MeasuredRow:
    """A row that was measured. `unrest`: the worst probe before and after it; `attempts`: how often it was measured."""

    name: str
    points: tuple[Point, ...]
    unrest: float = 1.0
    attempts: int = 1
    about: Mapping[str, Any] = field(default_factory=dict)

    def data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "row": self.name,
            "points": [[p.work, p.seconds, p.ranks] for p in self.points],
            "unrest": self.unrest,
            "attempts": self.attempts,
            "about": dict(self.about),
        }

    @staticmethod
    def of(data: Mapping[str, Any]) -> MeasuredRow:
        """From JSON."""
        points = tuple(Point(w, s, int(r)) for w, s, r in data["points"])
        return MeasuredRow(data["row"], points, data["unrest"], data["attempts"], data["about"])
