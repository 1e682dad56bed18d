"""Explains each technique that was open: the chosen value, and the cost of the next best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.core.techniques import Techniques
from meshwright.redistribute.steps import show_bytes
from meshwright.search.budget import TECHNIQUES
from meshwright.search.joint.dimensions import Dimension
from meshwright.search.joint.front import Front
from meshwright.search.joint.neighbours import Neighbour, value_of
from meshwright.search.planner import SearchResult

IF_CHOSEN = ("gradient_accumulation_shard",)  # says nothing of itself where it is not taken


def technique_lines(
    made: Front,
    over: tuple[Dimension, ...],
    best: SearchResult,
    near: Mapping[str, Neighbour],
    answer: SearchResult,
) -> tuple[str, ...]:
    """A line for each technique of the `answer`. `near`: of each the next best, beside the `best` with one
    policy of recompute for all layers."""
    said = [d for d in over if d.name not in IF_CHOSEN or getattr(answer.techniques, d.name)]
    lines = [_line(made, d, best, near.get(d.name), answer.techniques) for d in said]
    if answer.techniques.prefetch > 1 and "prefetch" not in answer.techniques.given:
        lines.append(f"auto chose prefetch={answer.techniques.prefetch}: gathers of weights start earlier")
    return tuple(lines)


def unopened_lines(over: tuple[Dimension, ...], answer: SearchResult, share: float) -> tuple[str, ...]:
    """Lines for an `answer` of whose step computing alone takes such a share that no technique was looked at."""
    names = ", ".join(d.name for d in over if len(d.values) > 1)
    line = f"auto did not look at {names}: computing alone takes {share:.1%} of the step, whatever the techniques"
    return (line, *(_chosen(d, answer.techniques) for d in over if d.why))


def _chosen(dimension: Dimension, answer: Techniques) -> str:
    text = f"auto chose {chosen(dimension.name, getattr(answer, dimension.name))}"
    return f"{text}: {dimension.why}" if dimension.why else text


def _line(
    made: Front, dimension: Dimension, best: SearchResult, near: Neighbour | None, answer: Techniques
) -> str:
    said = [_plainer(made, dimension, best)]
    if near is not None:
        more = near.seconds - best.claims["step_seconds"]
        alike = abs(more) <= TECHNIQUES.as_quick * best.claims["step_seconds"]
        about = "about " if near.found is None else ""
        cost = f"{about}as quick" if alike else f"at {about}{later(more)}"
        if about and more < 0 and not alike:
            cost = "was not simulated"  # its estimate is a lower bound
        said.append(f"next best {shown(value_of(dimension, near.techniques))} {cost}")
    elif len(dimension.values) > 1:
        said.append("nothing else was found that fits")
    return "; ".join([_chosen(dimension, answer), *filter(None, said)])


def _plainer(made: Front, dimension: Dimension, best: SearchResult) -> str:
    """Describe the memory of the next plainer value (for offload: without it), if it exceeds the limit whatever the
    shardings."""
    place = dimension.values.index(value_of(dimension, best.techniques))
    limit = made.planner.request.memory_bytes or 0.0
    if not place:
        return ""
    value = dimension.values[0 if dimension.name == "offload" else place - 1]
    other = replace(best.techniques, **{dimension.name: value})
    least = min(made.peak_bytes(candidate, other) for candidate in made.candidates)
    return f"{shown(value)} does not fit ({show_bytes(least)})" if least > limit else ""


def later(seconds: float) -> str:
    """``+12.3 ms``, ``+2.65 s``, ``-0.1 ms``."""
    return f"{seconds:+.3g} s" if abs(seconds) >= 1 else f"{1e3 * seconds:+.3g} ms"


def chosen(name: str, value: Any) -> str:
    """``recompute='full'``, ``no recompute``."""
    return f"no {name}" if value in ("", ()) else f"{name}={shown(value)}"


def shown(value: Any) -> str:
    """``'full' in blocks.0-11`` for a policy of some layers; else as it is written."""
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return f"{value[0][1]!r} in {', '.join(name for name, _ in value)}"
    return repr(value) if value != "" and value != () else "none"


__all__ = ["chosen", "later", "shown", "technique_lines", "unopened_lines"]
