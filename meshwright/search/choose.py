"""Which planner makes a plan: in one stage, in stages, on meshes of their own, or a search over all of these."""

from __future__ import annotations

from dataclasses import replace

from meshwright.core.cycles import rare_collection
from meshwright.errors import DoesNotFit
from meshwright.ops.analysis import factors_of
from meshwright.plan.plan import Plan
from meshwright.search.annotations import mesh_of_pins
from meshwright.search.attention_dropout import with_attention_dropout
from meshwright.search.compute_bound import Least
from meshwright.search.deadline import within_time
from meshwright.search.equal_layers import ties_of
from meshwright.search.in_one_stage import plan_in_one_stage
from meshwright.search.layer_groups import folded
from meshwright.search.pipeline.assign import check_alone, check_axis
from meshwright.search.pipeline.choose import (
    beside_stages,
    may_choose_beside_stages,
    may_have_stages,
    with_stages,
)
from meshwright.search.pipeline.in_stages import plan_in_stages, plan_on_own_meshes
from meshwright.search.pipeline.refused import or_what_fits
from meshwright.search.server_tables import or_servers, with_servers
from meshwright.search.wanted import Wanted, mesh_from


@rare_collection()
def choose(wanted: Wanted) -> Plan:
    """The plan of a model. Raises a subclass of MeshwrightError for what cannot be."""
    request = wanted.request
    if request is None:
        return _chosen(wanted)
    request.stop.begin()
    request.stop.disarm()
    with request.stop.on_ctrl_c():
        if request.any_fits:
            return _chosen(wanted)
        if wanted.mode not in (None, "auto"):
            return with_attention_dropout(within_time(request.stop, lambda: _chosen(wanted)), wanted)
        try:
            made = within_time(request.stop, lambda: _chosen(wanted))
        except DoesNotFit as error:
            raise or_servers(error, wanted) from None
    return with_attention_dropout(with_servers(_with_bound(made, wanted), wanted), wanted)


def _with_bound(made: Plan, wanted: Wanted) -> Plan:
    """The plan; if a time limit left the search no time for a bound, with the seconds that computing alone takes."""
    request, step = wanted.request, made.claims.get("step_seconds")
    if request is None or step is None or not request.stop.over or "bound_seconds" in made.claims:
        return made
    folds = folded(wanted.graph, wanted.folding)
    ties, states = ties_of(folds), request.optimizer_states
    bound = Least(folds.graph, factors_of(folds.graph), ties, request.cluster, states).anywhere()
    gaps = {**made.claims.get("gaps", {}), **({"joint": max(0.0, step / bound - 1)} if bound > 0 else {})}
    return replace(made, claims={**made.claims, "bound_seconds": bound, "gaps": gaps})


def _chosen(wanted: Wanted) -> Plan:
    techniques = wanted.techniques
    if isinstance(wanted.mesh, list | tuple):
        return or_what_fits(wanted, _on_own_meshes)
    if techniques.pipeline > 1:
        return or_what_fits(wanted, beside_stages if _is_open(wanted) else plan_in_stages)
    check_alone(techniques)
    if wanted.mesh is not None:
        check_axis(mesh_from(wanted.mesh), techniques)
    return with_stages(wanted) if _is_open(wanted) else plan_in_one_stage(wanted)


def _on_own_meshes(wanted: Wanted) -> Plan:
    assert isinstance(wanted.mesh, list | tuple)
    return plan_on_own_meshes(wanted, wanted.mesh)


def _is_open(wanted: Wanted) -> bool:
    """True if a search may split the model into stages, or choose the options that accompany requested stages."""
    given = wanted.mesh is not None or wanted.pins or mesh_of_pins(wanted.graph) is not None
    if wanted.request is None or wanted.mode not in (None, "auto") or given:
        return False
    if wanted.techniques.pipeline > 1:
        return may_choose_beside_stages(wanted.techniques)
    return may_have_stages(wanted.graph, wanted.request, wanted.techniques)


__all__ = ["choose"]
