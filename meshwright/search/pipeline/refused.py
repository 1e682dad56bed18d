"""Why stages do not fit into memory: what the error says would fit is planned before it is said.

A search for stages sees the full model with the memory of all ranks of the pipeline together. What fits there may not
fit after the split: one rank has the embedding, another the head, and the first holds most micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from meshwright.errors import DoesNotFit, MeshwrightError
from meshwright.plan.plan import Plan
from meshwright.redistribute.steps import enough_bytes, rounded_up
from meshwright.search.budget import AUTO, STAGES
from meshwright.search.joint.infeasible import hint_of
from meshwright.search.stop import Stop
from meshwright.search.wanted import Wanted

Planned = Callable[[Wanted], Plan]


def or_what_fits(wanted: Wanted, planned: Planned) -> Plan:
    """What `planned` makes of `wanted`. Raises DoesNotFit, with the changes alone for which it makes a plan.

    Very large models, and those with a time limit, are not planned again: their changes are estimates.
    """
    try:
        return planned(wanted)
    except DoesNotFit as error:
        request = wanted.request
        if (
            request is None
            or request.any_fits
            or not error.changes
            or request.stop.seconds < float("inf")
            or request.stop.interrupted
            or len(wanted.graph.nodes) > AUTO.full_nodes
        ):
            raise
        raise _checked(error, wanted, planned) from None


def _checked(error: DoesNotFit, wanted: Wanted, planned: Planned) -> DoesNotFit:
    hint, limit = error.hint, 0.0
    kept: dict[str, Mapping[str, Any]] = {}
    for text, change in error.changes.items():
        if "memory" in change:
            limit = _enough(float(change["memory"]), wanted, planned)
            hint = hint.replace(text, told := f"{enough_bytes(limit)} per rank")
            kept[told] = {"memory": limit}
        elif _fits(_with(wanted, change), planned):
            kept[text] = change
    if error.hint == hint_of(error.changes):
        hint = hint_of(kept)
    return DoesNotFit(
        error.what, why=error.why, where=error.where, hint=hint, parts=error.parts, changes=kept
    )


def _enough(limit: float, wanted: Wanted, planned: Planned) -> float:
    """Bytes per rank for which there is a plan, no less than `limit`."""
    for _ in range(STAGES.limits):
        try:
            planned(_with(wanted, {"memory": float(rounded_up(limit))}))
            return limit
        except DoesNotFit as error:
            needs = (float(c["memory"]) for c in error.changes.values() if "memory" in c)
            limit = max(next(needs, 0.0), (1 + STAGES.limit_step) * limit)
    # the peak of a plan that has all the memory it wants fits
    free = planned(_with(wanted, {"memory": 1e3 * limit}))
    return max(limit, float(free.claims["peak_bytes"]))


def _fits(wanted: Wanted, planned: Planned) -> bool:
    try:
        planned(wanted)
    except MeshwrightError:  # it does not fit, or cannot be combined with what was asked
        return False
    return True


def _with(wanted: Wanted, change: Mapping[str, Any]) -> Wanted:
    """The same with a change, in a search that refuses what is over the limit."""
    assert wanted.request is not None
    request = replace(wanted.request, hard=True, stop=Stop())
    techniques = {k: v for k, v in change.items() if k not in ("memory", "optimizer_states")}
    if "memory" in change:
        request = replace(request, memory_bytes=change["memory"])
    if "optimizer_states" in change:
        request = replace(request, optimizer_states=change["optimizer_states"])
    asked = wanted.techniques
    asked = replace(asked, **techniques, given=asked.given | set(techniques))
    return replace(wanted, request=request, techniques=asked)


__all__ = ["or_what_fits"]
