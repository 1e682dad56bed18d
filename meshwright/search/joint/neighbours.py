"""Choices that differ from a given one in a single technique: the search moves on while one of these is quicker, and
the report lists them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meshwright.core.techniques import Techniques
from meshwright.errors import PlanError
from meshwright.search.budget import TECHNIQUES
from meshwright.search.joint.dimensions import Dimension
from meshwright.search.joint.pareto import Front
from meshwright.search.memory_limit import fits_in_both
from meshwright.search.planner import SearchResult

SHARDINGS = "shardings"  # the name of a choice that differs in shardings and storage alone


def neighbours(made: Front, over: Sequence[Dimension], best: SearchResult) -> dict[str, SearchResult]:
    """By technique, the quickest with another value of it that fits, simulated; under `SHARDINGS` that with the same
    techniques. Those without one are left out."""
    found = {SHARDINGS: _next(made, best, [best.techniques])}
    for dimension in over:
        others = [v for v in dimension.values if v != value_of(dimension, best)]
        found[dimension.name] = _next(
            made, best, [replace(best.techniques, **{dimension.name: v}) for v in others]
        )
    return {name: one for name, one in found.items() if one is not None}


def quicker(
    made: Front, over: Sequence[Dimension], near: dict[str, SearchResult], best: SearchResult
) -> SearchResult | None:
    """A neighbour that is quicker than the best, or as quick and plainer, evaluated in full; None where there is none.
    What was evaluated in full stands in `near` from then on, and what does not fit then is taken out."""
    step = best.claims["step_seconds"]
    for name, one in sorted(near.items(), key=lambda named: named[1].claims["step_seconds"]):
        plainer = any(d.name == name and _is_plainer(d, one, best) for d in over)
        richer = any(d.name == name and _is_plainer(d, best, one) for d in over)
        enough = (
            1 + TECHNIQUES.as_quick
            if plainer
            else 1 - TECHNIQUES.as_quick
            if richer
            else 1 - TECHNIQUES.no_quicker
        ) * step
        if one.claims["step_seconds"] >= enough:
            continue
        found = made.planner.under(one.techniques).settled(one)
        if not fits_in_both(made.planner, found):
            del near[name]
            continue
        near[name] = found
        if found.claims["step_seconds"] < enough:
            return found
    return None


def _is_plainer(dimension: Dimension, one: SearchResult, other: SearchResult) -> bool:
    """True if a choice uses less of a technique; for offload, a true subset."""
    mine, its = value_of(dimension, one), value_of(dimension, other)
    if dimension.name == "offload":
        return set(mine) < set(its)
    return dimension.values.index(mine) < dimension.values.index(its)


def value_of(dimension: Dimension, found: SearchResult) -> Any:
    """Return the value of a technique in a choice; if layers have a policy each, the policy."""
    mine = getattr(found.techniques, dimension.name)
    return mine[0][1] if dimension.name == "recompute" and isinstance(mine, tuple) else mine


def _next(made: Front, best: SearchResult, asked: Sequence[Techniques]) -> SearchResult | None:
    """The quickest choice but the best under some techniques, the plainest first."""
    limit = made.planner.request.memory_bytes or 0.0
    rows: list[tuple[float, int, int]] = []
    # of the same shardings and storage, which are looked at beside others
    own: list[tuple[float, int, int]] = []
    for place, techniques in enumerate(asked):
        for number, candidate in enumerate(made.candidates):
            same = candidate.space is best.space and candidate.states == best.states
            if same and techniques == best.techniques:
                continue
            sliced = best.techniques.slice_activation and not techniques.slice_activation
            # What slices leave out by sums may be nothing in the program of these shardings, which tells.
            room = (math.inf if sliced else TECHNIQUES.slack * limit) if same else limit
            if techniques.pieces <= candidate.examples and made.peak_bytes(candidate, techniques) <= room:
                row = (made.likely_seconds(candidate, techniques), place, number)
                (own if same else rows).append(row)
    quickest: SearchResult | None = None
    for _, place, number in [*sorted(own)[:1], *sorted(rows)[: TECHNIQUES.neighbour_simulations]]:
        likely = made.likely_seconds(made.candidates[number], asked[place])
        if quickest is not None and likely >= quickest.claims["step_seconds"]:
            continue
        try:
            found = made.evaluated(made.candidates[number], asked[place])
        except PlanError:
            continue
        if fits_in_both(made.planner, found):
            quickest = min(quickest or found, found, key=lambda one: one.claims["step_seconds"])
    return quickest


__all__ = ["SHARDINGS", "neighbours", "quicker", "value_of"]
