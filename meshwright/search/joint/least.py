"""The techniques that leave least on a rank: what fits under them where nothing else does, and why nothing fits."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

from meshwright.core.techniques import Techniques
from meshwright.errors import DoesNotFit, PlanError
from meshwright.search.budget import MEMORY, TECHNIQUES
from meshwright.search.exact_spaces import families_of
from meshwright.search.joint.dimensions import Dimension, Point, dimensions, points
from meshwright.search.joint.infeasible import too_large
from meshwright.search.joint.pareto import least_bytes
from meshwright.search.least_memory import any_fits, least_memory, lowest_peak, saved
from meshwright.search.memory_limit import fits_in_both, limited, step_of
from meshwright.search.planner import Planner, SearchResult
from meshwright.search.space.build import Space


def _last(planner: Planner, over: tuple[Dimension, ...]) -> Techniques:
    """The techniques that leave least on a rank."""
    return list(points(over, planner.techniques))[-1].techniques


def last_resort(planner: Planner, space: Space, over: tuple[Dimension, ...]) -> SearchResult | None:
    """A search under the techniques that leave least on a rank, with the fewest micro-batches that fit."""
    # Of the first alone, and of the one that ends it: what has fewer micro-batches seldom takes less.
    moved = True
    best: SearchResult | None = None
    least, worse = math.inf, 0
    for point in _least_memory_first(planner, over):
        under = planner.under(point.techniques)
        try:
            found = _with_least_memory(under, space, moved or best is not None)
        except PlanError:  # more micro-batches than there are examples
            continue
        if best is not None and (found is None or step_of(found) >= step_of(best)):
            break
        if found is None:
            peak = lowest_peak(under)
            least, worse = min(peak, least), worse + 1 if peak >= least else 0
            if worse == TECHNIQUES.worse_in_a_row:
                break
        best, moved = found, False
    return best


def _with_least_memory(under: Planner, space: Space, moved: bool) -> SearchResult | None:
    # Of the shardings that leave a rank an example of each micro-batch: others may be cheaper, but have no program.
    own = space if under.techniques.pieces == 1 else under.space(families_of(under)[0][1])
    found = limited(under, own, None, alone=False).found
    if found is not None and fits_in_both(under, found := under.settled(found)):
        return replace(found, claims={**found.claims, "chosen": "the least-memory plan"})
    return saved(under, moved=moved)


def hopeless(planner: Planner, over: tuple[Dimension, ...], nearest: SearchResult | None) -> PlanError:
    """Why nothing fits, under the techniques that leave least on a rank."""
    for point in _least_memory_first(planner, over):
        if point.techniques == planner.techniques:
            break
        try:
            error = too_large(planner.under(point.techniques), None, _fits_with_least_memory)
        except PlanError:  # more micro-batches than a rank has examples
            continue
        why = f"with {point.techniques}: {error.why}"
        return DoesNotFit(error.what, why=why, hint=error.hint, parts=error.parts, changes=error.changes)
    return too_large(planner, nearest)


def is_hopeless(planner: Planner, space: Space, over: tuple[Dimension, ...]) -> bool:
    """True if no choice fits by its sums under the techniques that leave least on a rank; or if the sums leave little
    room, and the least-memory choices are simulated to take more than the limit by so much that no search comes down to
    it."""
    limit = planner.request.memory_bytes or math.inf
    if (least := least_bytes(planner.under(_last(planner, over)), space)) > limit:
        return True
    if least <= MEMORY.little_room * limit or planner.evaluator is None:
        return False
    most = limit / MEMORY.within_reach
    return all(
        _is_beyond(planner.under(asked), most, moved=number == 0)
        for number, asked in enumerate(_sparing(planner, over))
    )


def _sparing(planner: Planner, over: tuple[Dimension, ...]) -> list[Techniques]:
    """The techniques of which one leaves about least on a rank: all of every technique in fewer and fewer
    micro-batches, and in the fewest with one step less of one technique. What a micro-batch gathers, a slice brings
    together and the host sends back may take more than it saves."""
    last = tuple(0 if d.name == "micro_batches" else len(d.values) - 1 for d in over)
    less = [
        point.techniques
        for point in points(over, planner.techniques)
        if sum(most - place for most, place in zip(last, point.places, strict=True)) == 1
        and all(most >= place for most, place in zip(last, point.places, strict=True))
    ]
    return list(dict.fromkeys([*(point.techniques for point in _least_memory_first(planner, over)), *less]))


def _is_beyond(under: Planner, most: float, *, moved: bool) -> bool:
    """True if each of the least-memory choices takes more than so many bytes; `moved`: and each that they become when
    an operator is sharded otherwise."""
    choices = least_memory(under)
    try:
        if any(under.peak_bytes(found) <= most for found in choices.below(most)):
            return False
        return not moved or all(under.peak_bytes(found) > most for found in choices.lower())
    except PlanError:  # more micro-batches than a rank has examples
        return True


def _fits_with_least_memory(planner: Planner) -> bool:
    """True if one of the least-memory choices fits, under the techniques that need the least memory."""
    given = planner.under(planner.request.techniques)
    for point in _least_memory_first(given, dimensions(given)):
        with suppress(PlanError):
            if any_fits(given.under(point.techniques)):
                return True
    return False


def _least_memory_first(planner: Planner, over: tuple[Dimension, ...]) -> list[Point]:
    """The points with all of every technique, but for fewer and fewer micro-batches."""
    last = [len(d.values) - 1 for d in over]
    free = [d.name == "micro_batches" for d in over]
    found = [
        point
        for point in points(over, planner.techniques)
        if all(place == most or open for place, most, open in zip(point.places, last, free, strict=True))
    ]
    return found[::-1]


__all__ = ["hopeless", "is_hopeless", "last_resort"]
