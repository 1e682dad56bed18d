"""The schedule of `route` for every pair of many layouts of one tensor at once, in numpy: prices, no steps.

A layout is a row of codes, one per prime axis of the mesh: REPLICATED, PARTIAL, or 2 + k for place k of the value. The
axes at one place stand in mesh order. All that the schedule asks about a pair is a set of axes: those a place loses,
those that arrive from a partial sum, those an exchange must move. A set is an integer with bit a for axis a of the
mesh, so mesh order is the order of bits, "all of x below the lowest of y" is ``x & below(y)``, and what a collective
over a set costs stands in a table of 2^A rows.

The formulas follow `route` line by line, and the tests hold the two equal.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.core.collectives import COLLECTIVES
from meshwright.core.hashed import hashed_once
from meshwright.core.layout import Cat, Item, SubDim, TensorLayout
from meshwright.core.mesh import Mesh
from meshwright.redistribute.price_table import Ends, Floats, Listed, Masks, Pairs, Spread
from meshwright.redistribute.prices import Prices, rounds, total_seconds
from meshwright.redistribute.reshard import redistribute
from meshwright.redistribute.steps import wire_elements

REPLICATED, PARTIAL = 0, 1  # codes; 2 + k is place k
FEW = 24  # layouts of a value up to which its pairs are listed beside those of others
BATCH = 100_000  # pairs in one call


@hashed_once
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
        """True if no leaf belongs to two places and each place shards every part of its concatenation."""
        if len(set(leaves := [k for place in self.places for k in place])) < len(leaves):
            return False
        of = [(i, p) for i, item in enumerate(self.sizes) for p, part in enumerate(item) for _ in part]
        for place in self.places:
            items = {of[k][0] for k in place}
            if len(items) != 1 or len({of[k] for k in place}) != len(self.sizes[items.pop()]):
                return False
        return True

    @functools.cached_property
    def apart(self) -> tuple[float, tuple[tuple[tuple[int, int], ...], ...]] | None:
        """Factor the number of elements over places: the elements of unsharded items, and for each place the (factor,
        leaf) of each part of its item, to be added up. None if two places shard one item, or the value is not plain."""
        place_of = {leaf: k for k, leaves in enumerate(self.places) for leaf in leaves}
        numbers = iter(range(len(self.leaves)))
        unsharded = 1
        found: list[tuple[tuple[int, int], ...]] = [()] * len(self.places)
        for item in self.sizes:
            numbered = [[(n, place_of.get(next(numbers), -1)) for n in part] for part in item]
            cut = {k for part in numbered for _, k in part} - {-1}
            if not cut:
                unsharded *= sum(map(math.prod, item))
            elif len(cut) > 1 or not self.is_plain:
                return None
            else:
                terms = [
                    (math.prod(n for n, k in part if k < 0), next(n for n, k in part if k >= 0))
                    for part in numbered
                ]
                found[cut.pop()] = tuple(terms)
        return float(unsharded), tuple(found)

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
        return TensorLayout((tuple(items),), tuple(a for a, code in named if code == PARTIAL))


class Table:
    """Prices of redistributions on a mesh of A prime axes, A at most 16. Holds tables of 2^A rows."""

    def __init__(self, mesh: Mesh, prices: Prices) -> None:
        self.mesh, self.prices = mesh, prices
        self.sizes = np.array([a.size for a in mesh.axes], dtype=np.int64)
        # an axis of size 1 shards nothing
        self.bits = np.where(self.sizes > 1, 1 << np.arange(len(self.sizes)), 0)
        self.members = _products(self.sizes)  # ranks of a group over a set of axes
        self._laws = {kind: self._law(kind) for kind in COLLECTIVES}
        # per byte held (after a reduce-scatter), not sent
        self._held_laws: dict[str, tuple[Floats, Floats]] = {}
        for kind, (seconds, per_byte) in self._laws.items():
            sent = {k: wire_elements(kind, int(k), 1, 1) for k in np.unique(self.members).tolist()}
            self._held_laws[kind] = (
                seconds,
                per_byte * np.vectorize(sent.__getitem__, otypes=[float])(self.members),
            )
        # glibc gives every array of more than 128 KiB pages of its own, which cost three times the arithmetic here;
        # once such a block was freed it keeps blocks up to that size.
        np.empty(24 << 20, np.uint8)

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

    def names(self, axes: int) -> list[str]:
        """The names of a set of axes, in mesh order."""
        return [a.name for a, bit in zip(self.mesh.axes, self.bits.tolist(), strict=True) if bit & axes]

    def local_elements(self, value: Value, codes: NDArray[np.int8]) -> Floats:
        """Per row the elements on the rank that holds most."""
        at = [self.sets(codes, 2 + place) for place in range(len(value.places))]
        stacks = [
            functools.reduce(np.bitwise_or, (at[k] for k, here in enumerate(value.places) if leaf in here), 0)
            for leaf in range(len(value.leaves))
        ]
        held = iter([np.ceil(n / self.members[s]) for n, s in zip(value.leaves, stacks, strict=True)])
        return np.ones(len(codes)) * _fold([[[next(held) for _ in p] for p in item] for item in value.sizes])

    def collective(self, kind: str, axes: Masks, sent_bytes: Floats) -> Floats:
        """Seconds of one collective over each set of axes, in which a rank sends so many bytes; 0 over no axes."""
        latency, per_byte = self._laws[kind]
        return latency[axes] + sent_bytes * per_byte[axes]

    def held_law(self, kind: str) -> tuple[Floats, Floats]:
        """Seconds of one collective over every set of axes, and seconds per byte that a rank holds before it (after it,
        for a reduce-scatter)."""
        return self._held_laws[kind]

    # ---------------------------------------------------------------------------------------------- all pairs

    def seconds(self, value: Value, src: NDArray[np.int8], dst: NDArray[np.int8]) -> Floats:
        """[N, M]: the price of `redistribute` from each row of `src` [N, A] to each row of `dst` [M, A].

        Where a price table has no way by any schedule of `route`, infinite. A value that is not plain is priced pair by
        pair.
        """
        if not value.is_plain:
            return self._one_by_one(value, src, dst)
        start, goal = (
            np.array([self.sets(rows, 2 + k) for k in range(len(value.places))], np.int64).reshape(
                -1, len(rows)
            )
            for rows in (src, dst)
        )
        ends = Ends(int(self.bits.sum()), start, goal, self.sets(src, PARTIAL), self.sets(dst, PARTIAL))
        terms = self._terms(value)

        def elements(sets: Masks | list[Masks], spread: Spread) -> Floats:
            return _fold(
                [
                    [[spread(k, table[sets[k]]) if k >= 0 else table for k, table in part] for part in item]
                    for item in terms
                ]
            )

        def cost(kind: str, axes: Masks, held: Floats) -> Floats:
            latency, per_byte = self._held_laws[kind]
            seconds = (per_byte * value.itemsize).take(axes)
            seconds *= held
            seconds += latency.take(axes)
            return seconds

        if not value.places:  # all that can happen is a sum
            reduced = ends.partial[:, None] & ~ends.partial_goal
            return cost("all_reduce", reduced, self.local_elements(value, src)[:, None])
        return Pairs(ends, elements, cost).seconds()

    def among(self, asked: Sequence[tuple[Value, NDArray[np.int8]]]) -> list[Floats]:
        """For each value and its rows [N, A] the prices [N, N] from each row to each: `seconds`, many in one call."""
        found: dict[int, Floats] = {}
        batch: list[int] = []
        pairs = 0
        for number, (value, rows) in enumerate(asked):
            if len(rows) > FEW or value.apart is None:
                found[number] = self.seconds(value, rows, rows)
                continue
            batch.append(number)
            pairs += len(rows) ** 2
            if pairs > BATCH:
                found.update(zip(batch, self._among([asked[n] for n in batch]), strict=True))
                batch, pairs = [], 0
        if batch:
            found.update(zip(batch, self._among([asked[n] for n in batch]), strict=True))
        return [found[number] for number in range(len(asked))]

    def _among(self, asked: Sequence[tuple[Value, NDArray[np.int8]]]) -> Iterator[Floats]:
        """`among` for values whose places are apart, one pair after the other."""
        counts = [len(rows) for _, rows in asked]
        rows = np.concatenate([rows for _, rows in asked])
        firsts = itertools.accumulate(counts, initial=0)
        source, target = (
            np.concatenate(numbers)
            for numbers in zip(
                *(
                    (f + np.repeat(np.arange(n), n), f + np.tile(np.arange(n), n))
                    for f, n in zip(firsts, counts, strict=False)
                ),
                strict=True,
            )
        )
        parts = [value.apart for value, _ in asked if value.apart]
        places = max(len(value.places) for value, _ in asked)
        deep = max((len(terms) for _, here in parts for terms in here), default=1)
        # A missing place counts as one unsharded element; a missing part adds nothing.
        terms = np.zeros((2, places, deep, len(asked)))
        terms[0, :, 0], terms[1, :, 0], terms[1, :, 1:] = 1.0, 1.0, 1 << 62
        for number, (_, here) in enumerate(parts):
            for place, term in enumerate(here):
                terms[:, place, : len(term), number] = np.transpose(term)
        owner = np.repeat(np.arange(len(asked)), np.square(counts))
        factors, leaves = terms[..., owner, None]
        unsharded = np.array([value.itemsize * parts[n][0] for n, (value, _) in enumerate(asked)])[
            owner, None
        ]

        def size_bytes(sets: Masks | list[Masks], spread: Spread) -> Floats:
            total = unsharded
            for place in range(places):
                members = self.members.take(sets[place])
                held = [
                    factor * np.where(members <= np.maximum(leaf, 1), np.ceil(leaf / members), np.inf)
                    for factor, leaf in zip(factors[place], leaves[place], strict=True)
                ]
                total = total * functools.reduce(np.add, held)
            return total

        def cost(kind: str, axes: Masks, held: Floats) -> Floats:
            latency, per_byte = self._held_laws[kind]
            return per_byte.take(axes) * held + latency.take(axes)

        at = np.array([self.sets(rows, 2 + k) for k in range(places)], np.int64).reshape(-1, len(rows))
        partial = self.sets(rows, PARTIAL)
        ends = Ends(int(self.bits.sum()), at[:, source], at[:, target], partial[source], partial[target])
        seconds = Listed(ends, size_bytes, cost).seconds().ravel()
        ends_at = itertools.accumulate(n * n for n in counts)
        for count, end in zip(counts, ends_at, strict=True):
            yield seconds[end - count * count : end].reshape(count, count)

    def _terms(self, value: Value) -> list[list[list[tuple[int, Any]]]]:
        """Return items, parts and leaves as pairs: a place and its elements for each set of axes (infinite for more
        blocks than elements), or -1 and a number for an unsharded leaf. An item with a single place becomes one such
        table."""
        place_of = {leaf: k for k, leaves in enumerate(value.places) for leaf in leaves}
        numbers = iter(range(len(value.leaves)))
        terms: list[list[list[tuple[int, Any]]]] = []
        for item in value.sizes:
            parts: list[list[tuple[int, Any]]] = []
            for part in item:
                places = [place_of.get(next(numbers), -1) for _ in part]
                cut = [np.where(self.members <= max(n, 1), np.ceil(n / self.members), np.inf) for n in part]
                parts.append([(k, c if k >= 0 else n) for k, c, n in zip(places, cut, part, strict=True)])
            if len(used := {k for part in parts for k, _ in part} - {-1}) == 1:
                parts = [[(used.pop(), _fold([[[size for _, size in part] for part in parts]]))]]
            terms.append(parts)
        return terms

    def _one_by_one(self, value: Value, src: NDArray[np.int8], dst: NDArray[np.int8]) -> Floats:
        def price(a: TensorLayout, b: TensorLayout) -> float:
            steps = redistribute(a, b, self.mesh, value.itemsize, self.prices)
            return total_seconds(steps, self.mesh, value.itemsize, self.prices)

        ends = ([value.layout(row, self.mesh) for row in rows] for rows in (src, dst))
        found = [price(a, b) for a, b in itertools.product(*ends)]
        return np.array(found, dtype=np.float64).reshape(len(src), len(dst))


def _products(sizes: NDArray[np.int64]) -> Floats:
    """Per set of axes the product of their sizes."""
    found = np.ones(1)
    for size in sizes:
        found = np.concatenate([found, found * size])
    return found


def _fold(items: Iterable[Iterable[Iterable[Any]]]) -> Any:
    """Elements of a tensor from those of its leaves: products and, over the parts of a concatenation, sums."""
    return math.prod(functools.reduce(operator.add, map(math.prod, item)) for item in items)


__all__ = ["PARTIAL", "REPLICATED", "Table", "Value"]
