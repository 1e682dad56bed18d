"""The quickest choices with the techniques that they take: simulated in the order of what their sums say."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshwright.core.techniques import ACTIVATIONS, Techniques
from meshwright.errors import PlanError
from meshwright.search.budget import AUTO, TECHNIQUES
from meshwright.search.joint.candidates import Candidate
from meshwright.search.joint.dimensions import Dimension, Point, distinct
from meshwright.search.joint.fewer_layers import fewer_layers, lighter_policies
from meshwright.search.joint.front import Front
from meshwright.search.joint.twins import Twins
from meshwright.search.memory_limit import fits_in_both, offer, step_of, sure
from meshwright.search.planner import Planner, SearchResult


def quickest(
    planner: Planner,
    made: Front,
    over: tuple[Dimension, ...],
    base: SearchResult | None,
) -> SearchResult | None:
    """The quickest of what is simulated: candidates and points in the order of what they are expected to take."""
    limit = planner.request.memory_bytes
    assert limit is not None
    rows = [
        (_least(made, candidate, point.techniques), sum(point.places), number, point)
        for number, candidate in enumerate(made.candidates)
        for point in distinct(over, planner.techniques)
        if point.techniques.pieces <= candidate.examples
    ]
    rows.sort(key=lambda row: row[:3])
    queue = [(row[0], place) for place, row in enumerate(rows)]
    best, tries, slower = base, 0, 0
    over_limit: list[float] = []  # peaks of those that do not fit
    fitting: list[tuple[int, Point]] = []
    twins = Twins(planner)
    while queue and tries < TECHNIQUES.simulations and slower < TECHNIQUES.patience:
        if _is_far(over_limit, limit) or planner.request.stop.now() or made.spent:
            break
        expected, place = heapq.heappop(queue)
        least, _, number, point = rows[place]
        step = math.inf if best is None else step_of(best)
        if least >= (1 - TECHNIQUES.worth) * step:
            continue
        candidate = made.candidates[number]
        if any(n == number and point.beyond(p) for n, p in fitting):
            continue
        now = least + made.least_late(point.techniques)  # what was learned of the techniques since
        if now <= expected:
            spared = spared_seconds(made, candidate, point.techniques)
            now = made.likely_seconds(candidate, point.techniques) - spared
            if now >= (1 - TECHNIQUES.worth) * step:
                continue
        if now > expected:
            heapq.heappush(queue, (now, place))
            continue
        if not made.may_fit(candidate, point.techniques):
            continue
        if not made.saves(candidate, point.techniques):
            continue
        if made.overfills_host(candidate, point.techniques):
            continue
        twin = found = twins.found(number, point.techniques)
        if found is None:
            try:
                found = made.evaluated(candidate, point.techniques, step, TECHNIQUES.slack * limit)
            except PlanError:  # too few examples, or a loss that needs the full batch
                continue
            twins.add(number, point.techniques, found)
            planner.tell("techniques", step_of(best) if best else None, None)
        if not fits_in_both(planner, found):
            over_limit.append(planner.peak_bytes(found))
        else:
            tries += 1
            fitting.append((number, point))
            slower += best is not None
            if twin is not None:
                continue  # what was found of it is known
            if (spared := spared_seconds(made, candidate, point.techniques)) > 0:
                made.partly.append((step_of(found) - spared, found))
            if step_of(found) < step:
                found = sure(planner, found)
                if fits_in_both(planner, found):
                    best, slower = found, 0
                    offer(planner, found)
                    planner.tell("techniques", step_of(best), None)
    return best


def quickest_untried(made: Front, over: tuple[Dimension, ...]) -> Iterator[tuple[Candidate, Techniques]]:
    """Yield what was not simulated, may fit, and is expected to be quickest, a few; what simulations in between saw is
    taken into account."""
    planner, tries = made.planner, 0
    limit = planner.request.memory_bytes or math.inf
    every = [point.techniques for point in distinct(over, planner.techniques)]
    rows = [
        (made.likely_seconds(candidate, asked), number, place)
        for number, candidate in enumerate(made.candidates)
        for place, asked in enumerate(every)
        if asked.pieces <= candidate.examples
    ]
    for _, number, place in sorted(rows):
        candidate, asked = made.candidates[number], every[place]
        if (candidate, asked) in made.seen or made.overfills_host(candidate, asked):
            continue
        if made.peak_bytes(candidate, asked) > limit or not made.saves(candidate, asked):
            continue
        yield candidate, asked
        tries += 1
        if tries == TECHNIQUES.first_tries or planner.request.stop.now():
            return


def spared_seconds(made: Front, candidate: Candidate, techniques: Techniques) -> float:
    """About the seconds that are spared if only as many layers are computed again as the limit asks for; 0 where none
    must be, and where what is not computed again goes to the host."""
    again, limit = made.again_seconds(candidate, techniques), made.planner.request.memory_bytes
    if not again or limit is None or made.planner.nodes > AUTO.full_nodes:
        return 0.0
    if "recompute" in techniques.given or ACTIVATIONS in techniques.offload:
        return 0.0
    least, spared = made.peak_bytes(candidate, techniques), 0.0
    for lighter in lighter_policies(made.planner, str(techniques.recompute)):
        other = replace(techniques, recompute=lighter)
        most = made.peak_bytes(candidate, other)
        if least < limit < most:
            fewer = again - made.again_seconds(candidate, other)
            spared = max(spared, (limit - least) / (most - least) * fewer)
    return spared


def _least(made: Front, candidate: Candidate, techniques: Techniques) -> float:
    """About the least seconds of a candidate, with a policy of recompute in no more layers than must be."""
    return made.least_seconds(candidate, techniques) - spared_seconds(made, candidate, techniques)


def _is_far(over_limit: Sequence[float], limit: float) -> bool:
    """True once so many did not fit that no other is expected to; of those near the limit more are tried."""
    near = min(over_limit, default=limit) <= TECHNIQUES.slack * limit
    return len(over_limit) >= TECHNIQUES.over_limit * (2 if near else 1)


def partly(made: Front, best: SearchResult, chosen: SearchResult) -> tuple[SearchResult, SearchResult]:
    """A choice with a policy of recompute for all layers and the same with it in fewer, where that is quicker than what
    is `chosen`; else the `best` and what is chosen."""
    for expected, found in sorted(made.partly, key=lambda each: each[0])[: TECHNIQUES.partly]:
        if expected >= (1 - TECHNIQUES.worth) * step_of(chosen) or made.planner.request.stop.now():
            break
        few = fewer_layers(made.planner, found)
        if step_of(few) < step_of(chosen):
            best, chosen = found, few
            offer(made.planner, chosen)
    return best, chosen


__all__ = ["partly", "quickest", "quickest_untried", "spared_seconds"]
