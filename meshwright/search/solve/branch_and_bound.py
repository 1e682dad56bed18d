"""Parts of all choices, for branch and bound under memory limits: narrowed by bounds, split in two by their bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from meshwright.search.budget import SOLVE
from meshwright.search.solve.problem import Memory, NoStates, Problem
from meshwright.search.solve.repair import States
from meshwright.search.solve.trws import Messages, consistent


@dataclass(eq=False)
class Part:
    """The choices with states `kept` (indices per variable), a lower bound of what fits among them, and where it is.

    `held` is the bound under the tighter limits last tried; `split` names a variable and those of its states that go
    to one side, if the part is to be split in two.
    """

    kept: list[np.ndarray]
    problem: Problem
    memory: Memory
    multipliers: np.ndarray
    bound: float = -math.inf
    held: float = -math.inf
    messages: Messages = field(default_factory=dict)
    split: tuple[int, np.ndarray] | None = None

    def has(self, states: States) -> bool:
        """True if every state is in the part."""
        places = (int(kept.searchsorted(s)) for kept, s in zip(self.kept, states, strict=True))
        return all(p < len(k) and k[p] == s for p, k, s in zip(places, self.kept, states, strict=True))

    def only(self, places: Sequence[np.ndarray]) -> Part:
        """The choices with the states at `places`; raises NoStates where neighbours leave none."""
        again = consistent(self.problem.only(places))
        places = [p[a] for p, a in zip(places, again, strict=True)]
        return Part(
            [k[p] for k, p in zip(self.kept, places, strict=True)],
            self.problem.only(places),
            self.memory.only(places),
            self.multipliers,
            self.bound,
            messages={(u, v): (a[places[u]], b[places[v]]) for (u, v), (a, b) in self.messages.items()},
            split=self.split,
        )

    def narrow(self, least: Sequence[np.ndarray], most: float) -> None:
        """Drop for good the states whose lower bound exceeds `most`; the bound is inf when nothing is left."""
        places = [np.flatnonzero(row <= most) for row in least]
        sizes = self.problem.sizes
        left = sum(len(places[u]) * len(places[v]) for u, v in self.problem.pairs)
        if left > SOLVE.worth_copying * sum(sizes[u] * sizes[v] for u, v in self.problem.pairs):
            return
        try:
            slim = self.only(places)
        except NoStates:
            self.bound = math.inf
            return
        self.kept, self.problem, self.memory, self.messages = (
            slim.kept,
            slim.problem,
            slim.memory,
            slim.messages,
        )

    def halves(self) -> list[Part]:
        """The part split in two: as `split` says, else along the variable whose bytes differ most."""
        v, side = self.split or (0, np.zeros(0))
        low = np.isin(self.kept[v], side)
        if low.all() or not low.any():
            needs = [a.sum(axis=1) for a in self.memory.amounts]
            v = max(range(len(needs)), key=lambda v: (len(needs[v]) > 1, np.ptp(needs[v])))
            low = np.zeros(len(needs[v]), dtype=bool)
            low[np.argsort(needs[v], kind="stable")[: len(low) // 2]] = True
        found = []
        for chosen in (low, ~low):
            places = [np.arange(len(k)) for k in self.kept]
            places[v] = np.flatnonzero(chosen)
            with suppress(NoStates):
                found.append(self.only(places))
        return found


def split_of(
    mix: Sequence[tuple[float, States]], memory: Memory, prices: np.ndarray
) -> tuple[int, np.ndarray] | None:
    """The variable whose bytes, at these prices, the two main choices of a mix differ in most, and its states below
    their middle; None where the mix is one choice."""
    if len(mix) < 2:
        return None
    (_, one), (_, two), *_ = sorted(mix, key=lambda m: (-m[0], m[1]))
    best, split = 0.0, None
    for v, (s, t) in enumerate(zip(one, two, strict=True)):
        worth = memory.amounts[v] @ prices
        if abs(worth[s] - worth[t]) > best:
            best = float(abs(worth[s] - worth[t]))
            split = (v, np.flatnonzero(worth < (worth[s] + worth[t]) / 2))
    return split
