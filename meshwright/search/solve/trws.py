"""Lower bounds by moving prices along the pairs: sequential tree-reweighted message passing.

Kolmogorov, "Convergent tree-reweighted message passing" (2006), in the form of its successor SRMP (2015). A price may
be moved from a pair to one of its variables, state by state, without changing the price of any choice. A sweep walks
the variables in one order; each takes all that the pairs behind it can give, and hands it on in equal parts to the
pairs ahead. What a variable charges for every state equally leaves for a constant, the lower bound; it never falls.

The papers keep a part back where more pairs lie behind than ahead, which makes the fixed points provably good; handing
on everything stays a bound, and came nearer to the optimum at each round count tried on layers of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.search.solve.problem import NoStates, Problem

Messages = Mapping[tuple[int, int], tuple[np.ndarray, np.ndarray]]


@dataclass(eq=False)
class _Pair:
    """A pair: its two variables, earlier first, the prices [earlier, later], and what was moved to each end."""

    ends: tuple[int, int]
    matrix: np.ndarray
    moved: list[np.ndarray]


class Sweeps:
    """The prices of one problem while they are being moved.

    Every state must be allowed by each neighbour (`consistent`), so that only finite prices move. The sweeps follow
    the variables' own order: that of the computation is a good one. `start` are messages of a problem of the same
    shape, as `messages` gives them.
    """

    def __init__(self, problem: Problem, start: Messages | None = None) -> None:
        self.problem = problem
        self.constant = 0.0
        count = len(problem.unary)
        # per variable: a lower bound of the price with each state
        self.least = [row - np.inf for row in problem.unary]
        self._left = [row.copy() for row in problem.unary]
        self._back: list[list[_Pair]] = [[] for _ in range(count)]
        self._ahead: list[list[_Pair]] = [[] for _ in range(count)]
        for (u, v), matrix in problem.pairs.items():
            given = start.get((u, v)) if start else None
            moved = [m.copy() for m in given] if given else [np.zeros(k) for k in matrix.shape]
            self._left[u] += moved[0]
            self._left[v] += moved[1]
            pair = _Pair((u, v), matrix, moved)
            self._ahead[u].append(pair)
            self._back[v].append(pair)
        most = max((m.size for m in problem.pairs.values()), default=0)
        self._room = np.empty(most)

    @property
    def cost(self) -> float:
        """Entries that one round reads."""
        return round_cost(self.problem)

    def round(self) -> float:
        """One sweep each way; returns the lower bound and sets `least`."""
        for v in range(len(self._left)):
            self._visit(v, self._back[v], self._ahead[v], end=1)
        for v in reversed(range(len(self._left))):
            self._visit(v, self._ahead[v], self._back[v], end=0)
        return self.constant

    def _visit(self, v: int, behind: list[_Pair], ahead: list[_Pair], end: int) -> None:
        """Take from the pairs behind, in which v stands at `end`; charge the constant; hand on to the pairs ahead."""
        left = self._left[v]
        for pair in behind:
            other = pair.moved[1 - end]
            rest = self._room[: pair.matrix.size].reshape(pair.matrix.shape)
            np.subtract(pair.matrix, other[:, None] if end else other, out=rest)
            given = np.minimum.reduce(rest, axis=1 - end)
            left += given
            left -= pair.moved[end]
            pair.moved[end] = given
        alike = left.min()
        left -= alike
        self.constant += float(alike)
        if not end:
            self.least[v] = left + self.constant
        if ahead:
            part = left / len(ahead)
            for pair in ahead:
                pair.moved[1 - end] = pair.moved[1 - end] - part
                left -= part

    def decode(self) -> tuple[int, ...]:
        """A choice that follows the messages: each variable in order, given those before it (after a round)."""
        unary = self.problem.unary
        states = [0] * len(unary)
        for v in range(len(self._left)):
            total = unary[v].copy()
            for pair in self._back[v]:
                total += pair.matrix[states[pair.ends[0]]]
            for pair in self._ahead[v]:
                total += pair.moved[0]
            states[v] = int(total.argmin())
        return tuple(states)

    def messages(self) -> Messages:
        """Return the amounts that were moved to the two ends of each pair (u, v), u < v."""
        return {pair.ends: (pair.moved[0], pair.moved[1]) for pairs in self._ahead for pair in pairs}

    def within(self, price: float) -> list[np.ndarray]:
        """The states of each variable whose lower bound is at most `price` (after a round)."""
        return [np.flatnonzero(least <= price) for least in self.least]

    def only(self, kept: Sequence[np.ndarray], slim: Problem | None = None) -> Sweeps:
        """The sweeps go on over the states `kept` alone; the bound then holds for choices among these. `slim`: the
        problem over them, where it is there already."""
        moved = {(u, v): (a[kept[u]], b[kept[v]]) for (u, v), (a, b) in self.messages().items()}
        return Sweeps(slim or self.problem.only(kept), moved)


def round_cost(problem: Problem) -> float:
    """Entries that one round of sweeps reads."""
    return 2.0 * sum(m.size for m in problem.pairs.values())


def consistent(problem: Problem) -> list[np.ndarray]:
    """The states of each variable that are allowed and that every neighbour has a state for, to a fixed point.

    Raises NoStates with the variable that has none left.
    """
    allowed = [np.isfinite(row) for row in problem.unary]
    barred = {key: ~finite for key, m in problem.pairs.items() if not (finite := np.isfinite(m)).all()}
    around: dict[int, set[tuple[int, int]]] = {}
    for key in barred:
        for v in key:
            around.setdefault(v, set()).add(key)
    open_ = dict.fromkeys(barred)  # a set that keeps its order
    while open_:
        u, v = key = next(iter(open_))
        del open_[key]
        for w, supported in (
            (u, ~barred[key][:, allowed[v]].all(axis=1)),
            (v, ~barred[key][allowed[u]].all(axis=0)),
        ):
            if (allowed[w] & ~supported).any():
                allowed[w] &= supported
                if not allowed[w].any():
                    raise NoStates(w)
                open_.update(dict.fromkeys(sorted(around[w] - {key})))
    for v, states in enumerate(allowed):
        if not states.any():
            raise NoStates(v)
    return [np.flatnonzero(states) for states in allowed]
