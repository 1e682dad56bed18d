"""The formulas of `route` on sets of axes, for all pairs of N layouts with M layouts of one tensor; see `matrix`.

A set is an integer with bit a for axis a of the mesh. Mesh order is the order of bits, so "those of x below the lowest
of y" is ``x & below(y)``. Most sets follow from one layout as a whole and, of the other, only what is at one place, of
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
Spread = Callable[[int, NDArray], NDArray]  # place and a table of it → [N, M]
Elements = Callable[[Masks, Spread], Floats]  # sets per place → elements of one rank, spread out
Cost = Callable[[str, Masks, Floats], Floats]  # kind, sets, elements held → seconds


@dataclass(frozen=True)
class Ends:
    """The sets of axes at each place, [P, N] and [P, M], and the pending ones, [N] and [M], of all `axes`."""

    axes: int
    start: Masks
    goal: Masks
    pending: Masks
    pending_goal: Masks


class Pairs:
    """What each place keeps, gets and loses. `elements` of an unlawful layout are infinite."""

    def __init__(self, ends: Ends, elements: Elements, cost: Cost) -> None:
        self.ends, self.elements, self.cost = ends, elements, cost
        self.few_start, self.row = _distinct(ends.start)
        self.few_goal, self.column = _distinct(ends.goal)
        self.split_goal = np.bitwise_or.reduce(ends.goal, axis=0, initial=0)
        self.whole = ends.axes & ~(ends.pending | np.bitwise_or.reduce(ends.start, axis=0, initial=0))
        self.nothing = np.zeros((len(ends.pending), len(ends.pending_goal)), np.int64)
        self.summing = np.flatnonzero(ends.pending)  # the rows that have something to reduce
        self._arrivals()
        self._departures()

    def seconds(self) -> Floats:
        """[N, M]: the price of the cheapest schedule."""
        with np.errstate(invalid="ignore"):  # inf elements over no axes: nan, which fmin passes over
            return np.fmin(self._exchanging(), self._gathering())

    # ------------------------------------------------------------------------------------------------- the sets

    def _arrivals(self) -> None:
        """[P, N, V], the axes at a place once it got some.

        Those that are there for good (`_Walk.fitting`): after the first slice `fits`, after a reduce-scatter of
        `summed` `scattered`, after another slice `refits`, once all is reduced `filled`. In whatever order: after the
        first slice `sliced`, after reductions `split`. `above`: from the first axis that does not stay upwards.
        `apart`: beyond the part in which the place agrees before and after the all-to-all.
        """
        start, goal = self.ends.start[:, :, None], self.few_goal[:, None, :]
        whole, pending = self.whole[:, None], self.ends.pending[:, None]
        arrive, common = goal & ~start, start & goal & below(start ^ goal)
        sliced, summed = whole & arrive, pending & arrive
        open_ = _all_if(start == common)  # nothing there that has to go, or to make room below it
        first = sliced & below(arrive & ~sliced)
        second = summed & below(arrive & ~first & ~summed)
        self.summed = second & open_
        self.fits = start | first & open_
        self.scattered = self.fits | self.summed
        self.refits = start | arrive & below(arrive & ~sliced & ~self.summed) & open_
        self.filled = start | arrive & below(arrive & ~sliced & ~summed) & open_
        self.sliced = start | sliced
        self.split = self.sliced | summed
        self.above = start & ~common
        grown = (first | second & _all_if(first == sliced)) & open_
        self.apart = (start | goal) & ~(common | grown)

    def _departures(self) -> None:
        """[P, U, M]: of the axes at a place those `gathered`; `ready` after the all-to-all (what stays and comes, then
        what is padded, then what is gathered); `shrunk`: what of the leaving ones is in that order already."""
        start, goal = self.few_start[:, :, None], self.ends.goal[:, None, :]
        padded = start & self.ends.pending_goal
        self.gathered = start & ~self.ends.pending_goal & ~self.split_goal
        self.ready = goal | padded | self.gathered
        leave = start & ~goal
        first = padded & below(leave & ~padded)
        second = self.gathered & below(leave & ~padded & ~self.gathered)
        nothing_comes = _all_if(goal == start & goal & below(start ^ goal))
        self.shrunk = (first | second & _all_if(first == padded)) & nothing_comes

    # ----------------------------------------------------------------------------------------------- the prices

    def _exchanging(self) -> Floats:
        """`route._exchanging`."""
        moved = _union(
            self.nothing,
            (self._across(p, self.apart[p]) & ~self._down(p, self.shrunk[p]) for p in self.places),
        )
        gathered = _union(self.nothing, (self._down(p, self.gathered[p]) for p in self.places))
        # A scalar has one element wherever it is: its count is no array yet.
        held = np.broadcast_to(self.elements(self.split, self._across), self.nothing.shape)
        seconds = self.cost("all_to_all", moved, held)
        seconds += self.cost("all_gather", gathered, self.elements(self.ready, self._down))
        if len(rows := self.summing):
            reduced, arriving = self._reduced(), self.ends.pending[rows, None] & self.split_goal
            at_once = self.cost("reduce_scatter", arriving, held[rows])
            at_once += self.cost("all_reduce", reduced & ~arriving, held[rows])
            whole = self.cost("all_reduce", reduced, self._elements_of_rows(self.sliced))
            seconds[rows] += np.fmin(at_once, whole)
        return seconds

    def _gathering(self) -> Floats:
        """`route._gathering`."""
        gathered = _union(self.nothing, map(self._in_the_way, self.places))
        seconds = self.cost("all_gather", gathered, self.elements(self.filled, self._across))
        if len(rows := self.summing):
            reduced = self._reduced()
            summed = _union(self.nothing[rows], (self._across(p, self.summed[p, rows]) for p in self.places))
            at_once = self.cost("reduce_scatter", summed, self._elements_of_rows(self.scattered))
            at_once += self.cost("all_reduce", reduced & ~summed, self._elements_of_rows(self.refits))
            whole = self.cost("all_reduce", reduced, self._elements_of_rows(self.fits))
            seconds[rows] += np.fmin(at_once, whole)
        return seconds

    def _in_the_way(self, p: int) -> Masks:
        """`route._in_the_way`: all above what stays, but for what is padded right there."""
        above = self._across(p, self.above[p])
        padded = above & self.ends.pending_goal
        return above & ~(padded & below(above ^ padded))

    def _reduced(self) -> Masks:
        return self.ends.pending[self.summing, None] & ~self.ends.pending_goal

    # ----------------------------------------------------------------------------------------- from few to many

    @property
    def places(self) -> range:
        return range(len(self.ends.start))

    def _across(self, place: int, table: NDArray) -> NDArray:
        return table.take(self.column[place], axis=1)

    def _down(self, place: int, table: NDArray) -> NDArray:
        return table.take(self.row[place], axis=0)

    def _elements_of_rows(self, sets: Masks) -> Floats:
        return self.elements(sets[:, self.summing], self._across)


def _union(nothing: Masks, sets: Iterable[NDArray]) -> Masks:
    """The union over places; without places `nothing`."""
    return functools.reduce(np.bitwise_or, sets, nothing)


def below(axes: Masks) -> Masks:
    """All axes below the lowest of a set; all there are where it is empty."""
    return (axes & -axes) - 1


def _all_if(condition: NDArray[np.bool_]) -> Masks:
    """All axes where it holds, none elsewhere."""
    return -condition.astype(np.int64)


def _distinct(sets: Masks) -> tuple[Masks, Masks]:
    """[P, U]: the distinct sets of each place, filled up with the empty one, and [P, N]: which of them each is."""
    found = [np.unique(row, return_inverse=True) for row in sets]
    few = np.zeros((len(sets), max((len(f) for f, _ in found), default=0)), np.int64)
    for line, (row, _) in zip(few, found, strict=True):
        line[: len(row)] = row
    return few, np.array([i.reshape(-1) for _, i in found], np.int64).reshape(sets.shape)
