"""The modes with a cost model: what they search, and what they claim of what they found.

    recursive_programming   prime axis by prime axis, slowest link first; any number of ranks
    dynamic_programming     exact over a named space: (a) product states of up to three named axes, (b) two runs of the
                            finest mesh, (c) three runs, or four axes
    auto                    both, with known recipes beside them, ranked by the simulated step, under the memory limit

Modes that search nothing are priced in the same space, so that every plan has a price to compare.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from meshwright.ops.strategy import Strategy
from meshwright.search.auto import auto
from meshwright.search.planner import Found, Planner, Verdict, check_request, families_of
from meshwright.search.recursion import recursive_programming
from meshwright.search.solve import Problem, solve
from meshwright.search.space.build import Space
from meshwright.search.space.given import exactly, row_of
from meshwright.search.space.memory import memory_of
from meshwright.search.within import limited, too_large, within_memory

SEARCHES = ("recursive_programming", "dynamic_programming", "auto")


def search(planner: Planner, mode: str) -> Found:
    """The choice of a mode. Raises PlanError for a space or an inner search that does not exist."""
    check_request(planner.request)
    started = time.perf_counter()
    match mode:
        case "recursive_programming":
            found = _recursive(planner)
        case "dynamic_programming":
            found = _exact(planner)
        case _:
            found = auto(planner)
    return replace(found, claims={**found.claims, "search_seconds": time.perf_counter() - started})


def priced(planner: Planner, strategies: Mapping[str, Strategy]) -> Found | None:
    """Given strategies with the best hubs for them; None when the space has no name for one of them."""
    rows = {}
    for name, codes in planner.codes.items():
        row = row_of(codes, strategies[name], planner.scene.mesh)
        if row is None:
            return None
        rows[name] = row
    space = planner.space(exactly(rows), planner.storage(allowed=False))
    return planner.found(space, solve(space.problem()).states, {"space": "strategies as given"})


def _recursive(planner: Planner) -> Found:
    axes = len(planner.scene.mesh.axes)

    def run(multipliers: np.ndarray | None) -> Found:
        done = recursive_programming(
            planner.space,
            axes,
            inner=planner.request.inner,
            problem=None if multipliers is None else lambda space: _weighed(planner, space, multipliers),
        )
        return planner.found(
            done.space, done.states, {"space": f"one axis after the other, {done.sweeps} sweeps"}
        )

    return within_memory(planner, run)


def _weighed(planner: Planner, space: Space, multipliers: np.ndarray) -> Problem:
    return memory_of(space, planner.request.optimizer_states).weighed(space.problem(), multipliers)


def _exact(planner: Planner) -> Found:
    best: Found | None = None
    nearest: Verdict | None = None
    bound = np.inf
    for name, family in families_of(planner):
        solution = limited(planner, planner.space(family), None)
        bound = min(bound, solution.bound)
        if solution.found is None:
            nearest = nearest or solution.nearest
            continue
        found = replace(solution.found, claims={**solution.found.claims, "space": name})
        if best is None or found.claims["price_seconds"] < best.claims["price_seconds"]:
            best = found
    if best is None:
        raise too_large(planner, nearest)
    return replace(best, claims={**best.claims, "bound_seconds": bound, "gaps": _gaps(planner, best, bound)})


def _gaps(planner: Planner, found: Found, bound: float) -> dict[str, float]:
    """How far the price may be above the best: of the sum, or of what fits into memory where that is what decided."""
    gap = max(0.0, found.claims["price_seconds"] / bound - 1) if bound > 0 else 0.0
    return {"memory" if found.claims.get("memory_decided") else "sum": gap}
