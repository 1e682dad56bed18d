"""The recursion under a planner's memory limit: each axis solved with a price per byte, and what fits kept."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from meshwright.search.planner import Found, Planner
from meshwright.search.recursion import recursive_programming
from meshwright.search.solve import Problem
from meshwright.search.space.build import Space


def recursion(planner: Planner, inner: str = "exact") -> Callable[[np.ndarray | None], Found]:
    """What the recursion finds for a price per byte at each instant, None being no price (`within.priced_by_bytes`)."""
    axes = len(planner.scene.mesh.axes)

    def run(multipliers: np.ndarray | None) -> Found:
        def weighed(space: Space) -> Problem:
            assert multipliers is not None
            return planner.memory(space).weighed(space.problem(), multipliers)

        done = recursive_programming(
            planner.space, axes, inner=inner, problem=None if multipliers is None else weighed
        )
        return planner.found(
            done.space, done.states, {"space": f"one axis after the other, {done.sweeps} sweeps"}
        )

    return run
