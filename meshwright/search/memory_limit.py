"""Searching under a memory limit: a price per byte, and a simulation that has the last word.

The sums that lead a search under-estimate the peak, so what they accept is simulated; where it does not fit, the limits
are tightened by what it missed, and the search goes on. The bound is that of the limits as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np

from meshwright.search.budget import AUTO, MEMORY, SOLVE, TECHNIQUES
from meshwright.search.planner import Planner, SearchResult
from meshwright.search.solve import Memory, Problem, skipping_unproven, solve, solve_limited
from meshwright.search.space.build import Space
from meshwright.search.space.constraints import rows_chosen, states_with


@dataclass(frozen=True)
class Limited:
    """The best choice that fits, or None, and a lower bound of the objective of all that do; without a choice the
    one that came nearest, where any was simulated."""

    found: SearchResult | None
    bound: float
    nearest: SearchResult | None = None
    stopped: bool = False


def limited(
    planner: Planner,
    space: Space,
    alpha: float | None,
    *,
    alone: bool = True,
    known: SearchResult | None = None,
    most_solves: int = SOLVE.limited_solves,
    enough: float = SOLVE.enough,
    below: float = np.inf,
) -> Limited:
    """The optimum of a space under the request's memory limit; without one, the optimum.

    `alone`: whether its price and bound are what the user waits for; one search of several only says that it goes on,
    and under a limit its solves are as near to the optimum as `MEMORY.work` allows. Where that finds no choice and
    cannot prove that there is none, one of several has none, and the others go on; alone it raises NoStates.
    `most_solves`: after how many the optimum under a limit is near enough; `enough`: of its price, when it is sooner.
    `below`: seconds of a step; a choice that is over the limit and no quicker ends it, as what takes less is slower.
    `known`: a choice to begin with where memory has no limit. Ended early it returns the best so far, and `stopped`.
    """
    with nullcontext() if alone else skipping_unproven():
        return _limited(planner, space, alpha, alone, known, most_solves, enough, below)
    return Limited(None, 0.0)


def _limited(
    planner: Planner,
    space: Space,
    alpha: float | None,
    alone: bool,
    known: SearchResult | None,
    most_solves: int,
    enough: float,
    below: float,
) -> Limited:
    problem, limit, stop = planner.problem(space, alpha), planner.limit(space), planner.request.stop
    found_any = False

    def tell(stage: str, done: int, total: int, price: float, bound: float) -> None:
        nonlocal found_any
        found_any = found_any or price < np.inf
        planner.tell(stage, price if alone else None, bound if alone else None)

    def ended() -> bool:
        return stop.now(found_any)

    if limit is None:
        begin = states_with(space, problem, rows_chosen(known.space, known.states)) if known else None
        solution = solve(problem, progress=tell, first=begin, ended=ended)
        free = planner.found(space, solution.states, {})
        offer(planner, free)
        return Limited(free, solution.bound, None, solution.stopped)
    memory = planner.memory(space)
    limits = np.full(memory.instants, limit)
    bound: float | None = None
    nearest: SearchResult | None = None
    first: SearchResult | None = None
    stopped = False
    # Seconds of what does not fit are asked for where they may end the search alone.
    most = (planner.request.memory_bytes or np.inf) if below == np.inf else np.inf
    for _ in range(MEMORY.tightenings):
        found_any = False
        solution = solve_limited(
            problem,
            memory,
            limits,
            progress=tell,
            enough=enough,
            most_solves=most_solves,
            limit_work=SOLVE.work if alone else MEMORY.work,
            ended=ended,
        )
        bound = solution.bound if bound is None else bound
        stopped = solution.stopped
        if solution.states is None:
            break
        decided = bool(np.any(solution.multipliers > 0))
        found = planner.found(space, solution.states, {"memory_decided": True} if decided else {}, most=most)
        if fits(planner, found):
            first = found
            offer(planner, found)
            break
        nearest = nearer(planner, nearest, found)
        if found.claims.get("step_seconds", 0.0) >= below < np.inf:
            return Limited(None, bound, nearest)
        if stop.now():
            break
        assert found.evaluation is not None and planner.request.memory_bytes is not None
        missed = 1.02 * (planner.peak_bytes(found) - planner.request.memory_bytes)
        limits = np.minimum(limits, memory.totals(solution.states).max() - missed)
        if (limits <= 0).any():
            break
    bound = np.inf if bound is None else bound
    if (
        (stopped and first is not None)
        or stop.now()
        or nearest is None
        or (first is not None and _objective(first, problem) <= (1 + MEMORY.near) * bound)
    ):
        return Limited(first, bound, nearest, stopped)
    # The sums do not see what is over, or paid too much for it: a price on all bytes lowers that, too.
    other, near = priced_by_bytes(planner, lambda price: _weighed(planner, space, problem, memory, price))
    both = [found for found in (first, other) if found is not None]
    best = min(both, key=lambda found: _objective(found, problem), default=None)
    return Limited(best, bound, nearer(planner, nearest, near), stop.now())


def _objective(found: SearchResult, problem: Problem) -> float:
    """Return the objective of a choice: the price that the problem minimises."""
    return problem.price(found.states)


def _weighed(
    planner: Planner, space: Space, problem: Problem, memory: Memory, price: np.ndarray | None
) -> SearchResult:
    """The optimum with a price per byte at each instant; its step is simulated where it fits."""
    asked = problem if price is None else memory.weighed(problem, price)
    solution = solve(asked, ended=planner.request.stop.now)
    return planner.found(space, solution.states, {}, most=planner.request.memory_bytes or np.inf)


def smaller_limits(planner: Planner, space: Space, memory: Memory) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield what a space allows under one limit after the other, each a little below the bytes of the choice before:
    the optimum by a weighted sum, then the others that its search came by, cheapest first. The first limit is a little
    below what the optimum without a limit takes, whatever the limit of the request."""
    problem, ended = planner.problem(space, AUTO.alphas[0]), planner.request.stop.now
    most = float(memory.totals(solve(problem, ended=ended).states).max())
    for _ in range(AUTO.smaller_limits):
        most *= 1 - AUTO.smaller_by
        solution = solve_limited(
            problem,
            memory,
            np.full(memory.instants, most),
            enough=MEMORY.near,
            most_solves=AUTO.bound_solves,
            limit_work=MEMORY.work,
            ended=ended,
        )
        if solution.states is None or ended():
            return
        most = min(most, float(memory.totals(solution.states).max()))
        yield solution.states, *solution.others


def fits(planner: Planner, found: SearchResult) -> bool:
    """True if a simulated choice is within the limit; one that was not simulated counts by its sums alone."""
    limit = planner.request.memory_bytes
    if limit is None:
        return True
    if found.evaluation is not None:
        return planner.peak_bytes(found) <= limit
    memory = planner.memory(found.space)
    return bool((memory.totals(found.states) <= (planner.limit(found.space) or 0.0)).all())


def priced_by_bytes(
    planner: Planner, run: Callable[[np.ndarray | None], SearchResult]
) -> tuple[SearchResult | None, SearchResult | None]:
    """The cheapest of what `run` finds for a price per byte that fits: the least doubling of a low price at which
    something does, then halved back. `run(None)` is without a price. Where nothing fits, None and what came nearest.
    Ended early it returns the best so far."""
    stop = planner.request.stop
    found = run(None)
    if fits(planner, found):
        offer(planner, found)
        return found, None
    assert planner.request.memory_bytes is not None
    instants = planner.instants
    nearest: SearchResult | None = found
    first = found.claims["price_seconds"] / planner.request.memory_bytes / 8
    best: SearchResult | None = None
    low, high = -1, MEMORY.doublings  # doublings at which nothing fits, and at which something does
    # What is nearly free comes first, then the most: where that does not fit, nothing does.
    tries = [*range(MEMORY.low_doublings), MEMORY.doublings - 1]
    while (doublings := tries.pop(0) if tries else (low + high) // 2) > low and not stop.now():
        found = run(np.full(instants, first * 2**doublings))
        if fits(planner, found):
            best, high, tries = found, doublings, []
            offer(planner, found)
        else:
            nearest, low = nearer(planner, nearest, found), doublings
    if best is None:
        return None, nearest
    low, high = first * 2**low if low >= 0 else 0.0, first * 2**high
    for _ in range(MEMORY.halvings):
        if stop.now(known=True):
            break
        middle = (low + high) / 2
        found = run(np.full(instants, middle))
        if fits(planner, found):
            high = middle
            if found.claims["price_seconds"] <= best.claims["price_seconds"]:
                best = found
        else:
            low = middle
    return replace(best, claims={**best.claims, "memory_decided": True}), None


def offer(planner: Planner, found: SearchResult) -> None:
    """Offer a choice that fits as the answer, should the time be up before a better one is known."""
    if fits_in_both(planner, found):
        planner.request.stop.offer(step_of(found), (planner.under(found.techniques), found))


def step_of(found: SearchResult) -> float:
    """Seconds of the simulated step; the price where nothing was simulated."""
    return found.claims.get("step_seconds", found.claims["price_seconds"])


def fits_in_both(planner: Planner, found: SearchResult) -> bool:
    """True if a choice fits into the device's memory and, with offload, into the host's."""
    room, evaluation = planner.request.cluster.host_memory_bytes, found.evaluation
    if found.techniques.offload and room and evaluation is not None and evaluation.host_bytes > room:
        return False
    return fits(planner, found)


def sure(planner: Planner, found: SearchResult) -> SearchResult:
    """A choice that fits, with the bytes of the full program where its peak is near the limit; any other as it is."""
    far = planner.peak_bytes(found) <= TECHNIQUES.sure_share * (planner.request.memory_bytes or 0.0)
    if far or not fits_in_both(planner, found):
        return found
    full, known = planner.under(found.techniques).settled(found, timed=False), found.evaluation
    if known is None or full.evaluation is None or full.evaluation.timed:
        return full
    # Seconds from a few layers are near enough to compare; those of the answer are found in full at the end.
    step, exposed = known.step_seconds, known.exposed_seconds
    evaluation = replace(full.evaluation, step_seconds=step, exposed_seconds=exposed, timed=known.timed)
    return replace(full, claims={**full.claims, "step_seconds": step}, evaluation=evaluation)


def nearer(planner: Planner, one: SearchResult | None, other: SearchResult | None) -> SearchResult | None:
    """Of two choices that with the lower peak; what was not simulated has none."""
    seen = [found for found in (one, other) if found is not None and found.evaluation is not None]
    return min(seen, key=planner.peak_bytes, default=None)
