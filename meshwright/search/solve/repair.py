"""From choices that almost fit to one that does: mix two of them, and change single variables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from meshwright.search.solve.problem import Memory, Problem

States = tuple[int, ...]


def mixes(
    problem: Problem, memory: Memory, fits: States, cheap: States, limits: np.ndarray
) -> Iterator[States]:
    """Choices between one that fits and a cheaper one that may not.

    Variables in which the two differ fall into groups that no pair connects, so that what each group saves and needs
    adds up: they are taken over in the order of saving per need, as long as the sum fits. The last ones are given
    back one by one, for a caller that refuses what fits by the sum.
    """
    groups = _groups(problem, memory, [v for v, s in enumerate(fits) if cheap[v] != s])
    used = memory.totals(fits)
    base = problem.price(fits)
    worth = []
    for group in groups:
        states = _with(fits, group, cheap)
        saved, need = base - problem.price(states), memory.totals(states) - used
        if saved > 0:
            worth.append((saved / max(float(need.max()), 1e-12), group, need))
    worth.sort(key=lambda w: (-w[0], w[1]))
    taken = []
    for _, group, need in worth:
        if (used + need <= limits).all():
            used = used + need
            taken.append(group)
    while taken:
        yield _with(fits, [v for group in taken for v in group], cheap)
        taken = taken[: len(taken) // 2]


def _with(states: States, places: Sequence[int], other: States) -> States:
    taken = set(places)
    return tuple(o if v in taken else s for v, (s, o) in enumerate(zip(states, other, strict=True)))


def _groups(problem: Problem, memory: Memory, variables: Sequence[int]) -> list[list[int]]:
    """The connected parts of some variables under the pairs between them."""
    near: dict[int, set[int]] = {v: set() for v in variables}
    for u, v in (*problem.pairs, *memory.pairs):
        if u in near and v in near:
            near[u].add(v)
            near[v].add(u)
    groups, seen = [], set()
    for v in variables:
        if v in seen:
            continue
        group, open_ = [], [v]
        seen.add(v)
        while open_:
            w = open_.pop()
            group.append(w)
            fresh = sorted(near[w] - seen)
            seen.update(fresh)
            open_ += fresh
        groups.append(sorted(group))
    return groups


class Moves:
    """Price and bytes of every change of one variable, kept up to date as changes are made."""

    def __init__(self, problem: Problem, memory: Memory, states: States) -> None:
        self.problem, self.memory = problem, memory
        self.states = list(states)
        self.totals = memory.totals(states)
        self._near: list[list[tuple[int, np.ndarray]]] = [[] for _ in states]
        self._bytes: list[list[tuple[int, np.ndarray]]] = [[] for _ in states]
        for (u, v), m in problem.pairs.items():
            self._near[u].append((v, m.T))
            self._near[v].append((u, m))
        for (u, v), b in memory.pairs.items():
            self._bytes[u].append((v, b.transpose(2, 1, 0)))
            self._bytes[v].append((u, b.transpose(1, 2, 0)))
        self.dearer = [self._price(v) for v in range(len(states))]  # float64[K] per variable
        self.more = [self._need(v) for v in range(len(states))]  # float64[K, T] per variable

    def _price(self, v: int) -> np.ndarray:
        total = self.problem.unary[v] + sum(m[self.states[w]] for w, m in self._near[v])
        return total - total[self.states[v]]

    def _need(self, v: int) -> np.ndarray:
        total = self.memory.amounts[v] + sum(b[self.states[w]] for w, b in self._bytes[v])
        return total - total[self.states[v]]

    def make(self, v: int, state: int) -> None:
        self.totals = self.totals + self.more[v][state]
        self.states[v] = state
        for w in {v, *(w for w, _ in self._near[v])}:
            self.dearer[w] = self._price(w)
        for w in {v, *(w for w, _ in self._bytes[v])}:
            self.more[w] = self._need(w)

    def to_fit(self, limits: np.ndarray) -> bool:
        """Make the changes that free most per price until the totals fit; False when none helps any more."""
        for _ in range(4 * len(self.states)):
            over = np.maximum(self.totals - limits, 0.0)
            if not over.any():
                return True
            best, rate = None, math.inf
            for v, (dearer, more) in enumerate(zip(self.dearer, self.more, strict=True)):
                freed = over.sum() - np.maximum(self.totals + more - limits, 0.0).sum(axis=1)
                useful = np.flatnonzero((freed > 1e-12 * over.sum()) & np.isfinite(dearer))
                if len(useful):
                    rates = np.maximum(dearer[useful], 0.0) / freed[useful]
                    s = int(rates.argmin())
                    if rates[s] < rate:
                        best, rate = (v, int(useful[s])), float(rates[s])
            if best is None:
                return False
            self.make(*best)
        return False

    def to_gain(self, limits: np.ndarray, accept: Callable[[States], bool]) -> None:
        """Make the change that saves most among those that still fit, until none is left or accepted."""
        refused: set[tuple[int, int]] = set()
        for _ in range(4 * len(self.states)):
            gains = []
            for v, (dearer, more) in enumerate(zip(self.dearer, self.more, strict=True)):
                fit = (dearer < -1e-12) & (self.totals + more <= limits).all(axis=1)
                gains += [
                    (float(dearer[s]), v, int(s)) for s in np.flatnonzero(fit) if (v, int(s)) not in refused
                ]
            if not gains:
                return
            _, v, s = min(gains)
            states = tuple(s if w == v else now for w, now in enumerate(self.states))
            if accept(states):
                self.make(v, s)
            else:
                refused.add((v, s))
