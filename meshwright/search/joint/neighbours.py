"""What differs from a choice in one technique: a choice is not left while one of these is quicker, and a reader is told
of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meshwright.errors import PlanError
from meshwright.search.joint.dimensions import Dimension, fits_in_both
from meshwright.search.joint.fronts import Front
from meshwright.search.planner import Found

TRIES = 3  # simulations for the next best of a technique
ALIKE = 1e-4  # of a step: what differs less is as quick


def neighbours(made: Front, over: Sequence[Dimension], best: Found) -> dict[str, Found]:
    """By technique, the quickest with another value of it that fits, simulated; techniques without one are left out."""
    found = {dimension.name: _next(made, dimension, best) for dimension in over}
    return {name: one for name, one in found.items() if one is not None}


def quicker(made: Front, near: dict[str, Found], best: Found) -> Found | None:
    """A neighbour that is quicker than the best, judged in full; None where there is none. What was judged in full
    stands in `near` from then on, and what does not fit then is taken out."""
    for name, one in sorted(near.items(), key=lambda named: named[1].claims["step_seconds"]):
        if one.claims["step_seconds"] >= best.claims["step_seconds"]:
            return None
        found = made.planner.under(one.techniques).settled(one)
        if not fits_in_both(made.planner, found):
            del near[name]
            continue
        near[name] = found
        if found.claims["step_seconds"] < (1 - ALIKE) * best.claims["step_seconds"]:
            return found
    return None


def value_of(dimension: Dimension, found: Found) -> Any:
    """What a choice has of a technique: of layers with a policy each, the policy."""
    mine = getattr(found.techniques, dimension.name)
    return mine[0][1] if dimension.name == "recompute" and isinstance(mine, tuple) else mine


def _next(made: Front, dimension: Dimension, best: Found) -> Found | None:
    limit = made.planner.request.memory_bytes or 0.0
    others = [v for v in dimension.values if v != value_of(dimension, best)]
    rows: list[tuple[float, int, int, Any]] = []
    for place, value in enumerate(others):
        other = replace(best.techniques, **{dimension.name: value})
        for number, candidate in enumerate(made.candidates):
            if other.pieces <= candidate.examples and made.peak_bytes(candidate, other) <= limit:
                rows.append((made.least_seconds(candidate, other), place, number, value))
    quickest: Found | None = None
    for least, _, number, value in sorted(rows, key=lambda row: row[:3])[:TRIES]:
        if quickest is not None and least >= quickest.claims["step_seconds"]:
            break
        try:
            found = made.judged(made.candidates[number], replace(best.techniques, **{dimension.name: value}))
        except PlanError:
            continue
        if fits_in_both(made.planner, found):
            quickest = min(quickest or found, found, key=lambda one: one.claims["step_seconds"])
    return quickest


__all__ = ["ALIKE", "neighbours", "quicker", "value_of"]
