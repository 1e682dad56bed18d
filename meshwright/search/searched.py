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

from meshwright.ops.strategy import WHOLE, Strategy
from meshwright.search.data_parallel import assign_batch
from meshwright.search.planner import Found, Planner, Verdict, check_request, families_of
from meshwright.search.recursion import recursive_programming
from meshwright.search.solve import Problem, solve
from meshwright.search.space.build import Space
from meshwright.search.space.given import exactly, row_of
from meshwright.search.space.memory import memory_of
from meshwright.search.within import fits, limited, too_large, within_memory

SEARCHES = ("recursive_programming", "dynamic_programming", "auto")
ALPHAS = (1.0, 0.5)  # weights of computing against what can hide beside it


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
            found = _auto(planner)
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


def _auto(planner: Planner) -> Found:
    """Optima for several weights of what can hide, with recipes beside them; the best simulated step that fits."""
    tried: list[tuple[str, Found]] = []
    nearest: list[Verdict] = []
    step_bound, sum_bound, space_name = 0.0, np.inf, ""
    try:
        for name, found in recipes(planner):
            tried.append((name, found))
            planner.tell(name, found.claims.get("step_seconds", found.claims["price_seconds"]), None)
        for name, family in families_of(planner):
            space = planner.space(family)
            bounds = []
            for alpha in (None, *ALPHAS):
                solution = limited(planner, space, alpha)
                bounds.append(solution.bound)
                nearest += [solution.nearest] if solution.nearest else []
                if solution.found is not None:
                    tried.append(
                        (
                            f"{name[:3]} optimum" if alpha is None else f"{name[:3]} optimum, α={alpha}",
                            solution.found,
                        )
                    )
                planner.tell(
                    name, min(map(_step, (f for _, f in tried)), default=None), max(bounds[1:], default=None)
                )
            sum_bound = min(sum_bound, bounds[0])
            step_bound = max(bounds[1:]) if not step_bound else min(step_bound, max(bounds[1:]))
            space_name = f"{space_name} and {name}" if space_name else name
    except KeyboardInterrupt:
        if not tried:
            raise
    fitting = [(n, f) for n, f in tried if fits(planner, f)]
    if not fitting:
        seen = [f.verdict for _, f in tried if f.verdict] + nearest
        raise too_large(planner, min(seen, key=lambda v: v.peak_bytes, default=None))
    label, best = min(fitting, key=lambda nf: _step(nf[1]))
    gaps: dict[str, float] = {}
    if np.isfinite(sum_bound) and sum_bound > 0:
        cheapest = min(f.claims["price_seconds"] for _, f in fitting)
        decided = any(f.claims.get("memory_decided") for _, f in fitting)
        gaps["memory" if decided else "sum"] = max(0.0, cheapest / sum_bound - 1)
    if step_bound > 0:
        gaps["step"] = max(0.0, _step(best) / step_bound - 1)
    claims = {
        **best.claims,
        "space": space_name or best.claims["space"],
        "chosen": label,
        "bound_seconds": step_bound or None,
        "gaps": gaps,
        "candidates": {n: _step(f) if fits(planner, f) else None for n, f in tried},
    }
    return replace(best, claims={k: v for k, v in claims.items() if v is not None})


def recipes(planner: Planner) -> list[tuple[str, Found]]:
    """What an expert would try first: data parallel, with storage cut (ZeRO), and for every place in the mesh data
    parallel outside with the best single cut of every operator inside (Megatron with its sequence parallel, 3D)."""
    scene = planner.scene
    axes = tuple(a.name for a in scene.mesh.axes if a.size > 1)
    found: list[tuple[str, Found]] = []
    if not planner.seeds:
        assignment = {n.name: WHOLE for n in scene.graph.nodes}
        assign_batch(scene, assignment, axes, scene.graph.nodes)
        rows = {name: row_of(codes, assignment[name], scene.mesh) for name, codes in planner.codes.items()}
        given = {name: row for name, row in rows.items() if row is not None}
        if len(given) == len(rows):
            plain = planner.space(exactly(given), planner.storage(allowed=False))
            found.append(
                ("data parallel", planner.found(plain, solve(plain.problem()).states, {"space": "recipes"}))
            )
            if planner.request.memory_bytes is not None:
                solution = limited(planner, planner.space(exactly(given)), None)
                if solution.found is not None:
                    found.append(("data parallel, storage cut", solution.found))
    done = recursive_programming(planner.space, len(scene.mesh.axes))
    found.append(("recursion", planner.found(done.space, done.states, {"space": "recipes"})))
    return found


def _step(found: Found) -> float:
    return found.claims.get("step_seconds", found.claims["price_seconds"])
