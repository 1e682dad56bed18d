"""`auto` beyond shardings and storage: which of the techniques that the user left open make a plan fit, or quicker.

The plain search goes first, but where memory is short. Where memory decides, a front of choices (quick to small) meets
every point of the open techniques; sums say what each would take and cost, the most promising are simulated, and the
best is searched once more under its techniques. A point that has no less of any technique than a fitting one is
skipped: more of a technique never makes the step of the same choice shorter.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from meshwright.core.techniques import Techniques
from meshwright.errors import DoesNotFit, PlanError
from meshwright.search.budget import AUTO, MEMORY, TECHNIQUES
from meshwright.search.exact_spaces import families_of
from meshwright.search.infeasible import NothingFits
from meshwright.search.joint.candidates import Candidate
from meshwright.search.joint.dimensions import (
    Dimension,
    dimensions,
    distinct,
    micro_batches_of,
    points,
)
from meshwright.search.joint.explain import technique_lines, unopened_lines
from meshwright.search.joint.fewer_layers import fewer_layers, in_the_same_layers
from meshwright.search.joint.front import Front
from meshwright.search.joint.infeasible import too_large
from meshwright.search.joint.least import hopeless, is_hopeless, last_resort
from meshwright.search.joint.neighbours import neighbours, quicker
from meshwright.search.joint.pareto import (
    add_first_of_many,
    first_front,
    front,
    least_bytes,
    quickest_bytes,
    with_choice,
)
from meshwright.search.joint.prefetch import further_ahead
from meshwright.search.joint.simulated import partly, quickest, quickest_untried
from meshwright.search.least_memory import any_fits
from meshwright.search.memory_limit import fits_in_both, limited, offer, step_of, sure
from meshwright.search.planner import Planner, SearchResult
from meshwright.search.solve import skipping_unproven, solve
from meshwright.search.space.build import Space


def joint(
    planner: Planner, auto: Callable[[Planner, float], SearchResult], *, offload: bool = True
) -> SearchResult:
    """The quickest choice that fits, with the techniques that it takes. `auto` is the search under given ones; it takes
    the seconds of a step that is known.

    Raises PlanError where nothing fits with any of them.
    """
    limit = planner.request.memory_bytes
    if limit is None or planner.evaluator is None:
        try:
            return auto(planner, math.inf)
        except NothingFits as error:
            raise too_large(planner, error.nearest) from None
    search = _Joint(planner, dimensions(planner, offload=offload))
    known = _first(search)
    planner.tell("the least memory")
    nearest: SearchResult | None = None
    tried = False
    if least_bytes(planner, search.space) <= limit:
        if known is not None or search.is_short:
            # Memory is short: the search without techniques takes longest, and seldom has the answer.
            known, tried = quickest(planner, search.made, search.over, known), True
            if known is not None and _is_plain(planner, known):
                if _computes_alone(planner, known):
                    return _unopened(search, _bounded(planner, search.space, known))
                if not planner.request.stop.now() and _is_enough(search, known):
                    best = _again(planner, known)
                    best = planner.under(best.techniques).settled(best)
                    if fits_in_both(planner, best):
                        return _turns(planner, _bounded(planner, search.space, best))
            elif known is not None and (_plain_is_slow(search, known) or _is_near(search, known)):
                return _open(search, known, nearest, tried)
        try:
            below = math.inf if known is None else (1 + TECHNIQUES.worth) * step_of(known)
            base = further_ahead(planner, auto(planner, below))
            if known is None or (1 - TECHNIQUES.worth) * step_of(base) <= step_of(known):  # it is simpler
                known = base
        except NothingFits as error:
            nearest = error.nearest
    if known is None and planner.request.stop.now():
        # An answer is known elsewhere.
        raise DoesNotFit("the search was ended before a plan was found", why="", hint="a longer time_limit")
    return _open(search, known, nearest, tried)


@dataclass(frozen=True)
class _Joint:
    """What a joint search goes by. `over`: the dimensions that are looked at."""

    planner: Planner
    over: tuple[Dimension, ...]

    @functools.cached_property
    def space(self) -> Space:
        """All shardings, of which bounds are known."""
        return self.planner.space(families_of(self.planner)[0][1])

    @functools.cached_property
    def first(self) -> Front:
        """The choice that is tried first."""
        return first_front(self.planner)

    @functools.cached_property
    def made(self) -> Front:
        """The choices that techniques are tried with."""
        return front(self.first, self.space)

    @functools.cached_property
    def is_short(self) -> bool:
        """Whether what would be quickest without a limit takes more than there is; not asked in a small space, where
        exact searches are quick."""
        if self.planner.size <= TECHNIQUES.small_size:
            return False
        return quickest_bytes(self.first, self.space) > (self.planner.request.memory_bytes or math.inf)


def _open(
    search: _Joint, known: SearchResult | None, nearest: SearchResult | None, tried: bool
) -> SearchResult:
    """The best with the techniques that are open, where they can be of use; ended early, the best so far. `known`: the
    best so far, with techniques or without; `nearest`: what came nearest to the limit; `tried`: the techniques were
    looked at."""
    planner, space, over = search.planner, search.space, search.over
    if known is not None and planner.request.stop.now():
        return _bounded(planner, space, known)
    decided = known is None or not _is_plain(planner, known) or known.claims.get("memory_decided", False)
    if not decided or all(len(d.values) == 1 for d in over):
        if known is None:  # what is asked may still fit, as it does where it is chosen
            known = quickest(planner, search.made, over, None)
            if known is None:
                raise too_large(planner, nearest)
            return _bounded(planner, space, known)
        return _turns(planner, known)
    if known is not None and _is_plain(planner, known) and _computes_alone(planner, known):
        return _unopened(search, known)
    if known is None and is_hopeless(planner, space, over):
        raise hopeless(planner, over, nearest)
    return _best(search, known, nearest, tried)


def _computes_alone(planner: Planner, found: SearchResult) -> bool:
    """True if computing alone takes so much of a step that no techniques are worth a search."""
    return planner.least.in_one_stage() >= step_of(found) / (1 + TECHNIQUES.worth)


def _is_enough(search: _Joint, found: SearchResult) -> bool:
    """Whether a choice is so near to its bound that a search that is exact has little to gain, or the space so large
    that it takes half a minute to find what the front has."""
    return search.planner.size > AUTO.lighter_size or (search.is_short and _is_near(search, found))


def _is_near(search: _Joint, found: SearchResult) -> bool:
    """Whether no choice in one piece is much quicker; not asked in a small space, where exact searches are quick."""
    planner = search.planner
    if planner.size <= TECHNIQUES.small_size:
        return False
    return step_of(found) <= (1 + TECHNIQUES.near) * _least_step(planner, search.space)


def _unopened(search: _Joint, found: SearchResult) -> SearchResult:
    """A choice with the techniques that were not looked at, and why."""
    share = search.planner.least.in_one_stage() / step_of(found)
    return replace(found, claims={**found.claims, "choices": unopened_lines(search.over, found, share)})


def _is_plain(planner: Planner, found: SearchResult) -> bool:
    """Whether a choice is under the techniques of the request alone, however far ahead weights are gathered."""
    return replace(found.techniques, prefetch=planner.techniques.prefetch) == planner.techniques


def _plain_is_slow(search: _Joint, known: SearchResult) -> bool:
    """Whether what fits without techniques is so much slower than what is known with them that no search without them
    is worth its time, which is long on a large cluster."""
    planner = search.planner
    slow = 1 + TECHNIQUES.worth if planner.size > AUTO.lighter_size else TECHNIQUES.slow
    plain = [one for one in search.made.seen.values() if _is_plain(planner, one)]
    steps = [step_of(one) for one in plain if fits_in_both(planner, one)]
    return bool(steps) and min(steps) >= slow * step_of(known)


def _best(
    search: _Joint, known: SearchResult | None, nearest: SearchResult | None, tried: bool
) -> SearchResult:
    """The best with the techniques that it takes."""
    planner, space, over, stop = search.planner, search.space, search.over, search.planner.request.stop
    if known is None and planner.request.any_fits:
        if (last := last_resort(planner, space, over)) is None:
            raise too_large(planner, nearest)
        return last
    made = search.made
    best = known if tried else quickest(planner, made, over, known)
    if best is None:
        best = _sought(planner, made, over, space)
    if best is not None and stop.now():
        return _bounded(planner, space, best)
    if best is not None:
        best = sure(planner, best)
    if best is None or not fits_in_both(planner, best):
        best = last_resort(planner, space, over)
    if best is None:
        raise hopeless(planner, over, nearest)
    chosen = best
    if best is not known or not _is_plain(planner, best):
        best = _again(planner, best)
        chosen = fewer_layers(planner, best)
        offer(planner, chosen)
    best, chosen = partly(made, best, chosen)
    planner.tell("techniques", step_of(chosen))
    if stop.now():
        return _bounded(planner, space, chosen)
    if (turning := _turns(planner, chosen)) is not chosen:
        best = chosen = turning
    with_choice(made, best)
    # Around the choice with one policy for all layers: of this a few layers are simulated, of another all.
    near = neighbours(made, over, best)
    for _ in range(TECHNIQUES.moves):  # what is simulated last is not ranked by estimates alone
        other = quicker(made, over, near, best)
        if other is None:
            break
        if stop.now():
            return _bounded(planner, space, min(chosen, other, key=step_of))
        best = other
        few = in_the_same_layers(planner, best, chosen) or fewer_layers(planner, best)
        if step_of(few) <= (1 + TECHNIQUES.as_quick) * step_of(chosen):  # a plainer one may be as quick
            chosen = few
        offer(planner, chosen)
        planner.tell("techniques", step_of(chosen))
        near = neighbours(made, over, best)
    chosen = _bounded(planner, space, chosen)
    lines = technique_lines(made, over, best, near, chosen)
    return replace(chosen, claims={**chosen.claims, "choices": lines})


def _bounded(planner: Planner, space: Space, best: SearchResult) -> SearchResult:
    """The best with how far it is from what no choice under any techniques undercuts."""
    bound = _least_step(planner, space)
    if best.techniques.interleave > 1 or "interleave" not in planner.techniques.given:
        bound = min(bound, planner.least.in_one(2))  # copies that take turns hide what others wait for
    gap = max(0.0, step_of(best) / bound - 1) if bound > 0 else 0.0
    return replace(best, claims={**best.claims, "bound_seconds": bound, "gaps": {"joint": gap}})


def _least_step(planner: Planner, space: Space) -> float:
    """Seconds that no step in one piece is below: by the shardings of a space, else by computing alone."""
    with skipping_unproven():
        return solve(space.problem(1.0), limit_work=TECHNIQUES.bound_work).bound
    return planner.least.in_one(1)


def _first(search: _Joint) -> SearchResult | None:
    """A first answer, where memory is short: data parallel over tensor parallel inside, storage sharded, with layers
    computed again; where that does not fit, under the techniques that are expected to be quickest. Where there is room,
    `auto` has one as soon."""
    planner, made = search.planner, search.first
    limit = planner.request.memory_bytes or 0.0
    for candidate in made.candidates[:1]:
        if made.sums(candidate, planner.techniques) <= MEMORY.little_room * limit and not search.is_short:
            return None
        again = points(tuple(d for d in search.over if d.name == "recompute"), planner.techniques)
        wanted = [(candidate, p.techniques) for p in again if made.sums(candidate, p.techniques) <= limit]
        for one, asked in itertools.chain(wanted, _untried(search)):
            try:
                found = made.evaluated(one, asked, most=TECHNIQUES.slack * limit)
            except PlanError:  # too few examples, or a loss that needs the full batch
                continue
            if fits_in_both(planner, found) and fits_in_both(planner, found := sure(planner, found)):
                offer(planner, found)
                planner.tell("recipe", step_of(found), None)
                return found
    return None


def _untried(search: _Joint) -> Iterator[tuple[Candidate, Techniques]]:
    """Yield the recipes of a first answer, under the techniques that are expected to be quickest; none in a small
    space."""
    if search.planner.size > TECHNIQUES.small_size:
        add_first_of_many(search.first)
        yield from quickest_untried(search.first, search.over)


def _sought(planner: Planner, made: Front, over: tuple[Dimension, ...], space: Space) -> SearchResult | None:
    """Search under the quickest techniques whose sums fit, where no candidate does: temporary buffers were not
    considered when these were chosen. On thousands of ranks one search would take longer than all before it."""
    limit = planner.request.memory_bytes or 0.0
    rows: list[tuple[float, int, Techniques]] = []
    for point in distinct(over, planner.techniques):
        asked = point.techniques
        quick = [c for c in made.candidates if asked.pieces <= c.examples]
        quick = [c for c in quick if not made.overfills_host(c, asked)]
        if any(made.sums(c, asked) <= limit and made.saves(c, asked) for c in quick):
            rows.append((min(made.likely_seconds(c, asked) for c in quick), sum(point.places), asked))
    searches = min(
        TECHNIQUES.searches,
        TECHNIQUES.search_work // (TECHNIQUES.search_simulations * planner.size),
    )
    for _, _, asked in sorted(rows, key=lambda row: row[:2])[:searches]:
        if planner.request.stop.now():
            break
        under = planner.under(asked)
        try:
            if not any_fits(under):
                continue  # of what takes least; a search under the limit takes seconds to come to that
            found = limited(under, space, None, alone=False).found
        except PlanError:
            continue
        if found is None or not fits_in_both(planner, found):  # limits are those of the device
            continue
        if fits_in_both(planner, found := under.settled(found)):
            planner.tell("techniques", step_of(found), None)
            return replace(found, claims={**found.claims, "chosen": "searched under techniques"})
    return None


def _again(planner: Planner, best: SearchResult) -> SearchResult:
    """The best with its shardings and storage searched once more under its techniques, by sums and by what can hide in
    part; as it is in a space where that would take longer than all before."""
    if TECHNIQUES.search_simulations * planner.size > TECHNIQUES.search_work:
        return best
    under = planner.under(best.techniques)
    for alpha in (TECHNIQUES.alpha, None):
        try:
            found = limited(
                under,
                best.space,
                alpha,
                alone=False,
                most_solves=TECHNIQUES.again_solves,
                enough=TECHNIQUES.worth,
                below=step_of(best),
            ).found
        except PlanError:  # shardings that leave a rank without an example of some micro-batch
            continue
        if found is None:
            continue
        found = further_ahead(planner, found, step_of(best))  # others may leave more to gather
        if step_of(found) >= step_of(best):
            continue
        found = replace(found, claims={**found.claims, "chosen": best.claims["chosen"]})
        found = sure(planner, found)
        if fits_in_both(planner, found) and step_of(found) < step_of(best):
            best = found
            offer(planner, best)
            planner.tell("techniques", step_of(best), None)
    return best


def _turns(planner: Planner, best: SearchResult) -> SearchResult:
    """The best, in two copies that take turns where that hides what is waited for."""
    asked, evaluation = best.techniques, best.evaluation
    if (
        "interleave" in asked.given
        or evaluation is None
        or evaluation.exposed_seconds <= TECHNIQUES.exposed * step_of(best)
    ):
        return best
    pieces = micro_batches_of(planner, 2)
    if asked.micro_batches not in pieces.values or pieces.why:
        return best
    try:
        under, most = planner.under(replace(asked, interleave=2)), (1 - TECHNIQUES.worth) * step_of(best)
        found = under.found(best.space, best.states, {})
        if fits_in_both(planner, found) and step_of(found) < most:
            found = under.settled(found)
    except PlanError:
        return best
    if not fits_in_both(planner, found) or step_of(found) >= most:
        return best
    # What one copy waits for another computes beside: of a chain only what is computed is left.
    bound = planner.least.in_one(2)
    known = best.claims.get("bound_seconds")
    bound = bound if known is None else min(bound, known)
    kept = {k: v for k, v in best.claims.items() if k in ("space", "chosen", "candidates", "choices")}
    gaps = {"joint": max(0.0, step_of(found) / bound - 1)}
    return replace(found, claims={**found.claims, **kept, "bound_seconds": bound, "gaps": gaps})
