"""Prices of collectives: latency and bytes per second for each kind on each link.

The model is alpha-beta: ``rounds · latency + bytes sent / bytes per second``, with the bytes of `steps.wire_bytes`. A
library's own algorithms show up as its own numbers per kind: gloo's reduce-scatter is *not* half an all-reduce.

`Prices.law` returns latency and bandwidth separately. `Prices.seconds` applies it to one collective,
`price_matrix.Table` to tens of thousands."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from meshwright.core.collectives import COLLECTIVES, NOTHING, REGISTERED
from meshwright.core.hashed import hashed_once
from meshwright.core.mesh import IN_TIME, Mesh
from meshwright.redistribute.steps import LOCAL, Step, wire_bytes

ANY_LINK = "*"


@hashed_once
@dataclass(frozen=True)
class Prices:
    """A table of rows (kind, link, latency in seconds per round, bytes per second). The link ``*`` stands for all
    others. Bytes per second are those of one rank while all ranks send.

    `growth` says how the rounds of a collective grow with its k ranks: ``ring`` (k - 1) or ``tree`` (⌈log2 k⌉). A kind
    that has no row cannot be used (price infinite), so a plan goes round it: `without("all_to_all")`.
    """

    rows: tuple[tuple[str, str, float, float], ...]
    growth: str = "ring"

    @staticmethod
    def of(table: Mapping[str, Mapping[str, tuple[float, float]]], growth: str = "ring") -> Prices:
        """From ``{kind: {link: (latency seconds, bytes per second)}}``."""
        rows = tuple((kind, link, *pair) for kind, links in table.items() for link, pair in links.items())
        return Prices(rows, growth)

    @staticmethod
    def ring(latency: float, bytes_per_s: float) -> Prices:
        """The same latency and bandwidth for every collective, as on a machine with ideal ring algorithms."""
        return Prices(tuple((kind, ANY_LINK, latency, bytes_per_s) for kind in COLLECTIVES))

    def without(self, *kinds: str) -> Prices:
        """A table in which these collectives do not exist."""
        return replace(self, rows=tuple(row for row in self.rows if row[0] not in kinds))

    @functools.cached_property
    def _table(self) -> dict[tuple[str, str], tuple[float, float]]:
        return {(kind, link): (latency, rate) for kind, link, latency, rate in self.rows}

    def row(self, kind: str, link: str) -> tuple[float, float]:
        """Seconds a round and bytes per second; infinite both where the table has no row."""
        found = self._table.get((kind, link)) or self._table.get((kind, ANY_LINK))
        return found or (math.inf, math.inf)

    def law(self, kind: str, mesh: Mesh, axes: Iterable[str]) -> tuple[float, float]:
        """Seconds before the first byte and seconds per byte sent, of one collective over `axes`.

        A group that spans several links goes through all of them. Latencies add up, each link counting the group's
        members along its own axes. Bytes go at the pace of the slowest link, but a row's rate is that of one rank while
        all send: a ring over two nodes with 8 members in each crosses between the nodes on 8 network cards at once, so
        the rate of a link counts once for each member that the group has on faster links (those later in the mesh).
        With one link it is plainly ``rounds · latency`` and ``1 / rate``. An axis in time sends nothing: what
        micro-batches have is added up on the rank.
        """
        run = set(axes)
        members: dict[str, int] = {}  # link → members along its axes, slowest link first
        for axis in mesh.axes:
            if axis.name in run and axis.size > 1 and axis.link != IN_TIME:
                members[axis.link] = members.get(axis.link, 1) * axis.size
        if kind in LOCAL or not members:
            return 0.0, 0.0
        seconds, slowest, faster = 0.0, math.inf, 1
        for link, ranks in reversed(members.items()):
            latency, rate = self.row(kind, link)
            seconds += rounds(kind, ranks, self.growth) * latency
            slowest = min(slowest, rate * faster)
            faster *= ranks
        return seconds, 1 / slowest

    def seconds(self, kind: str, mesh: Mesh, axes: Iterable[str], sent_bytes: float) -> float:
        """The time of one collective over `axes` in which a rank sends `sent_bytes`; infinite for a kind without a
        row."""
        latency, per_byte = self.law(kind, mesh, axes)
        return latency + sent_bytes * per_byte


def rounds(kind: str, ranks: int, growth: str = "ring") -> int:
    """Messages that a rank sends one after another: round a ring (or to each other rank of an all-to-all), or up a
    tree. Raises ValueError for another growth."""
    match growth:
        case "ring":
            once = ranks - 1
        case "tree":
            once = (ranks - 1).bit_length()
        case _:
            raise ValueError(f"the growth of rounds is ring or tree, not {growth!r}")
    return REGISTERED.get(kind, NOTHING).rounds * once


def step_seconds(step: Step, mesh: Mesh, itemsize: int, prices: Prices) -> float:
    """The price of one step."""
    return prices.seconds(step.kind, mesh, step.axes, wire_bytes(step, mesh, itemsize))


def total_seconds(steps: Iterable[Step], mesh: Mesh, itemsize: int, prices: Prices) -> float:
    """The price of a sequence of steps; 0 when there are none, or only local ones."""
    return sum(step_seconds(s, mesh, itemsize, prices) for s in steps)


# Measured by bench/collectives.py: gloo over loopback, torch 2.13, two cores, float32, 2 and 4 ranks fitted together,
# medians of 31 calls at 1 KiB to 16 MiB. Four ranks on two cores wait for each other's turn, which is most of the
# latency: 4 ms a call against 0.3 ms for two ranks. A reduce-scatter is an exchange and a sum, since gloo's own costs
# more than an all-reduce: 1.62 ms where an all-reduce of 4 MiB over two ranks took 2.25.
TWO_CORE_GLOO = Prices.of({
    "all_reduce": {ANY_LINK: (361e-6, 1.32e9)},
    "reduce_scatter": {ANY_LINK: (480e-6, 1.05e9)},
    "all_gather": {ANY_LINK: (565e-6, 0.83e9)},
    "all_to_all": {ANY_LINK: (462e-6, 1.46e9)},
})  # fmt: skip
