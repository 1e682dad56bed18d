"""The modes with a cost model: what they search, and what they claim of what they found.

    recursive_programming   a few prime axes at a time, slowest link first; any number of ranks
    dynamic_programming     exact over a named space: (a) product states of up to three named axes, (b) two runs of the
                            finest mesh, (c) three runs, or four axes
    auto                    both, with known recipes beside them, ranked by the simulated step, under the memory limit;
                            where memory asks for them, the techniques that the user left open (`search/joint`)

Modes that search nothing are priced in the same space, so that every plan has a price to compare.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from meshwright.errors import LayoutError
from meshwright.ops.strategy import Strategy
from meshwright.search.auto import auto
from meshwright.search.exact_spaces import check_request, families_of, two_runs
from meshwright.search.infeasible import not_allowed, not_lowered
from meshwright.search.joint import joint
from meshwright.search.joint.infeasible import too_large
from meshwright.search.least_memory import saved
from meshwright.search.memory_limit import fits_in_both, limited, nearer, priced_by_bytes
from meshwright.search.planner import Planner, SearchResult
from meshwright.search.recursion_within_limit import recursion
from meshwright.search.solve import NoStates, solve
from meshwright.search.space.constraints import exactly, rows_of

SEARCHES = ("recursive_programming", "dynamic_programming", "auto")


def search(planner: Planner, mode: str, *, offload: bool = True) -> SearchResult:
    """The choice of a mode. `offload`: whether `auto` may keep an optimizer's states on the host.

    Raises PlanError for a space or an inner search that does not exist, and where nothing fits or is allowed; for a
    folded graph LayoutError where a choice cannot be lowered.
    """
    check_request(planner.request)
    started = time.perf_counter()
    try:
        match mode:
            case "recursive_programming":
                found = _that_fits(
                    planner, *priced_by_bytes(planner, recursion(planner, planner.request.inner))
                )
            case "dynamic_programming":
                found = _that_fits(planner, *_exact(planner))
            case _:
                found = joint(planner, auto, offload=offload)
    except NoStates as error:
        raise not_allowed(planner, error) from error
    except LayoutError as error:
        if not planner.folds.is_whole:
            raise  # the full model says it again
        raise not_lowered(error) from error
    return replace(found, claims={**found.claims, "search_seconds": time.perf_counter() - started})


def priced(planner: Planner, strategies: Mapping[str, Strategy]) -> SearchResult | None:
    """Given strategies with the best hubs for them; None when the space has no name for one of them."""
    rows = rows_of(planner.codes, strategies, planner.context.mesh)
    if rows is None:
        return None
    space = planner.space(exactly(rows), planner.storage(allowed=False))
    return planner.settled(
        planner.found(space, solve(space.problem()).states, {"space": "strategies as given"})
    )


def _that_fits(
    planner: Planner, found: SearchResult | None, nearest: SearchResult | None = None
) -> SearchResult:
    """Return the given choice, evaluated in full; the least-memory choice if it does not fit or nothing was found."""
    if found is not None:
        found = planner.settled(found)
        if fits_in_both(planner, found):
            return found
        nearest = nearer(planner, nearest, found)
    found = saved(planner)
    if found is None:
        raise too_large(planner, nearest)
    return found


def _exact(planner: Planner) -> tuple[SearchResult | None, SearchResult | None]:
    """The best of the exact spaces with its bound; where nothing was found, what came nearest."""
    stop = planner.request.stop
    best = _smaller(planner) if planner.request.space == "c" else None
    most = best.claims["price_seconds"] if best else np.inf
    nearest: SearchResult | None = None
    bound = most  # what the space has not is dearer than that
    for name, family in families_of(planner):
        solution = limited(planner, planner.space(family, most=most), None, known=best)
        bound = min(bound, solution.bound)
        if solution.found is None:
            nearest = nearer(planner, nearest, solution.nearest)
            if stop.now():
                break
            continue
        found = replace(solution.found, claims={**solution.found.claims, "space": name})
        if best is None or found.claims["price_seconds"] <= best.claims["price_seconds"]:
            best = found
        stop.arm()
        if stop.now():
            break
    if best is None:
        return None, nearest
    claims = {**best.claims, "bound_seconds": bound, "gaps": _gaps(planner, best, bound)}
    return replace(best, claims=claims), None


def _smaller(planner: Planner) -> SearchResult | None:
    """The best that fits of two runs, which are among the three and among the product states of four axes."""
    name, family = two_runs(planner)
    found = limited(planner, planner.space(family), None, alone=False).found
    if found is not None:
        planner.request.stop.arm()
        planner.tell(name, found.claims["price_seconds"], None)
    return found


def _gaps(planner: Planner, found: SearchResult, bound: float) -> dict[str, float]:
    """How far the price may be above the best: of the sum, or of what fits into memory where that is what decided."""
    gap = max(0.0, found.claims["price_seconds"] / bound - 1) if bound > 0 else 0.0
    return {"memory" if found.claims.get("memory_decided") else "sum": gap}
