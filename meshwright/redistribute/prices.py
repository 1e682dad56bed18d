"""What a step costs: latency and bytes per second for each collective on each link.

The model is alpha-beta: ``rounds · latency + bytes sent / bytes per second``, the bytes by `steps.wire_bytes`. A
library's own algorithms show up as its own numbers per kind: gloo's reduce-scatter is *not* half an all-reduce.
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
    """A table of rows (kind, link, latency in seconds per round, bytes per second). The link ``*`` stands for all
    others.

    A kind that has no row cannot be used (price infinite), so a plan goes round it: `without("all_to_all")`.
    """

    rows: tuple[tuple[str, str, float, float], ...]

    @staticmethod
    def of(table: Mapping[str, Mapping[str, tuple[float, float]]]) -> Prices:
        """From ``{kind: {link: (latency seconds, bytes per second)}}``."""
        return Prices(
            tuple((kind, link, *pair) for kind, links in table.items() for link, pair in links.items())
        )

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
            latency, rate = (
                self._table.get((kind, link)) or self._table.get((kind, ANY_LINK)) or (math.inf, math.inf)
            )
            worst = max(worst, rounds(kind, mesh.count(run)) * latency + sent_bytes / rate)
        return worst


def rounds(kind: str, ranks: int) -> int:
    """Messages that a rank sends one after another: round a ring, or to each other rank of an all-to-all."""
    return (2 if kind == "all_reduce" else 1) * (ranks - 1)


def step_seconds(step: Step, mesh: Mesh, itemsize: int, prices: Prices) -> float:
    """The price of one step."""
    return prices.seconds(step.kind, mesh, step.axes, wire_bytes(step, mesh, itemsize))


def total_seconds(steps: Iterable[Step], mesh: Mesh, itemsize: int, prices: Prices) -> float:
    """The price of a sequence of steps; 0 when there are none, or only local ones."""
    return sum(step_seconds(s, mesh, itemsize, prices) for s in steps)


# Measured by bench/collectives.py: gloo over loopback, torch 2.13, two cores, float32, 2 and 4 ranks fitted together,
# medians of 31 calls at 1 KiB to 16 MiB. Four ranks on two cores wait for each other's turn, which is most of the
# latency: 4 ms a call against 0.3 ms for two ranks. A reduce-scatter of 16 MiB over two ranks took 18.5 ms where the
# all-reduce took 11.0.
TWO_CORE_GLOO = Prices.of({
    "all_reduce": {ANY_LINK: (361e-6, 1.32e9)},
    "reduce_scatter": {ANY_LINK: (817e-6, 0.43e9)},
    "all_gather": {ANY_LINK: (565e-6, 0.83e9)},
    "all_to_all": {ANY_LINK: (462e-6, 1.46e9)},
})  # fmt: skip
