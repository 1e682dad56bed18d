"""Values of one structure as columns of arrays: those whose places and parts are the same, whatever their sizes.

The elements of a value are a product over its places (`Value.apart`), so what a rank holds of thousands of values is
one expression. A value for which that is not so is a structure of its own.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshwright.redistribute.price_matrix import Table, Value

Numbers = np.ndarray  # int64
Floats = np.ndarray  # float64


@dataclass(frozen=True)
class Sizes:
    """V values of one structure. `factors`, `leaves` [places, parts, V] as in `Value.apart`, `whole` [V] elements.

    `values` has one of each column; `plain` says that the arrays are there.
    """

    values: list[Value]
    itemsize: int
    whole: Floats
    factors: Floats
    leaves: Floats
    plain: bool = True

    @property
    def places(self) -> int:
        """The number of places."""
        return len(self.leaves)

    def take(self, columns: Numbers) -> Sizes:
        """Some of the values."""
        values = [self.values[n] for n in columns.tolist()]
        arrays = self.whole[columns], self.factors[..., columns], self.leaves[..., columns]
        return Sizes(values, self.itemsize, *arrays, self.plain)

    def held(self, place: int, members: Numbers) -> Floats:
        """Return the elements that a rank holds along a place that is sharded over so many members: [*members.shape,
        V]."""
        parts = zip(self.factors[place], self.leaves[place], strict=True)
        return sum_of([factor * np.ceil(leaf / members[..., None]) for factor, leaf in parts])

    def lawful(self, place: int, members: Numbers) -> Floats:
        """The same, infinite where there are more blocks than elements."""
        parts = zip(self.factors[place], self.leaves[place], strict=True)
        cut = members[..., None]
        return sum_of([f * np.where(cut <= leaf, np.ceil(leaf / cut), np.inf) for f, leaf in parts])

    def elements(self, table: Table, codes: np.ndarray) -> Floats:
        """`Table.local_elements` of rows of codes [N, axes] for every value: [N, V]."""
        total = np.repeat(self.whole[None, :], len(codes), axis=0)
        for place in range(self.places):
            total *= self.held(place, table.members[table.sets(codes, 2 + place)])
        return total


def sum_of(amounts: list[Floats]) -> Floats:
    """The sum of arrays of one shape."""
    return functools.reduce(np.add, amounts)


class Values:
    """The values of a graph: `structure` and `column` of each name."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.structure: dict[str, int] = {}
        self.column: dict[str, int] = {}
        numbers: dict[object, int] = {}
        known: dict[Value, tuple[int, int]] = {}
        columns: dict[int, list[Value]] = defaultdict(list)
        for name, value in values.items():
            at = known.get(value)
            if at is None:
                apart = value.apart
                kind = (value.itemsize, tuple(map(len, apart[1]))) if apart else value
                number = numbers.setdefault(kind, len(numbers))
                at = known[value] = number, len(columns[number])
                columns[number].append(value)
            self.structure[name], self.column[name] = at
        self.sizes = [_stacked(columns[number]) for number in range(len(numbers))]


def _stacked(values: list[Value]) -> Sizes:
    first = values[0].apart
    if first is None:
        (value,) = values
        return Sizes(values, value.itemsize, np.zeros(1), np.zeros((0, 1, 1)), np.zeros((0, 1, 1)), False)
    deep = max((len(terms) for terms in first[1]), default=1)
    # A part that an item has not adds nothing.
    found = np.zeros((2, len(first[1]), deep, len(values)))
    found[1] = 1 << 62
    for number, value in enumerate(values):
        assert value.apart
        for place, terms in enumerate(value.apart[1]):
            found[:, place, : len(terms), number] = np.transpose(terms)
    whole = np.array([value.apart[0] for value in values if value.apart])
    return Sizes(values, values[0].itemsize, whole, found[0], found[1])
