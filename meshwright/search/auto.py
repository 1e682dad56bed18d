"""`auto`: optima for several weights of what can hide, known recipes beside them, ranked by the simulated step.

The sum of all seconds is not the step: some communication hides behind computing. With a weight α of computing, and
1 - α of what can hide, the optimum of a weighted sum is a plan worth simulating. What bounds every plan's step are
chains of what cannot run at once (`search/space/step_bound.py`), and the best simulated one is compared with the
least of these.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from meshwright.ops.batch import batch_rows
from meshwright.search.budget import AUTO, MEMORY
from meshwright.search.data_parallel import by_batch_rows
from meshwright.search.exact_spaces import families_of, resting_families
from meshwright.search.infeasible import NothingFits
from meshwright.search.least_memory import saved
from meshwright.search.memory_limit import (
    fits,
    limited,
    nearer,
    offer,
    priced_by_bytes,
    smaller_limits,
    step_of,
)
from meshwright.search.planner import Planner, SearchResult
from meshwright.search.recursion_within_limit import recursion
from meshwright.search.solve import skipping_unproven, solve, solve_limited
from meshwright.search.space.build import Space
from meshwright.search.space.constraints import exactly
from meshwright.search.space.families import Family, outside
from meshwright.search.space.memory import memory_of
from meshwright.search.space.step_bound import entries, step_problem


@dataclass
class _Tried:
    """Results so far: the choices that fit, those that came nearest, and bounds of the sum and of the step, by
    space. `below`: seconds of a step that is known under other techniques. `resting`: the shardings of fewer ranks,
    with their name, if these gave the best."""

    below: float
    found: list[tuple[str, SearchResult]] = field(default_factory=list)
    nearest: list[SearchResult] = field(default_factory=list)
    sums: dict[str, float] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    resting: tuple[str, Family] | None = None


def auto(planner: Planner, below: float) -> SearchResult:
    """The choice with the least simulated step that fits; ended early, the best so far. `below`: seconds of a step that
    is known under other techniques; what is no quicker where it takes more than the limit is not made smaller.

    Raises NothingFits.
    """
    tried = _Tried(below)
    _look(planner, tried)
    fitting = [(name, found) for name, found in tried.found if fits(planner, found)]
    if not fitting:
        known = below < np.inf or planner.request.stop.now()  # an answer, elsewhere
        found = None if known else saved(planner)
        if found is None:
            seen = [*(f for _, f in tried.found), *tried.nearest]
            raise NothingFits(functools.reduce(functools.partial(nearer, planner), seen, None))
        fitting = [("the least-memory plan", found)]
        tried.found += fitting
    label, best, sure = _settled(planner, fitting, min(tried.steps.values(), default=0.0))
    steps = _quickest((n, step_of(f) if fits(planner, f) else None) for n, f in tried.found)
    claims = {
        **best.claims,
        "space": " and ".join(tried.steps) or best.claims.get("space", "recipes"),
        "chosen": label,
        **_certificate(tried, fitting, best),
        "candidates": {**steps, **sure},
    }
    return replace(best, claims=claims)


def _look(planner: Planner, tried: _Tried) -> None:
    """Try one kind of choice after the other, until all were tried or the search is ended."""
    stop = planner.request.stop
    for name, found in recipes(planner, tried.below):
        _take(planner, tried, name, found)
        planner.tell(name, _best(planner, tried), None)
        if stop.now():
            return
    for name, family in families_of(planner):
        _optima(planner, tried, name, planner.space(family))
        if stop.now():
            return
    _repeated(planner, tried)
    with skipping_unproven():
        _lighter(planner, tried)
    with skipping_unproven():
        _smaller_limits(planner, tried)
    if planner.request.memory_bytes is not None and not stop.now() and _may_gain(planner, tried):
        with skipping_unproven():
            found, near = priced_by_bytes(planner, recursion(planner))
            tried.nearest += [near] if near is not None else []
            if found is not None:
                _take(planner, tried, "recursion within memory", found)
                planner.tell("recursion within memory", step_of(found), None)


def _quickest(named: Iterable[tuple[str, float | None]]) -> dict[str, float | None]:
    """The shortest step of each name, of which there may be several; None where none fits."""
    found: dict[str, float | None] = {}
    for name, step in named:
        before = found.get(name)
        found[name] = step if before is None else before if step is None else min(before, step)
    return found


def _take(planner: Planner, tried: _Tried, name: str, found: SearchResult) -> None:
    tried.found.append((name, found))
    if fits(planner, found):
        planner.request.stop.arm()
        offer(planner, found)


def _settled(
    planner: Planner, fitting: list[tuple[str, SearchResult]], bound: float
) -> tuple[str, SearchResult, dict[str, float | None]]:
    """The best, evaluated in full, as are those within `DOUBT` of what looks best, up to `SURE`, and those that look
    better than the best of them; none beside one that is as good as at the bound of the step. Where none of these fits
    then, the best of all as they were evaluated. And the steps of those that were evaluated in full. Of a
    search that was ended early one is evaluated in full, so that what is answered is true."""
    ranked = sorted(fitting, key=lambda named: step_of(named[1]))
    kept: list[tuple[str, SearchResult]] = []
    evaluated: list[tuple[str, float | None]] = []
    for name, found in ranked[: AUTO.evaluated_in_full]:
        best = min((step_of(f) for _, f in kept), default=np.inf)
        if kept and step_of(found) >= max(best, (1 + AUTO.doubt) * step_of(ranked[0][1])):
            break
        if best <= (1 + AUTO.close) * bound:
            break
        if kept and planner.request.stop.now():
            break
        sure = planner.settled(found)
        evaluated.append((name, step_of(sure) if fits(planner, sure) else None))
        if fits(planner, sure):
            kept.append((name, sure))
    label, best_found = min(kept or ranked, key=lambda named: step_of(named[1]))
    return label, best_found, _quickest(evaluated)


def _optima(planner: Planner, tried: _Tried, name: str, space: Space) -> None:
    """The optimum of the sum, the bound of the step, then the optima of weighted sums, and better bounds while there is
    a gap."""
    around: tuple[int, ...] | None = None
    for alpha in (None, *AUTO.alphas):
        if alpha == AUTO.alphas[-1] and _is_near(planner, tried, name):
            return
        # In a large space a search takes minutes that ends with what is no quicker.
        best = _best(planner, tried) if planner.size > AUTO.lighter_size else None
        below = tried.below if best is None else min(best, tried.below)
        solution = limited(planner, space, alpha, alone=False, below=below)
        if alpha is None:
            tried.sums[name] = solution.bound
        if solution.nearest is not None:
            tried.nearest.append(solution.nearest)
        if solution.found is not None:
            label = f"{name[:3]} optimum" + ("" if alpha is None else f", α={alpha}")
            _take(planner, tried, label, solution.found)
        if planner.request.stop.now():
            return
        if alpha is None:
            around = _bound(planner, tried, name, space)
        planner.tell(name, _best(planner, tried), tried.steps.get(name))
    for entry in entries(space, around) if around else ():
        if planner.request.stop.now() or _is_near(planner, tried, name):
            return
        _bound(planner, tried, name, space, entry)
        planner.tell(name, _best(planner, tried), tried.steps[name])


def _repeated(planner: Planner, tried: _Tried) -> None:
    """The optima of fewer and fewer ranks, the others idle, while these compute less than the best takes and what is
    found is near it: where communication costs more than computing, more ranks must not make a plan slower."""
    best = _best(planner, tried)
    if planner.seeds or best is None or best <= (1 + AUTO.close) * min(tried.steps.values(), default=0.0):
        return
    context, request = planner.context, planner.request
    for rest, name, family in resting_families(planner):
        working = context.mesh.count([a.name for a in context.mesh.axes[rest:]])
        if float(planner.least.computing(working).sum()) + planner.least.updating(context.mesh.size) >= best:
            return
        for alpha in (None, *AUTO.alphas):
            if request.stop.now():
                return
            solution = limited(planner, planner.space(family), alpha, alone=False)
            if solution.found is None:
                return
            _take(planner, tried, name if alpha is None else f"{name}, α={alpha}", solution.found)
            if step_of(solution.found) > (1 + AUTO.far) * best:
                return
        if planner.vectorized() is None:
            _take(planner, tried, f"recursion, {name}", recursion(planner, rest=rest)(None))
        before, best = best, _best(planner, tried) or best
        if best < before:
            tried.resting = name, family
        planner.tell(name, best, None)


def _lighter(planner: Planner, tried: _Tried) -> None:
    """The optima with a small price on bytes, where the best is not near its bound. Their sums are a little dearer and
    their steps at times quicker, as those are that a limit of memory leads to; without one they are looked at, too."""
    fitting = [found for _, found in tried.found if fits(planner, found)]
    if planner.evaluator is None or not fitting or planner.size > AUTO.lighter_size:
        return
    first = min(fitting, key=step_of)
    seen = {found.states for _, found in tried.found}
    claims = _decided(planner, tried)
    families = [(f"{name[:3]} optimum", family) for name, family in families_of(planner)]
    if not planner.seeds:  # with the outermost axis idle, too
        families += [(name, family) for _, name, family in itertools.islice(resting_families(planner), 1)]
    for name, family in families:
        space = planner.space(family)
        memory = planner.memory(space)
        for alpha, share in AUTO.lighter:
            best = _best(planner, tried)
            if best is None or best <= (1 + AUTO.close) * min(tried.steps.values(), default=0.0):
                return
            price = share * step_of(first) / planner.peak_bytes(first) / memory.instants
            asked = memory.weighed(planner.problem(space, alpha), np.full(memory.instants, price))
            if planner.request.stop.now():
                return
            solution = solve(asked, ended=planner.request.stop.now)
            if (states := tuple(solution.states)) not in seen:
                seen.add(states)
                label = f"{name}{f', α={alpha}' if alpha else ''}, {share:.0%} for bytes"
                _take(planner, tried, label, planner.found(space, states, claims))
                planner.tell(name, _best(planner, tried), None)


def _decided(planner: Planner, tried: _Tried) -> dict[str, bool]:
    """Claims of further choices: whether the limit decided, as where something does not fit."""
    decided = any(not fits(planner, f) or "memory_decided" in f.claims for _, f in tried.found)
    return {"memory_decided": True} if decided else {}


def _smaller_limits(planner: Planner, tried: _Tried) -> None:
    """Simulate the choices that smaller and smaller limits lead to. They are the same whatever the limit of the request
    is, so that a larger one knows those that a smaller one does: more memory makes no plan slower. They end where none
    would be quicker even if all that it sends were hidden."""
    if planner.evaluator is None or planner.size > AUTO.lighter_size or _best(planner, tried) is None:
        return
    claims = _decided(planner, tried)
    families = [(f"{name[:3]} optimum", family) for name, family in families_of(planner)]
    for name, family in (*families, *([tried.resting] if tried.resting else [])):
        space = planner.space(family)
        floor, memory = space.problem(1.0), planner.memory(space)
        room = np.inf if (limit := planner.limit(space)) is None else limit
        seen = {found.states for _, found in tried.found if found.space is space}
        for choices in smaller_limits(planner, space, memory):
            if min(map(floor.price, choices)) >= (_best(planner, tried) or np.inf):
                break
            within = [s for s in choices if s not in seen and memory.totals(s).max() <= room]
            for states in within[: AUTO.smaller_simulations]:
                if planner.request.stop.now():
                    return
                if floor.price(states) < (_best(planner, tried) or np.inf):
                    seen.add(states)
                    found = planner.found(space, states, claims)
                    _take(planner, tried, f"{name} under a smaller limit", found)
            planner.tell(name, _best(planner, tried), None)


def _bound(
    planner: Planner, tried: _Tried, name: str, space: Space, entry: str = ""
) -> tuple[int, ...] | None:
    """Note the least that a step of this space takes by a chain; returns a choice that takes no more by it, if a solve
    came to one."""
    problem, limit, ended = step_problem(space, entry), planner.limit(space), planner.request.stop.now
    with skipping_unproven():
        if limit is None:
            found = solve(problem, ended=ended)
        else:
            memory = memory_of(space, planner.request.optimizer_states)
            limits = np.full(memory.instants, limit)
            found = solve_limited(
                problem, memory, limits, enough=MEMORY.near, most_solves=AUTO.bound_solves, ended=ended
            )
        tried.steps[name] = max(found.bound, tried.steps.get(name, 0.0))
        return found.states
    return None


def _is_near(planner: Planner, tried: _Tried, name: str) -> bool:
    """True if the best so far is near the bound of a space."""
    best, bound = _best(planner, tried), tried.steps.get(name)
    return best is not None and bound is not None and best <= (1 + MEMORY.near) * bound


def _best(planner: Planner, tried: _Tried) -> float | None:
    """The least step so far of what fits."""
    return min((step_of(f) for _, f in tried.found if fits(planner, f)), default=None)


def _near(planner: Planner, tried: _Tried) -> bool:
    """True if something that fits is near the bound of the sum, so that little is left to gain."""
    prices = [found.claims["price_seconds"] for _, found in tried.found if fits(planner, found)]
    return min(prices, default=np.inf) <= (1 + MEMORY.near) * min(tried.sums.values(), default=0.0)


def _may_gain(planner: Planner, tried: _Tried) -> bool:
    """True if a recursion under the limit is worth its time: nothing that fits is near the bound, and, if it takes
    long, the recursion without a limit is more than a little quicker."""
    best, free = _best(planner, tried), [step_of(found) for name, found in tried.found if name == "recursion"]
    if _near(planner, tried) or min(free, default=0.0) >= tried.below:
        return False
    if best is None or not free or planner.size <= AUTO.lighter_size:
        return True
    return min(free) < (1 - AUTO.recursion_worth) * best


def _certificate(
    tried: _Tried, fitting: list[tuple[str, SearchResult]], best: SearchResult
) -> dict[str, object]:
    """The bound of the step over all spaces, and how far the best plans are from the bounds."""
    gaps: dict[str, float] = {}
    if tried.sums and (bound := min(tried.sums.values())) > 0 and np.isfinite(bound):
        cheapest = min(f.claims["price_seconds"] for _, f in fitting)
        decided = any(f.claims.get("memory_decided") for _, f in fitting)
        gaps["memory" if decided else "sum"] = max(0.0, cheapest / bound - 1)
    if not tried.steps:
        return {"gaps": gaps}
    step = min(tried.steps.values())
    return {"gaps": {**gaps, "step": max(0.0, step_of(best) / step - 1)}, "bound_seconds": step}


def recipes(planner: Planner, below: float) -> Iterator[tuple[str, SearchResult]]:
    """Yield what an expert would try first: data parallel; with storage sharded (ZeRO); data parallel outside with the
    best single sharding of every operator on the 2, 4, 8 ranks inside (Megatron, 3D); and the recursion. `below`: of a
    recipe over the limit that is no quicker than so many seconds no smaller choice is looked for.
    """
    context, limit = planner.context, planner.request.memory_bytes
    rows = None if planner.seeds else by_batch_rows(context, planner.codes)
    # Ranks without an example of some micro-batch are no data parallel.
    examples = min(batch_rows(context.graph), default=context.mesh.size) // planner.techniques.pieces
    if rows and context.mesh.size <= max(1, examples):
        plain = planner.space(exactly(rows), planner.storage(allowed=False))
        yield "data parallel", planner.found(plain, solve(plain.problem()).states, {"space": "recipes"})
        if limit is not None:
            solution = limited(planner, planner.space(exactly(rows)), None, alone=False, below=below)
            if solution.found is not None:
                yield "data parallel, storage cut", solution.found
    if rows:
        count = len(context.mesh.axes)
        for inner in range(1, min(AUTO.recipe_axes, count - 1) + 1):
            if context.mesh.count([a.name for a in context.mesh.axes[: count - inner]]) > max(1, examples):
                continue
            space = planner.space(outside(rows, count - inner))
            solution = limited(planner, space, None, alone=False, below=below)
            if solution.found is not None:
                ranks = context.mesh.count([a.name for a in context.mesh.axes[count - inner :]])
                yield f"data parallel × {ranks} ranks of the best cut", solution.found
    yield "recursion", recursion(planner)(None)
