"""Prices of reshards for thousands of values at once: one schedule, with the sizes as columns.

`redistribute.price_table` has the formulas of all schedules from one layout to another. The axes of each step, and the
blocks that ranks hold before it, depend on the two layouts only; just the elements depend on the value. So the formulas
are run once for each pair of layouts with a recorder in place of elements and prices. The recorded steps, twelve of
each, are then priced for any number of values, equal steps once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from meshwright.redistribute.price_matrix import PARTIAL, Table
from meshwright.redistribute.price_table import Ends, Floats, Listed, Masks, Spread
from meshwright.search.solve.eliminate_batched import distinct_columns
from meshwright.search.vectorized.sizes import Numbers, Sizes

BITS = 62  # in which the axes at all places of a value are written down as one number
STEPS = 12  # of all schedules of a pair, in the order in which the formulas ask for them
OF_SUMS = range(2, 8)  # those that only pairs with something to add up have
ASKED_FOR_SUMS = range(2, 5)  # those that are not even asked for where no pair has


@dataclass(frozen=True)
class Ways:
    """How to get from layouts to layouts: `way` [L] of each pair, `steps` [ways, STEPS] of each way, `early` [ways]
    where one schedule is not allowed. Of each step its kind, its axes, and those at each place of what is held then."""

    table: Table
    way: Numbers
    steps: Numbers
    early: np.ndarray
    kinds: list[str]
    axes: Numbers
    held: Numbers

    def seconds(self, pairs: slice, sizes: Sizes) -> Floats:
        """The price of some pairs for each value: [pairs, V]."""
        ways, at = np.unique(self.way[pairs], return_inverse=True)
        steps, place = np.unique(self.steps[ways], return_inverse=True)
        cost = self._steps(steps, sizes)[place.reshape(len(ways), STEPS).T]
        with np.errstate(invalid="ignore"):  # as in `Pairs.seconds`: nan is passed over
            least_sent = cost[0] + cost[1] + np.fmin(cost[2] + cost[3], cost[4])
            settled = np.fmin(cost[5] + cost[6], cost[7])
            waiting = cost[8] + cost[9] + cost[10]
            waiting[self.early[ways]] = np.inf
            return np.fmin(least_sent, np.fmin(waiting, cost[11]) + settled)[at]

    def _steps(self, steps: Numbers, sizes: Sizes) -> Floats:
        """The seconds of steps for each value: [steps, V]."""
        table = self.table
        held, which = np.unique(self.held[steps], return_inverse=True)
        size_bytes = np.repeat(sizes.itemsize * sizes.whole[None, :], len(held), axis=0)
        for place in range(sizes.places):
            size_bytes *= sizes.lawful(place, table.members[self._at(held, place)])
        found = size_bytes[which]
        laws = [table.held_law(self.kinds[n]) for n in steps.tolist()]
        axes = self.axes[steps].tolist()
        latency, per_byte = np.array([(at[a], each[a]) for (at, each), a in zip(laws, axes, strict=True)]).T
        with np.errstate(invalid="ignore"):
            found *= per_byte[:, None]
        found += latency[:, None]
        return found

    def _at(self, held: Numbers, place: int) -> Numbers:
        """The axes at a place."""
        width = len(self.table.bits)
        return (held >> width * place) & ((1 << width) - 1)


def ways(table: Table, places: int, source: np.ndarray, target: np.ndarray) -> Ways:
    """The ways from each row of codes to the same row of `target` [L, axes], of values with so many places."""
    recorder = _Recorder(table, max(1, places), source, target)
    axes, held = np.zeros((2, STEPS, len(source)), dtype=np.int64)
    kinds = [""] * STEPS
    every = len(recorder.steps) == STEPS
    numbers = [n for n in range(STEPS) if every or n not in ASKED_FOR_SUMS]
    for number, (kind, over, before) in zip(numbers, recorder.steps, strict=True):
        kinds[number] = kind
        where = recorder.summing if number in OF_SUMS else slice(None)
        axes[number, where], held[number, where] = over, before
    kind = np.where(axes > 0, np.arange(STEPS)[:, None], 0)  # over no axes all kinds are nothing
    steps, number = distinct_columns(np.stack([kind.ravel(), axes.ravel(), held.ravel()]))
    found, way = distinct_columns(np.concatenate([number.reshape(STEPS, -1), recorder.barred[None, :]]))
    return Ways(table, way, found[:STEPS].T, found[STEPS] != 0, [kinds[k] for k in steps[0]], *steps[1:])


class _Recorder(Listed):
    """Runs the formulas for pairs of layouts, and writes down each step instead of its price."""

    def __init__(self, table: Table, places: int, source: np.ndarray, target: np.ndarray) -> None:
        width = len(table.bits)
        assert width * places <= BITS, (width, places)
        self.steps: list[tuple[str, Masks, Floats]] = []
        start, goal = (
            np.array([table.sets(rows, 2 + k) for k in range(places)], np.int64) for rows in (source, target)
        )
        pending = (table.sets(rows, PARTIAL) for rows in (source, target))

        def elements(sets: Masks | list[Masks], spread: Spread) -> Floats:
            return functools.reduce(np.bitwise_or, (sets[k] << width * k for k in range(places)))

        def cost(kind: str, axes: Masks, held: Floats) -> Floats:
            axes, held = np.broadcast_arrays(axes, held)
            self.steps.append((kind, axes[:, 0], held[:, 0]))
            return np.zeros(axes.shape)

        super().__init__(Ends(int(table.bits.sum()), start, goal, *pending), elements, cost)
        self.barred = np.zeros(len(source), dtype=np.int64)
        self.seconds()

    def _waiting_least(self) -> Floats:
        found = super()._waiting_least()
        self.barred = np.isinf(found[:, 0]).astype(np.int64)
        return found
