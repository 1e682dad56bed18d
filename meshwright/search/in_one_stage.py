"""The plan of a model in one stage: a mode, and the techniques that go with it."""

from __future__ import annotations

from dataclasses import replace

from meshwright.partition import partition
from meshwright.partition.micro_batches import nothing_to_hide
from meshwright.plan.plan import Plan
from meshwright.predict.step_time import with_turns
from meshwright.search.annotations import mesh_of_pins
from meshwright.search.cost_modes import SEARCHES
from meshwright.search.evaluate import claims_of
from meshwright.search.modes import make_plan, within_limit
from meshwright.search.stop import Stop
from meshwright.search.techniques.apply import apply
from meshwright.search.wanted import Wanted, mesh_from


def plan_in_one_stage(wanted: Wanted) -> Plan:
    """The plan, with what it claims where there is a cluster. Raises PlanError for what cannot be."""
    graph, mesh, mode, request = wanted.graph, wanted.mesh, wanted.mode, wanted.request
    techniques = wanted.techniques
    if mesh is None and request is not None:
        mesh = mesh_of_pins(graph) or request.cluster.mesh
    chosen = mesh_from(mesh, graph)
    if mode is None:
        mode = "auto" if request is not None else "data_parallel"
    if request is not None:
        request = replace(request, techniques=techniques)
    cluster, stop = (request.cluster, request.stop) if request is not None else (None, Stop())
    with stop.answered_by(lambda made: wanted.finished(apply(graph, made, made.techniques, cluster))):
        made = make_plan(graph, chosen, mode, wanted.pins, wanted.folding, request, techniques.pieces)
    techniques = made.techniques if mode in SEARCHES else techniques
    made = apply(graph, made, techniques, cluster)
    if request is not None:
        made = with_turns(graph, made, request.cluster, request.optimizer_states)
    # The sums of a search are those of its space, which knows nothing of what was asked for beside it.
    summed = request if techniques.non_defaults() or not made.claims else None
    if techniques.pieces > 1 or summed is not None:
        parts = partition(graph, made)
        if techniques.pieces > 1:
            made = made.with_notes(*nothing_to_hide(parts))
        if summed is not None:
            joint = ("bound_seconds", "gaps", "space") if "joint" in made.claims.get("gaps", ()) else ()
            kept = {k: v for k, v in made.claims.items() if k in ("chosen", "search_seconds", *joint)}
            claims = claims_of(parts, summed.cluster, summed.optimizer_states)
            made = replace(made, claims={**claims, **kept})
    if request is not None:
        made = within_limit(made, request)
    return wanted.finished(made)


__all__ = ["plan_in_one_stage"]
