"""The recursion under a planner's memory limit: each turn solved with a price per byte, and what fits kept."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from meshwright.search.planner import Planner, SearchResult
from meshwright.search.recursion import recursive_programming
from meshwright.search.solve import Problem
from meshwright.search.space.build import Space
from meshwright.search.space.families import Family, resting
from meshwright.search.space.variables import ArraySpace


def recursion(
    planner: Planner, inner: str = "exact", rest: int = 0
) -> Callable[[np.ndarray | None], SearchResult]:
    """Return a function that runs the recursion for a price per byte at each instant, None for no price
    (`within.priced_by_bytes`). `rest`: the number of first axes that are left unused, for a graph that is not priced as
    arrays."""

    def make(family: Family | ArraySpace) -> Space:
        return planner.space(resting(family, rest) if rest and not isinstance(family, ArraySpace) else family)

    def run(multipliers: np.ndarray | None) -> SearchResult:
        def weighed(space: Space) -> Problem:
            problem = planner.problem(space)
            return problem if multipliers is None else planner.memory(space).weighed(problem, multipliers)

        vectorized = planner.vectorized(multipliers)
        # Arrays know the price of one batch alone, which is near enough for a first choice among thousands of nodes.
        plain = multipliers is None and (vectorized is not None or planner.techniques.micro_batches == 1)
        done = recursive_programming(
            make,
            planner.context.mesh,
            inner=inner,
            problem=None if plain else weighed,
            vectorized=vectorized,
        )
        return planner.found(
            done.space, done.states, {"space": f"a few axes after the others, {done.sweeps} sweeps"}
        )

    return run
