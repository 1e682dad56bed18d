"""States that only dearer choices have than a known one, found before all prices of pairs are there.

Where nodes have a thousand states each, the prices of their pairs take most of a search's time and memory, and a bound
that is a little low tells as much as an exact one. So pairs are priced as float32 first, rounded down. Sweeps over
these bound the price of every choice with a state from below; where that exceeds the price of a choice that is known,
the state is in no better one. What is left is priced exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from meshwright.search.budget import SPACE
from meshwright.search.solve.problem import Problem
from meshwright.search.solve.trws import Sweeps, consistent

Placed = tuple[int | tuple[int, int], np.ndarray]
"""A variable and what its states cost more [states], or two and what their pairs cost [states, states]."""


def alone(unary: Sequence[np.ndarray], most: float) -> list[np.ndarray]:
    """The states of each variable, ascending, that are within `most` if all others were the cheapest they can be and
    nothing were sent, and a few more."""
    least = sum(float(row.min()) for row in unary)
    return [_near(row - row.min() + least, most) for row in unary]


def worth_keeping(unary: Sequence[np.ndarray], pairs: Iterable[Placed], most: float) -> list[np.ndarray]:
    """The states of each variable, ascending, that a choice of a price up to `most` may have, and a few more. No price
    may be higher than it is in truth. Raises NoStates."""
    problem = _problem(unary, pairs)
    allowed = consistent(problem)
    sweeps = Sweeps(problem.only(allowed))
    every = sweeps.cost / 2
    kept: list[np.ndarray] = []
    for _ in range(SPACE.prune_rounds):
        sweeps.round()
        kept = [_near(least, most) for least in sweeps.least]
        if sum(len(kept[u]) * len(kept[v]) for u, v in sweeps.problem.pairs) <= SPACE.prune_share * every:
            break
    return [a[k] for a, k in zip(allowed, kept, strict=True)]


def _near(least: np.ndarray, most: float) -> np.ndarray:
    few = (
        np.partition(least, SPACE.prune_keeps)[SPACE.prune_keeps]
        if len(least) > SPACE.prune_keeps
        else np.inf
    )
    return np.flatnonzero(least <= max(most, few))


def _problem(unary: Sequence[np.ndarray], placed: Iterable[Placed]) -> Problem:
    states, pairs = list(unary), dict[tuple[int, int], np.ndarray]()
    for at, seconds in placed:
        if isinstance(at, int):
            states[at] = states[at] + seconds
        else:
            pairs[at] = pairs[at] + seconds if at in pairs else seconds
    return Problem(tuple(states), pairs)
