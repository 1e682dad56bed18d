"""Elimination of very many variables, thousands in one step: for graphs of a model's size without equal layers.

What `eliminate` does for one variable after the other is done here for all of a *round*: variables of one or two
neighbours, none next to another. A chain is halved by each round, so that few are needed, and what a round costs is
arithmetic on arrays. The order depends on which pairs there are and not on their prices, so it is found once for all
problems of one graph. What is left, where every variable has three neighbours or more, goes to `eliminate`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.search.solve.eliminate import eliminate
from meshwright.search.solve.problem import NoStates, Problem

CHUNK = 1 << 16  # entries of a table that is made in one step: they stay in the cache

Numbers = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Round:
    """Variables that go together: `variables` [n], the tables to their neighbours and the neighbours, [n, 1] or [n, 2],
    and the table that is left between the two, [n]."""

    variables: Numbers
    tables: Numbers
    near: Numbers
    left: Numbers


class Rounds:
    """The order of an elimination. `ends` [E, 2] are the pairs of variables that have a table, the lower number first,
    each once; tables that are made follow these in `all_ends`."""

    def __init__(self, count: int, ends: Numbers) -> None:
        self.count, self.ends = count, ends
        self.rounds: list[Round] = []
        near: list[dict[int, int]] = [{} for _ in range(count)]  # neighbour → table
        for number, (u, v) in enumerate(ends.tolist()):
            near[u][v] = near[v][u] = number
        made = ends.tolist()
        waiting = [v for v in range(count) if len(near[v]) <= 2]
        while waiting:
            waiting = self._round(near, waiting, made)
        self.all_ends: Numbers = np.array(made, dtype=np.int64).reshape(-1, 2)
        self.core = [v for v in range(count) if near[v]]  # three neighbours or more

    def _round(self, near: list[dict[int, int]], waiting: list[int], made: list[list[int]]) -> list[int]:
        """Take out what can go together; returns who may go next."""
        beside: set[int] = set()
        asked: set[tuple[int, int]] = set()
        gone: dict[int, list[tuple[int, int, int, int, int, int]]] = {1: [], 2: []}
        later: dict[int, None] = {}
        for v in waiting:
            around = sorted(near[v].items())
            if not around:
                continue
            pair = (around[0][0], around[-1][0])
            if v in beside or pair in asked:
                later[v] = None
                continue
            beside.update(near[v])
            if len(around) == 1:
                ((a, table),) = around
                gone[1].append((v, table, -1, a, -1, -1))
                del near[a][v]
            else:
                asked.add(pair)
                (a, first), (b, second) = around
                del near[a][v], near[b][v]
                left = near[a].get(b)
                if left is None:
                    left = near[a][b] = near[b][a] = len(made)
                    made.append([a, b])
                gone[2].append((v, first, second, a, b, left))
            near[v] = {}
            later.update((w, None) for w, _ in around if len(near[w]) <= 2)
        for degree, rows in gone.items():
            if rows:
                v, first, second, a, b, left = np.array(rows, dtype=np.int64).T
                self.rounds.append(
                    Round(v, np.stack([first, second][:degree]), np.stack([a, b][:degree]), left)
                )
        return list(later)


class Tables:
    """The prices of a problem whose order is known: one array of all states, one of all tables."""

    def __init__(self, rounds: Rounds, sizes: Numbers) -> None:
        """`sizes` [N]: the states of each variable."""
        self.rounds, self.sizes = rounds, sizes
        self.starts = np.concatenate([[0], np.cumsum(sizes)])
        ends = rounds.all_ends
        self.places = np.concatenate([[0], np.cumsum(sizes[ends[:, 0]] * sizes[ends[:, 1]])])
        self.unary: Floats = np.zeros(int(self.starts[-1]))
        self.entries: Floats = np.zeros(int(self.places[-1]))

    def add_states(self, variables: Numbers, seconds: Floats) -> None:
        """Add [states, n] to the prices of n different variables."""
        self.unary[self.starts[variables] + np.arange(len(seconds))[:, None]] += seconds

    def add_pairs(self, tables: Numbers, seconds: Floats) -> None:
        """Add [states of the lower variable, states of the other, n] to n different tables."""
        rows, columns, count = seconds.shape
        self.entries[self.places[tables] + np.arange(rows * columns)[:, None]] += seconds.reshape(-1, count)

    def solved(self) -> tuple[Numbers, float]:
        """The best states and their price, from the entries as they were added. Raises NoStates."""
        unary, entries = self.unary.copy(), self.entries.copy()
        work = _Work(self, unary, entries)
        for taken in self.rounds.rounds:
            for part in work.parts(taken):
                work.forward(part)
        work.core()
        for taken in reversed(self.rounds.rounds):
            for part in work.parts(taken):
                work.back(part)
        price = self.price(work.states)
        if not math.isfinite(price):
            raise NoStates(None)
        return work.states, price

    def price(self, states: Numbers) -> float:
        """The price of one state per variable."""
        given = len(self.rounds.ends)
        low, high = self.rounds.ends.T
        at = self.places[:given] + states[low] * self.sizes[high] + states[high]
        return float(self.unary[self.starts[:-1] + states].sum() + self.entries[at].sum())

    def problem(self) -> Problem:
        """The same as a problem of its own."""
        unary = tuple(self.unary[a:b] for a, b in itertools.pairwise(self.starts.tolist()))
        pairs = {(u, v): self.table(self.entries, n) for n, (u, v) in enumerate(self.rounds.ends.tolist())}
        return Problem(unary, pairs)

    def table(self, entries: Floats, number: int) -> Floats:
        """One table."""
        shape = self.sizes[self.rounds.all_ends[number]]
        return entries[self.places[number] : self.places[number + 1]].reshape(shape)


@dataclass(frozen=True)
class _Part:
    """Variables of a round with as many states, neighbours with as many, in the same order."""

    variables: Numbers
    near: Numbers
    left: Numbers
    grids: list[Numbers]  # [states, states of the neighbour, n]: where the tables' entries stand
    size: int
    others: tuple[int, ...]


class _Work:
    """The prices while variables are eliminated, and the states found on the way back."""

    def __init__(self, tables: Tables, unary: Floats, entries: Floats) -> None:
        self.tables, self.unary, self.entries = tables, unary, entries
        self.states: Numbers = np.zeros(tables.rounds.count, dtype=np.int64)

    def parts(self, taken: Round) -> Iterator[_Part]:
        """The variables of a round by the shapes of what belongs to them."""
        sizes = self.tables.sizes
        of, others = sizes[taken.variables], sizes[taken.near]
        swapped = taken.variables[None, :] > taken.near  # the table has the neighbour first
        keys = np.concatenate([of[None, :], others, swapped.astype(np.int64)])
        for at in same_columns(keys):
            size, *more = keys[:, at[0]].tolist()
            degree = len(more) // 2
            tables, near = taken.tables[:, at], taken.near[:, at]
            grids = [
                self.tables.places[row] + _grid(size, other, bool(swap))[:, :, None]
                for row, other, swap in zip(tables, more[:degree], more[degree:], strict=True)
            ]
            yield _Part(taken.variables[at], near, taken.left[at], grids, size, tuple(more[:degree]))

    def own(self, variables: Numbers, size: int) -> Floats:
        return self.unary[self.tables.starts[variables] + np.arange(size)[:, None]]

    def forward(self, part: _Part) -> None:
        """Take the least over the states of the variables, into what is left."""
        first = self.entries[part.grids[0]] + self.own(part.variables, part.size)[:, None, :]
        if len(part.others) == 1:
            where = self.tables.starts[part.near[0]] + np.arange(part.others[0])[:, None]
            np.add.at(self.unary, where, first.min(axis=0))
            return
        second = self.entries[part.grids[1]]
        least = _least_of_sums(first, second)
        rows, columns = part.others
        where = self.tables.places[part.left] + np.arange(rows * columns)[:, None]
        self.entries[where] += least.reshape(rows * columns, -1)

    def back(self, part: _Part) -> None:
        """The best states of the variables beside those of their neighbours."""
        total = self.own(part.variables, part.size)
        every = np.arange(len(part.variables))
        for grid, near in zip(part.grids, part.near, strict=True):
            total = total + self.entries[grid[:, self.states[near], every]]
        self.states[part.variables] = total.argmin(axis=0)

    def core(self) -> None:
        """Solve the variables with three neighbours or more, and those with none."""
        tables, core = self.tables, self.tables.rounds.core
        left = self._left_alone()
        for size in np.unique(tables.sizes[left]).tolist():
            some = left[tables.sizes[left] == size]
            self.states[some] = self.own(some, size).argmin(axis=0)
        if not core:
            return
        place = {v: n for n, v in enumerate(core)}
        unary = tuple(self.unary[tables.starts[v] : tables.starts[v + 1]] for v in core)
        pairs = {
            (place[u], place[v]): tables.table(self.entries, n)
            for n, (u, v) in enumerate(tables.rounds.all_ends.tolist())
            if u in place and v in place
        }
        self.states[core] = eliminate(Problem(unary, pairs)).states

    def _left_alone(self) -> Numbers:
        """The variables that no round and no core has."""
        seen = np.zeros(len(self.states), dtype=bool)
        for taken in self.tables.rounds.rounds:
            seen[taken.variables] = True
        seen[self.tables.rounds.core] = True
        return np.flatnonzero(~seen)


def distinct_columns(keys: Numbers) -> tuple[Numbers, Numbers]:
    """The distinct columns of [rows, n], and [n] which of them each is."""
    rows = np.ascontiguousarray(keys.T, dtype=np.int64)
    _, first, number = np.unique(
        rows.view(f"V{8 * rows.shape[1]}").ravel(), return_index=True, return_inverse=True
    )
    return keys[:, first], number.ravel()


def same_columns(keys: Numbers) -> list[Numbers]:
    """The places of equal columns, together."""
    if not keys.shape[1]:
        return []
    _, number = distinct_columns(keys)
    order = np.argsort(number, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(number[order])) + 1)


def _grid(size: int, other: int, swapped: bool) -> Numbers:
    """Where the entries of a table stand: [states of the variable, states of the neighbour]."""
    mine, theirs = np.arange(size)[:, None], np.arange(other)[None, :]
    return theirs * size + mine if swapped else mine * other + theirs


def _least_of_sums(first: Floats, second: Floats) -> Floats:
    """min over s of first[s, i, n] + second[s, j, n]: [i, j, n]."""
    size, rows, count = first.shape
    columns = second.shape[1]
    found = np.empty((rows, columns, count))
    wide = max(1, CHUNK // (rows * columns))
    for start in range(0, count, wide):
        end = min(count, start + wide)
        one, other, least = (
            first[:, :, None, start:end],
            second[:, None, :, start:end],
            found[:, :, start:end],
        )
        np.add(one[0], other[0], out=least)
        total = np.empty_like(least)
        for s in range(1, size):
            np.add(one[s], other[s], out=total)
            np.minimum(least, total, out=least)
    return found


def ends_of(edges: Sequence[tuple[int, int]]) -> Numbers:
    """Distinct pairs of numbers, the lower first, as `Rounds` wants them."""
    return np.array(sorted({(min(e), max(e)) for e in edges}), dtype=np.int64).reshape(-1, 2)
