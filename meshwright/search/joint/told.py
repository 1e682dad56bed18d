"""What a reader is told of each technique that was open: what was chosen, and what the next best would cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.errors import PlanError
from meshwright.redistribute.steps import show_bytes
from meshwright.search.joint.dimensions import Dimension, fits_in_both
from meshwright.search.joint.fronts import Front
from meshwright.search.planner import Found

TRIES = 3  # simulations for the next best of a technique


def told(made: Front, over: tuple[Dimension, ...], best: Found) -> tuple[str, ...]:
    """A line for each technique."""
    return tuple(_line(made, dimension, best) for dimension in over)


def _line(made: Front, dimension: Dimension, best: Found) -> str:
    mine = getattr(best.techniques, dimension.name)
    text = f"auto chose {dimension.name}={shown(mine)}"
    if dimension.why:
        text += f": {dimension.why}"
    policy = mine[0][1] if dimension.name == "recompute" and isinstance(mine, tuple) else mine
    others = [v for v in dimension.values if v != policy]
    said = [_plainer(made, dimension, policy, best), _next(made, dimension, others, best)]
    return "; ".join([text, *filter(None, said)])


def _plainer(made: Front, dimension: Dimension, mine: Any, best: Found) -> str:
    """What the value before (nothing, of what the host may have) would take, where that is over the limit whatever the
    cuts."""
    place = dimension.values.index(mine)
    limit = made.planner.request.memory_bytes or 0.0
    if not place:
        return ""
    value = dimension.values[0 if dimension.name == "offload" else place - 1]
    other = replace(best.techniques, **{dimension.name: value})
    least = min(made.peak_bytes(candidate, other) for candidate in made.candidates)
    return f"{shown(value)} does not fit ({show_bytes(least)})" if least > limit else ""


def _next(made: Front, dimension: Dimension, others: list[Any], best: Found) -> str:
    """The quickest of the other values that fits, simulated."""
    limit = made.planner.request.memory_bytes or 0.0
    rows: list[tuple[float, int, int, Any]] = []
    for place, value in enumerate(others):
        other = replace(best.techniques, **{dimension.name: value})
        for number, candidate in enumerate(made.candidates):
            if other.pieces <= candidate.examples and made.peak_bytes(candidate, other) <= limit:
                rows.append((made.least_seconds(candidate, other), place, number, value))
    for _, _, number, value in sorted(rows, key=lambda row: row[:3])[:TRIES]:
        try:
            found = made.judged(made.candidates[number], replace(best.techniques, **{dimension.name: value}))
        except PlanError:
            continue
        if fits_in_both(made.planner, found):
            more = found.claims["step_seconds"] - best.claims["step_seconds"]
            return f"next best {shown(value)} at {1e3 * more:+.3g} ms"
    return "nothing else was found that fits" if others else ""


def shown(value: Any) -> str:
    """``'full' in blocks.0-11`` for a policy of some layers; else as it is written."""
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return f"{value[0][1]!r} in {', '.join(name for name, _ in value)}"
    return repr(value)


__all__ = ["shown", "told"]
