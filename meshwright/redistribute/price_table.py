"""The formulas of `route` on sets of axes, for all pairs of N layouts with M layouts of one tensor; see `price_matrix`.

A set is an integer with bit a for axis a of the mesh. Mesh order is the order of bits, so "those of x below the lowest
of y" is ``x & below(y)``. Most sets follow from one layout and only one place of the other, of
which there are few. So they stand in tables [P, N, V] (places, layouts of the source, distinct sets of the goal at the
place) and [P, U, M], and only what is priced is spread out to [N, M].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Masks = NDArray[np.int64]  # sets of axes
Floats = NDArray[np.float64]
Spread = Callable[[int, Masks], Masks]  # place and a table of it → [N, M]
# Sets per place → elements of one rank, spread out.
Elements = Callable[[Masks | list[Masks], Spread], Floats]
Cost = Callable[[str, Masks, Floats], Floats]  # kind, sets, elements held → seconds


@dataclass(frozen=True)
class Ends:
    """The sets of axes at each place, [P, N] and [P, M], and the partial ones, [N] and [M]. `axes`: the set of all
    axes."""

    axes: int
    start: Masks
    goal: Masks
    partial: Masks
    partial_goal: Masks


class Pairs:
    """The axes that each place keeps, gets and loses. An illegal layout has infinite `elements`."""

    def __init__(self, ends: Ends, elements: Elements, cost: Cost) -> None:
        self.ends, self.elements, self.cost = ends, elements, cost
        self._sides()
        self.replicated = ends.axes & ~(self.partial | self.split)
        self.nothing = np.zeros(np.broadcast_shapes(self.split.shape, self.split_goal.shape), np.int64)
        self.summing = np.flatnonzero(ends.partial)  # the rows that have something to reduce
        self._arrivals()
        self._departures()

    def seconds(self) -> Floats:
        """[N, M]: the price of the cheapest schedule."""
        with np.errstate(invalid="ignore"):  # inf elements over no axes: nan, which fmin passes over
            least_sent = self._sending_least()
            settled = self._settled()
            others = np.fmin(self._waiting_least(), self._without_exchange())
            others[self.summing] += settled
            return np.fmin(least_sent, others)

    # ------------------------------------------------------------------------------------------------- the sets

    def _sides(self) -> None:
        """Compute all sets that depend on one end only, shaped to broadcast against the other: [N, 1] and [1, M], the
        sets at places [P, N, 1] and [P, 1, V] or [P, U, 1] and [P, 1, M]."""
        ends = self.ends
        few_start, self.row = _distinct(ends.start, ends.axes)
        few_goal, self.column = _distinct(ends.goal, ends.axes)
        self.start, self.few_goal = ends.start[:, :, None], few_goal[:, None, :]
        self.few_start, self.goal = few_start[:, :, None], ends.goal[:, None, :]
        self.partial, self.partial_goal = ends.partial[:, None], ends.partial_goal[None, :]
        self.split = np.bitwise_or.reduce(ends.start, axis=0, initial=0)[:, None]
        self.split_goal = np.bitwise_or.reduce(ends.goal, axis=0, initial=0)[None, :]

    def _arrivals(self) -> None:
        """[P, N, V], the axes at a place once it got some.

        Those that are there for good (`_Walk.fitting`): after the first slice `fits`, after a reduce-scatter of
        `summed` `scattered`, after another slice `refits`, once all is reduced `filled`; of the goal there is then
        `here`, and `early` says that what is not belongs below some of it. In whatever order: after the first slice
        `sliced`, after reductions `reduced`. `above`: from the first axis that does not stay upwards. `apart`,
        `apart_filled`: beyond the part in which the place agrees before and after the all-to-all, of all and of what is
        filled; of the latter, `only_goes` where after it nothing new is at the place.
        """
        start, goal, replicated, partial = self.start, self.few_goal, self.replicated, self.partial
        arrive, common = goal & ~start, start & goal & below(start ^ goal)
        sliced, summed = replicated & arrive, partial & arrive
        open_ = _all_if(start == common)  # nothing there that has to go, or to make room below it
        first = sliced & below(arrive & ~sliced)
        second = summed & below(arrive & ~first & ~summed)
        self.summed = second & open_
        self.fits = start | first & open_
        self.scattered = self.fits | self.summed
        self.refits = start | arrive & below(arrive & ~sliced & ~self.summed) & open_
        self.filled = start | arrive & below(arrive & ~sliced & ~summed) & open_
        self.sliced = start | sliced
        self.reduced = self.sliced | summed
        self.above = start & ~common
        grown = (first | second & _all_if(first == sliced)) & open_
        self.apart = (start | goal) & ~(common | grown)
        self.here = goal & (self.split | self.filled)
        self.early = (self.here & ~below(goal & ~self.here)) != 0
        common = self.filled & self.here & below(self.filled ^ self.here)
        self.apart_filled = (self.filled | self.here) & ~common
        self.only_goes = _all_if(self.here == common)

    def _departures(self) -> None:
        """[P, U, M], the axes at a place that leave it: those `padded`, those `gathered`. `ready`: with what stays and
        comes, in the order of the all-to-all; `shrunk`: what of the leaving ones is in that order already.

        What can leave at once from the top: pads, gathers below them, pads below these; with none of the first
        `lighter`, with none of them `bare` is left. `rest`, `late` and `shrunk_bare` are what is then still to leave,
        to be gathered, and in order.
        """
        start, goal = self.few_start, self.goal
        self.padded = start & self.partial_goal
        self.gathered = start & ~self.partial_goal & ~self.split_goal
        self.ready = goal | self.padded | self.gathered
        nothing_comes = _all_if(goal == start & goal & below(start ^ goal))
        self.shrunk = _in_order(start & ~goal, self.padded, self.gathered) & nothing_comes
        self.lighter = start & ~(self.padded & over(start & ~self.padded))
        bare = self.lighter & ~(self.gathered & over(self.lighter & ~self.gathered))
        self.at_once = self.lighter & ~bare
        bare = bare & ~(self.padded & over(bare & ~self.padded))
        self.rest, self.late = bare & (self.padded | self.gathered), bare & self.gathered
        self.gone = start & ~bare
        self.shrunk_bare = _in_order(bare & ~goal, bare & self.padded, self.late)
        self.padded_first = start & ~self.lighter

    # ----------------------------------------------------------------------------------------------- the prices

    def _sending_least(self) -> Floats:
        """`route._sending_least`."""
        moved = self._union(
            self._across(p, self.apart[p]) & ~self._down(p, self.shrunk[p]) for p in self.places
        )
        gathered = self._union(self._down(p, self.gathered[p]) for p in self.places)
        held = self.elements(self.reduced, self._across)
        seconds = self.cost("all_to_all", moved, held)
        seconds += self.cost("all_gather", gathered, self.elements(self.ready, self._down))
        if len(rows := self.summing):
            arriving, sums = self.partial[rows] & self._of_rows(self.split_goal), self._sums()
            at_once = self.cost("reduce_scatter", arriving, held[rows])
            at_once += self.cost("all_reduce", sums & ~arriving, held[rows])
            reduced = self.cost("all_reduce", sums, self._elements_of_rows(self.sliced))
            seconds[rows] += np.fmin(at_once, reduced)
        return seconds

    def _settled(self) -> Floats:
        """`route._settled`, for the rows that have something to reduce."""
        sums = self._sums()
        summed = sums & 0
        for p in self.places:
            summed |= self._across(p, self.summed[p, self.summing])
        at_once = self.cost("reduce_scatter", summed, self._elements_of_rows(self.scattered))
        at_once += self.cost("all_reduce", sums & ~summed, self._elements_of_rows(self.refits))
        return np.fmin(at_once, self.cost("all_reduce", sums, self._elements_of_rows(self.fits)))

    def _waiting_least(self) -> Floats:
        """`route._waiting_least`, without what `_settled` takes."""
        lighter, bare, ready, moved = list[Masks](), list[Masks](), list[Masks](), self.nothing
        for p in self.places:
            filled = self._across(p, self.filled[p])
            lighter.append(filled & ~self._down(p, self.padded_first[p]))
            bare.append(filled & ~self._down(p, self.gone[p]))
            ready.append(self._across(p, self.here[p]) | self._down(p, self.rest[p]))
            in_order = self._down(p, self.gone[p]) | self._down(p, self.shrunk_bare[p]) & self._across(
                p, self.only_goes[p]
            )
            moved = moved | self._across(p, self.apart_filled[p]) & ~in_order
        at_once = self._union(self._down(p, self.at_once[p]) for p in self.places)
        late = self._union(self._down(p, self.late[p]) for p in self.places)
        seconds = self.cost("all_gather", at_once, self.elements(lighter, _as_it_is))
        seconds += self.cost("all_to_all", moved, self.elements(bare, _as_it_is))
        seconds += self.cost("all_gather", late, self.elements(ready, _as_it_is))
        seconds[self._union(self._across(p, self.early[p]) for p in self.places) != 0] = np.inf
        return seconds

    def _without_exchange(self) -> Floats:
        """`route._without_exchange`, without what `_settled` takes."""
        gathered = self._union(map(self._in_the_way, self.places))
        return self.cost("all_gather", gathered, self.elements(self.filled, self._across))

    def _in_the_way(self, p: int) -> Masks:
        """`route._in_the_way`: all above what stays, but for what is padded right there."""
        above = self._across(p, self.above[p])
        padded = above & self.partial_goal
        return above & ~(padded & below(above ^ padded))

    def _sums(self) -> Masks:
        """Return the partial sums to reduce, for the rows that have any."""
        return self.partial[self.summing] & ~self._of_rows(self.partial_goal)

    # ----------------------------------------------------------------------------------------- from few to many

    @property
    def places(self) -> range:
        return range(len(self.ends.start))

    def _across(self, place: int, table: Masks) -> Masks:
        column: Masks = self.column[place]
        return table.take(column, axis=1)

    def _down(self, place: int, table: Masks) -> Masks:
        row: Masks = self.row[place]
        return table.take(row, axis=0)

    def _union(self, sets: Iterable[Masks]) -> Masks:
        return functools.reduce(np.bitwise_or, sets, self.nothing)

    def _of_rows(self, of_goal: Masks) -> Masks:
        """Select, of a set that depends on the goal, the rows that have something to reduce."""
        return of_goal

    def _elements_of_rows(self, sets: Masks) -> Floats:
        return self.elements(sets[:, self.summing], self._across)


class Listed(Pairs):
    """Pairs one after the other, [L, 1]: layout number i of the start with number i of the goal, each pair of a tensor
    of its own. Where tensors are many and their layouts few this is a fraction of a call for each tensor."""

    def _sides(self) -> None:
        ends = self.ends
        self.start = self.few_start = ends.start[:, :, None]
        self.goal = self.few_goal = ends.goal[:, :, None]
        self.partial, self.partial_goal = ends.partial[:, None], ends.partial_goal[:, None]
        self.split = np.bitwise_or.reduce(self.start, axis=0, initial=0)
        self.split_goal = np.bitwise_or.reduce(self.goal, axis=0, initial=0)

    def _across(self, place: int, table: Masks) -> Masks:
        return table

    def _down(self, place: int, table: Masks) -> Masks:
        return table

    def _of_rows(self, of_goal: Masks) -> Masks:
        return of_goal[self.summing]

    def _elements_of_rows(self, sets: Masks) -> Floats:
        return self.elements(sets, self._across)[self.summing]


def below(axes: Masks) -> Masks:
    """All axes below the lowest of a set; all there are where it is empty."""
    return (axes & -axes) - 1


def over(axes: Masks) -> Masks:
    """All axes above the highest of a set; all there are where it is empty."""
    return np.int64(-1) << np.frexp(axes)[1].astype(np.int64)


def _in_order(leave: Masks, padded: Masks, gathered: Masks) -> Masks:
    """Of the axes that leave a stack, the first ones that stand as wanted: the padded below the gathered."""
    first = padded & below(leave & ~padded)
    second = gathered & below(leave & ~padded & ~gathered)
    return first | second & _all_if(first == padded)


def _as_it_is(place: int, table: Masks) -> Masks:
    return table


def _all_if(condition: NDArray[np.bool_]) -> Masks:
    """All axes where it holds, none elsewhere."""
    return -condition.astype(np.int64)


def _distinct(sets: Masks, axes: int) -> tuple[Masks, Masks]:
    """[P, U]: the distinct sets of each place, filled up with the empty one, and [P, N]: which of them each is."""
    place = np.arange(len(sets))[:, None]
    seen = np.zeros((len(sets), axes + 1), np.bool_)
    seen[place, sets] = True
    number = seen.cumsum(axis=1) - 1
    few = np.zeros((len(sets), 1 + int(number.max(initial=0))), np.int64)
    here, found = seen.nonzero()
    few[here, number[here, found]] = found
    return few, number[place, sets]
