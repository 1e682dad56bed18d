"""Searching under a memory limit: a price per byte, and a simulation that has the last word.

The sums that lead a search under-estimate the peak, so what they accept is simulated; where it does not fit, the limits
are tightened by what it missed, and the search goes on. The bound is that of the limits as they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.errors import PlanError
from meshwright.graph import Graph
from meshwright.redistribute.steps import show_bytes
from meshwright.search.planner import Found, Planner, Verdict, families_of
from meshwright.search.solve import Memory, Problem, solve, solve_limited
from meshwright.search.space.build import Space
from meshwright.search.space.given import rows_chosen, states_with
from meshwright.search.space.memory import INSTANTS
from meshwright.techniques import OFFLOAD

TIGHTENINGS = 8
DOUBLINGS, HALVINGS = 12, 4
FRUGAL = 512  # steps that a limit's worth of bytes is priced at where bytes matter more than seconds
ALL_FRUGAL = (8, FRUGAL, 1 << 30)  # the choice with the least sums is not always that with the least peak
NEAR = 0.01  # of the bound: what is that near is not searched further


@dataclass(frozen=True)
class Limited:
    """The best choice that fits, or None, and a lower bound of the objective of all that do; without a choice the
    verdict on the one that came nearest, where any was simulated."""

    found: Found | None
    bound: float
    nearest: Verdict | None = None
    stopped: bool = False


def limited(
    planner: Planner, space: Space, alpha: float | None, *, alone: bool = True, known: Found | None = None
) -> Limited:
    """The optimum of a space under the request's memory limit; without one, the optimum.

    `alone`: whether its price and bound are what the user waits for; one search of several only says that it goes on.
    `known`: a choice to begin with where memory has no limit. An interrupt ends it with the best so far, and `stopped`.
    """
    problem, limit = planner.problem(space, alpha), planner.limit(space)

    def tell(stage: str, done: int, total: int, price: float, bound: float) -> None:
        planner.tell(stage, price if alone else None, bound if alone else None)

    if limit is None:
        begin = states_with(space, problem, rows_chosen(known.space, known.states)) if known else None
        solution = solve(problem, progress=tell, first=begin)
        return Limited(planner.found(space, solution.states, {}), solution.bound, None, solution.stopped)
    memory = planner.memory(space)
    limits = np.full(memory.instants, limit)
    bound: float | None = None
    nearest: Verdict | None = None
    first: Found | None = None
    stopped = False
    for _ in range(TIGHTENINGS):
        solution = solve_limited(problem, memory, limits, progress=tell)
        bound = solution.bound if bound is None else bound
        stopped = solution.stopped
        if solution.states is None:
            break
        decided = bool(np.any(solution.multipliers > 0))
        found = planner.found(space, solution.states, {"memory_decided": True} if decided else {})
        if fits(planner, found):
            first = found
            break
        nearest = _nearer(nearest, found.verdict)
        if stopped:
            break
        assert found.verdict is not None and planner.request.memory_bytes is not None
        missed = 1.02 * (planner.peak_bytes(found) - planner.request.memory_bytes)
        limits = np.minimum(limits, memory.totals(solution.states).max() - missed)
        if (limits <= 0).any():
            break
    bound = np.inf if bound is None else bound
    if stopped or nearest is None or (first is not None and _objective(first, problem) <= (1 + NEAR) * bound):
        return Limited(first, bound, nearest, stopped)
    # The sums do not see what is over, or paid too much for it: a price on all bytes lowers that, too.
    try:
        other, near = priced_by_bytes(planner, lambda price: _weighed(planner, space, problem, memory, price))
    except KeyboardInterrupt:
        if first is None:
            raise
        return Limited(first, bound, nearest, stopped=True)
    both = [found for found in (first, other) if found is not None]
    best = min(both, key=lambda found: _objective(found, problem), default=None)
    return Limited(best, bound, _nearer(nearest, near))


def _objective(found: Found, problem: Problem) -> float:
    """What a problem minimises, of a choice in its space."""
    return problem.price(found.states)


def _weighed(
    planner: Planner, space: Space, problem: Problem, memory: Memory, price: np.ndarray | None
) -> Found:
    """The optimum with a price per byte at each instant."""
    asked = problem if price is None else memory.weighed(problem, price)
    solution = solve(asked)
    if solution.stopped:
        raise KeyboardInterrupt
    return planner.found(space, solution.states, {})


def fits(planner: Planner, found: Found) -> bool:
    """Whether a simulated choice is within the limit; what was not simulated counts by its sums alone."""
    limit = planner.request.memory_bytes
    if limit is None:
        return True
    if found.verdict is not None:
        return planner.peak_bytes(found) <= limit
    memory = planner.memory(found.space)
    return bool((memory.totals(found.states) <= (planner.limit(found.space) or 0.0)).all())


def priced_by_bytes(
    planner: Planner, run: Callable[[np.ndarray | None], Found]
) -> tuple[Found | None, Verdict | None]:
    """The cheapest of what `run` finds for a price per byte that fits: the price is doubled until something does, then
    halved back. `run(None)` is without a price. Where nothing fits, None and the verdict on what came nearest."""
    found = run(None)
    if fits(planner, found):
        return found, None
    assert planner.request.memory_bytes is not None
    instants = len(INSTANTS)
    nearest = found.verdict
    low, high = 0.0, found.claims["price_seconds"] / planner.request.memory_bytes / 8
    best: Found | None = None
    for _ in range(DOUBLINGS):
        found = run(np.full(instants, high))
        if fits(planner, found):
            best = found
            break
        nearest = _nearer(nearest, found.verdict)
        low, high = high, 2 * high
    if best is None:
        return None, nearest
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        found = run(np.full(instants, middle))
        if fits(planner, found):
            high = middle
            if found.claims["price_seconds"] <= best.claims["price_seconds"]:
                best = found
        else:
            low = middle
    return replace(best, claims={**best.claims, "memory_decided": True}), None


def within_memory(planner: Planner, run: Callable[[np.ndarray | None], Found]) -> Found:
    """The cheapest that fits by a price per byte. Raises PlanError when nothing fits."""
    found, nearest = priced_by_bytes(planner, run)
    if found is None:
        raise too_large(planner, nearest)
    return found


def _nearer(one: Verdict | None, other: Verdict | None) -> Verdict | None:
    """Of two verdicts that with the lower peak."""
    if one is None or other is None:
        return one or other
    return min(one, other, key=lambda v: v.peak_bytes)


# ------------------------------------------------------------------------------------------- when nothing fits


def too_large(planner: Planner, nearest: Verdict | None = None) -> PlanError:
    """Why no plan fits: what is over, by how much, at which instant, and the smallest single changes that would fit.

    `nearest`: of the plans that were simulated the one with the lowest peak.
    """
    _, family = families_of(planner)[0]
    space = planner.space(family)
    states, limit = planner.request.optimizer_states, planner.limit(space) or 0.0
    memory = planner.memory(space)
    least = [_least(space, memory, t) for t in range(memory.instants)]
    worst = int(np.argmax(least))
    for dear in ALL_FRUGAL:
        nearest = _nearer(nearest, _frugal(planner, space, memory, dear))
    wanted, places = planner.request.memory_bytes or 0.0, planner.request.places
    need = max(least) + wanted - limit  # with what no choice changes
    extra = max(0.0, nearest.peak_bytes - need) if nearest else 0.0  # what only a simulation sees
    changes = [
        f"an optimizer with {fewer or 'no'} state{'s' if fewer != 1 else ''} per parameter (optimizer_states={fewer})"
        for fewer in range(states)
        if max(_least(space, planner.memory(space, fewer), t) for t in range(memory.instants)) + extra
        <= limit
    ][-1:]
    rows = _rows(space.graph)
    for parts in (n for n in (2, 4, 8, 16, 32, 64) if rows % n == 0):
        smaller = _smaller_batch(space, memory, parts)
        if max(_least(space, smaller, t) for t in range(memory.instants)) + extra / parts <= limit:
            changes.append(f"a batch of 1/{parts} of this one, {rows // parts} rows")
            break
    changes += _techniques_that_fit(planner, space)
    changes.append(f"{show_bytes(1.01 * (need + extra) / places)} per rank{' or more' * (places > 1)}")
    instant = nearest.instant if nearest else "its peak"
    together = f" on the {places} ranks of a pipeline together" if places > 1 else ""
    return PlanError(
        f"no plan fits into {show_bytes(wanted / places)} per rank",
        why=f"at {INSTANTS[worst]} every plan of this space needs {show_bytes(least[worst])} or more beside the batch"
        f"{together}, {show_bytes(max(0.0, least[worst] - limit))} over the limit"
        if least[worst] > limit
        else f"the plan that comes nearest has {show_bytes(need + extra)} at {instant}{together}, "
        f"{show_bytes(need + extra - wanted)} over the limit",
        hint="the smallest single changes that would fit: " + "; or ".join(changes),
    )


def _techniques_that_fit(planner: Planner, space: Space) -> list[str]:
    """Those of which one alone, beside what is asked, lets a choice fit by simulation."""
    asked, limit = planner.techniques, planner.request.memory_bytes or 0.0
    single: list[dict[str, Any]] = [{"recompute": "full"}] if not asked.recompute else []
    single += [{"slice_activation": True}] if not asked.slice_activation else []
    words = OFFLOAD if planner.request.cluster.host_bytes_per_s else ()
    single += [{"offload": (*asked.offload, word)} for word in words if word not in asked.offload]
    found: list[str] = []
    for change in single:
        under = planner.under(replace(asked, **change))
        try:
            verdict = _frugal(under, space, under.memory(space))
        except PlanError:
            continue
        if verdict is not None and verdict.peak_bytes <= limit:
            found.append(", ".join(f"{name}={value!r}" for name, value in change.items()))
    return found


def _rows(graph: Graph) -> int:
    """The rows of the batch; 1 where no dim counts them."""
    found = [i.type.shape[i.batch_dim] for i in graph.input_of("batch") if i.batch_dim is not None]
    return math.gcd(*found) or 1


def _frugal(planner: Planner, space: Space, memory: Memory, frugal: float = FRUGAL) -> Verdict | None:
    """The verdict on a choice that saves bytes where a limit's worth of them costs so many steps."""
    if planner.judge is None:
        return None
    problem = space.problem()
    dear = frugal * solve(problem).price / (planner.request.memory_bytes or 1.0)
    asked = memory.weighed(problem, np.full(memory.instants, dear))
    return planner.judge(space.choice(solve(asked).states))


def _least(space: Space, memory: Memory, instant: int) -> float:
    return solve(memory.alone(space.problem(), instant)).bound


def _smaller_batch(space: Space, memory: Memory, parts: int) -> Memory:
    owned = {space.variable["parameter", name] for name in space.parameters}
    return Memory(tuple(a if v in owned else a / parts for v, a in enumerate(memory.amounts)))
