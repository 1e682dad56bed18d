"""What a step costs: latency and bytes per second for each collective on each link.

The model is alpha-beta: ``rounds · latency + bytes sent / bytes per second``, the bytes by `steps.wire_bytes`. A library's own
algorithms show up as its own numbers per kind: gloo's reduce-scatter is *not* half an all-reduce.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshwright.mesh import Mesh
from meshwright.redistribute.steps import COLLECTIVES, LOCAL, Step, wire_bytes

ANY_LINK = "*"


@dataclass(frozen=True)
class Prices:
    """A table of rows (kind, link, latency in seconds per round, bytes per second). The link ``*`` stands for all others.

    A kind that has no row cannot be used (price infinite), so a plan goes round it: `without("all_to_all")`.
    """

    rows: tuple[tuple[str, str, float, float], ...]

    @staticmethod
    def of(table: Mapping[str, Mapping[str, tuple[float, float]]]) -> Prices:
        """From ``{kind: {link: (latency seconds, bytes per second)}}``."""
        return Prices(tuple((kind, link, *pair) for kind, links in table.items() for link, pair in links.items()))

    @staticmethod
    def ring(latency: float, bytes_per_s: float) -> Prices:
        """The same latency and bandwidth for every collective, as on a machine with ideal ring algorithms."""
        return Prices(tuple((kind, ANY_LINK, latency, bytes_per_s) for kind in COLLECTIVES))

    def without(self, *kinds: str) -> Prices:
        """A table in which these collectives do not exist."""
        return Prices(tuple(row for row in self.rows if row[0] not in kinds))

    @functools.cached_property
    def _table(self) -> dict[tuple[str, str], tuple[float, float]]:
        return {(kind, link): (latency, rate) for kind, link, latency, rate in self.rows}

    def seconds(self, kind: str, mesh: Mesh, axes: Iterable[str], sent_bytes: float) -> float:
        """The time of one collective in which a rank sends `sent_bytes`, over the slowest link among `axes`."""
        if kind in LOCAL:
            return 0.0
        run = tuple(axes)
        worst = 0.0
        for link in {a.link for a in mesh.axes if a.name in run}:
            latency, rate = self._table.get((kind, link)) or self._table.get((kind, ANY_LINK)) or (math.inf, math.inf)
            worst = max(worst, rounds(kind, mesh.count(run)) * latency + sent_bytes / rate)
        return worst


def rounds(kind: str, ranks: int) -> int:
    """Messages that wait for one another in a ring of `ranks`; an all-to-all posts all of its own at once."""
    match kind:
        case "all_reduce":
            return 2 * (ranks - 1)
        case "all_to_all":
            return 1
        case _:
            return ranks - 1


def step_seconds(step: Step, mesh: Mesh, itemsize: int, prices: Prices) -> float:
    """The price of one step."""
    return prices.seconds(step.kind, mesh, step.axes, wire_bytes(step, mesh, itemsize))


def total_seconds(steps: Iterable[Step], mesh: Mesh, itemsize: int, prices: Prices) -> float:
    """The price of a sequence of steps; 0 when there are none, or only local ones."""
    return sum(step_seconds(s, mesh, itemsize, prices) for s in steps)


# Placeholder until bench/collectives.py has been run: a ring over the loopback device.
TWO_CORE_GLOO = Prices.ring(100e-6, 1e9)
