"""The schedule of `route` for every pair of many layouts of one tensor at once, in numpy: prices, no steps.

A layout is a row of codes, one per prime axis of the mesh: WHOLE, PENDING, or 2 + k for place k of the value. The axes
at one place stand in mesh order. All that the schedule asks about a pair is a set of axes: those a place loses, those
that arrive from a pending sum, those an exchange must move. A set is an integer with bit a for axis a of the mesh, so
mesh order is the order of bits, "all of x below the lowest of y" is ``x & below(y)``, and what a collective over a set
costs stands in a table of 2^A rows.

The formulas follow `route` line by line, and the tests hold the two equal.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.layout import Cat, Item, SubDim, TensorLayout
from meshwright.mesh import Mesh
from meshwright.redistribute.plan import redistribute
from meshwright.redistribute.prices import Prices, rounds, total_seconds
from meshwright.redistribute.steps import COLLECTIVES

WHOLE, PENDING = 0, 1  # codes; 2 + k is place k

Masks = NDArray[np.int64]  # sets of axes
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Value:
    """One tensor as a search sees it.

    `sizes`: its items (a product), each a sum of parts (a concatenation; one part where it is plain), each the sizes
    of its leaves (a product). `places`: place → the leaves, counted left to right over all items and parts, that an
    axis at this place cuts. `itemsize` in bytes.
    """

    sizes: tuple[tuple[tuple[int, ...], ...], ...]
    places: tuple[tuple[int, ...], ...]
    itemsize: int

    @functools.cached_property
    def leaves(self) -> tuple[int, ...]:
        """The sizes of all leaves."""
        return tuple(n for item in self.sizes for part in item for n in part)

    @functools.cached_property
    def is_plain(self) -> bool:
        """No leaf belongs to two places, and each place cuts every part of the concatenation it is in."""
        if len(set(leaves := [k for place in self.places for k in place])) < len(leaves):
            return False
        of = [(i, p) for i, item in enumerate(self.sizes) for p, part in enumerate(item) for _ in part]
        for place in self.places:
            items = {of[k][0] for k in place}
            if len(items) != 1 or len({of[k] for k in place}) != len(self.sizes[items.pop()]):
                return False
        return True

    def layout(self, codes: ArrayLike, mesh: Mesh) -> TensorLayout:
        """The layout that one row of codes stands for, all items written as one dim."""
        named = list(zip(mesh.sizes, np.asarray(codes).tolist(), strict=True))
        axes = iter(
            tuple(a for a, code in named if code >= 2 and leaf in self.places[code - 2])
            for leaf in range(len(self.leaves))
        )
        items: list[Item] = []
        for item in self.sizes:
            parts = tuple(tuple(SubDim(n, next(axes)) for n in part) for part in item)
            items += parts[0] if len(parts) == 1 else (Cat(parts),)
        return TensorLayout((tuple(items),), tuple(a for a, code in named if code == PENDING))


class Table:
    """Prices of redistributions on a mesh of A prime axes, A at most 16. Holds tables of 2^A rows."""

    def __init__(self, mesh: Mesh, prices: Prices) -> None:
        self.mesh, self.prices = mesh, prices
        self.sizes = np.array([a.size for a in mesh.axes], dtype=np.int64)
        self.bits = np.where(
            self.sizes > 1, 1 << np.arange(len(self.sizes)), 0
        )  # an axis of size 1 cuts nothing
        self.members = _products(self.sizes)  # ranks of a group over a set of axes
        self._laws = {kind: self._law(kind) for kind in COLLECTIVES}

    def _law(self, kind: str) -> tuple[Floats, Floats]:
        """`Prices.law` for every set of axes: seconds, and seconds per byte."""
        seconds, slowest, faster = np.zeros(len(self.members)), np.full(len(self.members), np.inf), 1.0
        for link in reversed(dict.fromkeys(a.link for a in self.mesh.axes if a.size > 1)):
            ranks = _products(np.where([a.link == link for a in self.mesh.axes], self.sizes, 1))
            latency, rate = self.prices.row(kind, link)
            rounds_of = {k: rounds(kind, int(k), self.prices.growth) for k in np.unique(ranks).tolist()}
            times = np.vectorize(rounds_of.__getitem__, otypes=[float])(ranks)
            seconds = seconds + np.where(ranks > 1, latency, 0.0) * times
            slowest = np.where(ranks > 1, np.minimum(slowest, rate * faster), slowest)
            faster = faster * ranks
        return seconds, 1 / slowest

    # ---------------------------------------------------------------------------------------------- one layout

    def sets(self, codes: NDArray[np.int8], code: int) -> Masks:
        """Per row the set of axes that have this code."""
        return (codes == code) @ self.bits

    def local_elements(self, value: Value, codes: NDArray[np.int8]) -> Floats:
        """Per row the elements on the rank that holds most."""
        at = [self.sets(codes, 2 + place) for place in range(len(value.places))]
        stacks = [np.zeros(len(codes), dtype=np.int64) for _ in value.leaves]
        for place, leaves in enumerate(value.places):
            for leaf in leaves:
                stacks[leaf] = stacks[leaf] | at[place]
        return _fold(value, [np.ceil(n / self.members[s]) for n, s in zip(value.leaves, stacks, strict=True)])

    def collective(self, kind: str, axes: Masks, sent_bytes: Floats) -> Floats:
        """Seconds of one collective over each set of axes, in which a rank sends so many bytes; 0 over no axes."""
        latency, per_byte = self._laws[kind]
        return latency[axes] + sent_bytes * per_byte[axes]

    # ---------------------------------------------------------------------------------------------- all pairs

    def seconds(self, value: Value, src: NDArray[np.int8], dst: NDArray[np.int8]) -> Floats:
        """[N, M]: the price of `redistribute` from each row of `src` [N, A] to each row of `dst` [M, A].

        Where a price table has no way by any schedule of `route`, infinite. A value that is not plain is priced pair by
        pair.
        """
        if not value.is_plain:
            return self._one_by_one(value, src, dst)
        pairs = _Pairs(self, value, src, dst)
        with np.errstate(invalid="ignore"):  # an unlawful schedule has inf elements, and inf · 0 is no price
            return functools.reduce(
                np.fmin, (f(s) for f in (pairs.exchanging, pairs.gathering) for s in (1, 0))
            )

    def _one_by_one(self, value: Value, src: NDArray[np.int8], dst: NDArray[np.int8]) -> Floats:
        froms, tos = ([value.layout(row, self.mesh) for row in rows] for rows in (src, dst))
        found = [
            [
                total_seconds(
                    redistribute(a, b, self.mesh, value.itemsize, self.prices),
                    self.mesh,
                    value.itemsize,
                    self.prices,
                )
                for b in tos
            ]
            for a in froms
        ]
        return np.array(found, dtype=np.float64).reshape(len(froms), len(tos))


class _Pairs:
    """The sets of axes of N × M pairs, and the price of each schedule.

    Per place: `s`, `d` the axes there at the start and at the goal, of the arriving ones `sliced`, `summed` and `moved`
    (in), of the leaving ones `padded`, `gathered` (and moved out). `below(x)` are all axes below the lowest of x.
    """

    def __init__(self, table: Table, value: Value, src: NDArray[np.int8], dst: NDArray[np.int8]) -> None:
        self.table, self.value = table, value
        places = range(len(value.places))
        self.s = [table.sets(src, 2 + k)[:, None] for k in places]
        self.d = [table.sets(dst, 2 + k)[None, :] for k in places]
        self.pending = table.sets(src, PENDING)[:, None]
        goal = table.sets(dst, PENDING)[None, :]
        whole = int(table.bits.sum()) & ~table.sets(src, PENDING)[:, None]
        for s in self.s:
            whole = whole & ~s
        ends_split = functools.reduce(np.bitwise_or, self.d, np.zeros_like(goal))
        self.reduced = self.pending & ~goal  # pending sums that must be taken
        self.arriving = self.pending & ends_split
        self.sliced = [whole & d for d in self.d]
        self.summed = [self.pending & d for d in self.d]
        self.padded = [s & goal for s in self.s]
        self.gathered = [s & ~goal & ~ends_split for s in self.s]
        self.common = [s & d & below(s ^ d) for s, d in zip(self.s, self.d, strict=True)]
        self.leaf_tables = [
            np.where(table.members <= n, np.ceil(n / table.members), np.inf) for n in value.leaves
        ]
        self.place_of = {leaf: k for k, leaves in enumerate(value.places) for leaf in leaves}

    def bytes_of(self, at: list[Masks]) -> Floats:
        """Bytes of one rank with these axes at each place; infinite where there are more blocks than elements."""
        found = [
            rows[at[self.place_of[leaf]]] if leaf in self.place_of else rows[0]
            for leaf, rows in enumerate(self.leaf_tables)
        ]
        return self.value.itemsize * _fold(self.value, found)

    def collective(self, kind: str, axes: Masks, held: Floats, after: Floats | None = None) -> Floats:
        """Seconds over each set of axes by a rank that holds so many bytes (after a reduce-scatter: `after`)."""
        k = self.table.members[axes]
        match kind:
            case "all_reduce":
                sent = 2 * (k - 1) / k * held
            case "all_to_all":
                sent = (k - 1) / k * held
            case _:
                sent = (k - 1) * held
        return self.table.collective(kind, axes, sent)

    def exchanging(self, scatter: int) -> Floats:
        """`route._exchanging`."""
        sliced = [s | w for s, w in zip(self.s, self.sliced, strict=True)]
        split = [s | p for s, p in zip(sliced, self.summed, strict=True)]
        ready = [d | p | g for d, p, g in zip(self.d, self.padded, self.gathered, strict=True)]
        moved = functools.reduce(
            np.bitwise_or, map(self._differ, range(len(self.s))), np.zeros((1, 1), np.int64)
        )
        held = self.bytes_of(split)
        if scatter:
            price = self.collective("reduce_scatter", self.arriving, held)
            price = price + self.collective("all_reduce", self.reduced & ~self.arriving, held)
        else:
            price = self.collective("all_reduce", self.reduced, self.bytes_of(sliced))
        price = price + self.collective("all_to_all", moved, held)
        return price + self.collective("all_gather", _union(self.gathered), self.bytes_of(ready))

    def _differ(self, k: int) -> Masks:
        """Axes of place k above the part in which its stack before the all-to-all and that after it agree."""
        s, d, common = self.s[k], self.d[k], self.common[k]
        sliced, summed, padded, gathered = self.sliced[k], self.summed[k], self.padded[k], self.gathered[k]
        arrive, leave = d & ~s, s & ~d
        first = sliced & below(arrive & ~sliced)
        second = np.where(first == sliced, summed & below(arrive & ~sliced & ~summed), 0)
        grown = np.where(s == common, first | second, 0)
        first = padded & below(leave & ~padded)
        second = np.where(first == padded, gathered & below(leave & ~padded & ~gathered), 0)
        shrunk = np.where(d == common, first | second, 0)
        return (s | d) & ~(common | grown | shrunk)

    def gathering(self, scatter: int) -> Floats:
        """`route._gathering`."""
        early, scattered, cut, full, gathered, sums = [], [], [], [], [], []
        for k, s in enumerate(self.s):
            sliced, summed, common = self.sliced[k], self.summed[k], self.common[k]
            arrive = np.where(s == common, self.d[k] & ~s, 0)
            first = sliced & arrive & below(arrive & ~sliced)
            sums.append(summed & arrive & below(arrive & ~first & ~summed) if scatter else 0 * first)
            early.append(s | first)
            scattered.append(s | first | sums[k])
            cut.append(s | (arrive & below(arrive & ~sliced & ~sums[k])))
            full.append(s | (arrive & below(arrive & ~sliced & ~summed)))
            above = s & ~common
            gathered.append(above & ~(self.padded[k] & below(above & ~self.padded[k])))
        summed = _union(sums)
        price = self.collective("reduce_scatter", summed, self.bytes_of(scattered)) if scatter else 0.0
        price = price + self.collective("all_reduce", self.reduced & ~summed, self.bytes_of(cut))
        return price + self.collective("all_gather", _union(gathered), self.bytes_of(full))


def below(axes: Masks) -> Masks:
    """All axes below the lowest of a set; all there are where it is empty."""
    return (axes & -axes) - 1


def _union(sets: list[Masks]) -> Masks:
    return functools.reduce(np.bitwise_or, sets, np.zeros((1, 1), np.int64))


def _products(sizes: NDArray[np.int64]) -> Floats:
    """Per set of axes the product of their sizes."""
    found = np.ones(1)
    for size in sizes:
        found = np.concatenate([found, found * size])
    return found


def _fold(value: Value, leaves: list[Floats]) -> Floats:
    """Elements of the tensor from those of its leaves: products and, over the parts of a concatenation, sums."""
    left = iter(leaves)
    return math.prod(sum(math.prod(next(left) for _ in part) for part in item) for item in value.sizes)  # pyright: ignore


__all__ = ["PENDING", "WHOLE", "Table", "Value"]
