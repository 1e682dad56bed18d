"""Choices that differ from a given one in a single technique: the search moves on while one of these is quicker, and
the report lists them. Those that may be quicker by their estimate are simulated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.core.techniques import Techniques
from meshwright.errors import PlanError
from meshwright.search.budget import TECHNIQUES
from meshwright.search.joint.dimensions import Dimension, with_values
from meshwright.search.joint.front import Front
from meshwright.search.memory_limit import fits_in_both, step_of, sure
from meshwright.search.planner import SearchResult

SHARDINGS = "shardings"  # the name of a choice that differs in shardings and storage alone


@dataclass(frozen=True)
class Neighbour:
    """A choice beside the best. `seconds` of its step: simulated where it was `found`, else an estimate by which it is
    no quicker."""

    techniques: Techniques
    seconds: float
    found: SearchResult | None = None


def neighbours(made: Front, over: Sequence[Dimension], best: SearchResult) -> dict[str, Neighbour]:
    """By technique, the quickest with another value of it that fits; under `SHARDINGS` that with the same techniques.
    Those without one are left out."""
    here, step = best.techniques, step_of(best)
    first = _next(made, best, [(here, _enough(None, here, here, step))])
    found = {SHARDINGS: first}
    if first is not None and first.found is not None:
        step = min(step, first.seconds)  # others must be quicker than that, too
    for dimension in over:
        mine = value_of(dimension, here)
        others = [with_values(here, {dimension.name: v}) for v in dimension.values if v != mine]
        asked = [(t, _enough(dimension, t, here, step)) for t in others if t != here]
        found[dimension.name] = _next(made, best, asked)
    return {name: one for name, one in found.items() if one is not None}


def quicker(
    made: Front, over: Sequence[Dimension], near: dict[str, Neighbour], best: SearchResult
) -> SearchResult | None:
    """A neighbour that is quicker than the best, or as quick and plainer, evaluated in full; None where there is none.
    What was evaluated in full stands in `near` from then on, and what does not fit then is taken out."""
    named = {d.name: d for d in over}
    for name, one in sorted(near.items(), key=lambda each: each[1].seconds):
        enough = _enough(named.get(name), one.techniques, best.techniques, step_of(best))
        if one.found is None or one.seconds >= enough:
            continue
        found = sure(made.planner, one.found)
        if not fits_in_both(made.planner, found):
            del near[name]
            continue
        near[name] = Neighbour(one.techniques, step_of(found), found)
        if near[name].seconds < enough:
            return found
    return None


def _enough(dimension: Dimension | None, techniques: Techniques, best: Techniques, step: float) -> float:
    """Seconds of a step below which a choice under techniques, which differ from the best's in a dimension at most,
    takes its place: one that is plainer need not be quicker than its `step`, any other must be."""
    if dimension is not None and _is_plainer(dimension, techniques, best):
        return (1 + TECHNIQUES.as_quick) * step
    return (1 - TECHNIQUES.as_quick) * step


def _is_plainer(dimension: Dimension, one: Techniques, other: Techniques) -> bool:
    """True if one uses less of a technique; for offload, a true subset."""
    mine, its = value_of(dimension, one), value_of(dimension, other)
    if dimension.name == "offload":
        return set(mine) < set(its)
    return dimension.values.index(mine) < dimension.values.index(its)


def value_of(dimension: Dimension, techniques: Techniques) -> Any:
    """Return the value of a technique; if layers have a policy each, the policy."""
    mine = getattr(techniques, dimension.name)
    return mine[0][1] if dimension.name == "recompute" and isinstance(mine, tuple) else mine


def _next(made: Front, best: SearchResult, asked: Sequence[tuple[Techniques, float]]) -> Neighbour | None:
    """The quickest choice but the best under some techniques, the plainest first. With each are the seconds that a
    choice must be expected to stay below to be simulated."""
    limit = made.planner.request.memory_bytes or 0.0
    rows: list[tuple[float, int, int]] = []
    # of the same shardings and storage, which are looked at beside others
    own: list[tuple[float, int, int]] = []
    for place, (techniques, _) in enumerate(asked):
        for number, candidate in enumerate(made.candidates):
            same = candidate.space is best.space and candidate.states == best.states
            if same and techniques == best.techniques:
                continue
            sliced = best.techniques.slice_activation and not techniques.slice_activation
            # What slices leave out by sums may be nothing in the program of these shardings, which tells.
            room = (math.inf if sliced else TECHNIQUES.slack * limit) if same else limit
            if (
                techniques.pieces <= candidate.examples
                and made.peak_bytes(candidate, techniques) <= room
                and not made.overfills_host(candidate, techniques)
                and made.saves(candidate, techniques)
            ):
                row = (made.likely_seconds(candidate, techniques), place, number)
                (own if same else rows).append(row)
    quickest: Neighbour | None = None
    estimated: Neighbour | None = None
    for _, place, number in [*sorted(own)[:1], *sorted(rows)[: TECHNIQUES.neighbour_simulations]]:
        techniques, enough = asked[place]
        candidate = made.candidates[number]
        likely = made.likely_seconds(candidate, techniques)
        if quickest is not None and likely >= quickest.seconds:
            continue
        slower = made.plainer_seconds(candidate, techniques) >= enough
        if made.spent or slower or likely >= enough:
            if estimated is None or likely < estimated.seconds:
                estimated = Neighbour(techniques, likely)
            continue
        try:
            found = made.evaluated(candidate, techniques, enough)
        except PlanError:
            continue
        step = step_of(found)
        if fits_in_both(made.planner, found) and (quickest is None or step < quickest.seconds):
            quickest = Neighbour(techniques, step, found)
    return min((one for one in (quickest, estimated) if one), key=lambda one: one.seconds, default=None)


__all__ = ["SHARDINGS", "Neighbour", "neighbours", "quicker", "value_of"]
