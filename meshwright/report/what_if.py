"""One change to a plan: another shape, or other techniques.

Each function returns a plan that is priced as any other. An impossible change raises PlanError with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.core.graph import Graph
from meshwright.core.layout import (
    Dim,
    SubDim,
    TensorLayout,
    dim_axes,
    leaves,
    map_leaves,
    show_dim,
    without_axes,
)
from meshwright.core.mesh import Mesh
from meshwright.core.rank_numbers import PipelineRank
from meshwright.core.techniques import techniques_from, techniques_of_plan
from meshwright.cost.cluster import Cluster
from meshwright.errors import PlanError
from meshwright.ops.factors import Factors
from meshwright.ops.strategy import Strategy
from meshwright.pipeline.levels import part_of
from meshwright.pipeline.meshes import check_chunks, meshes_of
from meshwright.plan.plan import Plan, fingerprint
from meshwright.search.context import SearchContext
from meshwright.search.pipeline.assign import check_alone, in_one_stage, staged
from meshwright.search.planner import Request
from meshwright.search.techniques.apply import apply
from meshwright.search.to_plan import input_layouts

# ---------------------------------------------------------------- another shape


def transferred(plan: Plan, graph: Graph, factors: Factors, what: str) -> Plan:
    """Return the plan for the same model captured in another shape, with the same shardings.

    `what` names the change for messages. Raises PlanError when the operators differ, or a dim has too few elements.
    """
    if plan.own:
        own = tuple(transferred(one, graph, factors, what) for one in plan.own)
        return replace(own[0], own=own, pins=plan.pins, notes=plan.notes)
    plan = plan.unfolded(graph)
    names = [n.name for n in graph.nodes]
    if names != list(plan.strategies) or {i.name for i in graph.inputs} != set(plan.inputs):
        more = len(set(names) ^ set(plan.strategies))
        raise PlanError(
            f"with {what} the model is another program",
            why=f"{more} operators differ" if more else "its operators come in another order",
            hint="make a new plan: meshwright plan MODEL with the shape",
        )
    strategies = {
        name: _resized(
            s, factors.sites[name].trees, plan.mesh, f"{what}: %{name} ({factors.sites[name].node.op})"
        )
        for name, s in plan.strategies.items()
    }

    def laid(name: str, layout: TensorLayout) -> TensorLayout:
        dims = tuple(
            _dim(new, old, plan.mesh, f"{what}: %{name}")
            for new, old in zip(factors.dims[name], layout.dims, strict=True)
        )
        return replace(layout, dims=dims)

    return replace(
        plan,
        fingerprint=fingerprint(graph),
        strategies=strategies,
        inputs={name: laid(name, layout) for name, layout in plan.inputs.items()},
        hubs={name: laid(name, layout) for name, layout in plan.hubs.items()},
        claims={},
        nexts={},
    )


def _resized(strategy: Strategy, trees: Mapping[str, Dim], mesh: Mesh, where: str) -> Strategy:
    splits = tuple((letter, _dim(trees.get(letter, ()), dim, mesh, where)) for letter, dim in strategy.splits)
    return replace(strategy, splits=splits)


def _dim(new: Dim, old: Dim, mesh: Mesh, where: str) -> Dim:
    """Return a dim with the axes of another of the same structure."""
    axes = [leaf.axes for leaf in leaves(old)]
    if without_axes(old, dim_axes(old)) == new:
        return old
    if len(axes) != len(list(leaves(new))):
        if not any(axes):
            return new
        raise PlanError(
            f"{where} is sharded as {show_dim(old)}, and is now {show_dim(new)}",
            why="its sub-dims differ",
            hint="make a new plan: meshwright plan MODEL with the shape",
        )
    order = iter(axes)

    def put(leaf: SubDim) -> SubDim:
        mine = next(order)
        if leaf.size < mesh.count(mine):
            raise PlanError(
                f"{where} cannot be split over {mesh.show(mine)}",
                why=f"{leaf.size} elements are fewer than {mesh.count(mine)} ranks",
                hint="a larger shape, or a plan of its own",
            )
        return SubDim(leaf.size, mine)

    return map_leaves(new, put)


# ---------------------------------------------------------------- other techniques

STORAGE, KEEPING, STAGES = (techniques_of_plan(part) for part in ("storage", "keeping", "stages"))


def changed(
    plan: Plan, graph: Graph, factors: Factors, changes: Mapping[str, Any], cluster: Cluster | None = None
) -> tuple[Plan, str]:
    """Return the plan with some techniques changed (as `mw.plan` takes them), and the remarks of their passes.

    Effects of a changed technique are removed first, such as a storage layout that a search has sharded too. Raises
    PlanError for an impossible change.
    """
    given = {**plan.techniques.non_defaults(), **changes}
    if not given.get("optimizer_parallel"):  # what only says how goes with it, unless it is asked for anew
        given = {k: v for k, v in given.items() if k in changes or k not in STORAGE}
    asked = techniques_from(given)
    check_alone(asked)
    before = replace(plan.unfolded(graph), claims={}, nexts={}, notes=())
    if STORAGE & set(changes):
        before = stored_as_used(before, graph, factors)
    if KEEPING & set(changes):
        before = replace(before, keeps={})
    found = apply(graph, before, asked, cluster)
    return replace(found, notes=plan.notes), "; ".join(found.notes)


def changed_in_stages(
    plan: Plan,
    graph: Graph,
    factors: Factors,
    changes: Mapping[str, Any],
    request: Request | None = None,
) -> tuple[Plan, str]:
    """Return a plan with stages with some techniques changed, and the remarks.

    Operators keep their shardings, and stages are split again for the new costs. `request` has the cluster and
    optimizer. Raises PlanError for an impossible change, and for more stages than the ranks of the pipeline can share
    evenly.
    """
    asked = techniques_from({**plan.techniques.non_defaults(), **changes})
    world = meshes_of(plan)
    check_chunks(asked, world.places)
    inside = {k: v for k, v in changes.items() if k not in STAGES}
    found: list[Plan] = []
    remarks: dict[str, None] = {}
    for place, one in enumerate(plan.own or (plan,)):
        alone = replace(
            one.unfolded(graph), stages={}, world=None, meshes=(), techniques=in_one_stage(one.techniques)
        )
        cluster = request.cluster if request is not None else None
        on = part_of(cluster, world, PipelineRank(place)) if cluster is not None and plan.own else cluster
        made, remark = changed(alone, graph, factors, inside, on)
        found.append(replace(made, notes=()))
        remarks[remark] = None
    whole = replace(found[0], own=tuple(found)) if plan.own else found[0]
    made = staged(graph, whole, asked, world, request)
    return replace(made, claims={}, notes=plan.notes, pins=plan.pins), "; ".join(
        t for t in (*remarks, *made.notes) if t
    )


def stored_as_used(plan: Plan, graph: Graph, factors: Factors) -> Plan:
    """Return the plan with every trained parameter stored and updated in its layout of use."""
    inputs, hubs = dict(plan.inputs), dict(plan.hubs)
    again = set(plan.again)
    used = input_layouts(SearchContext(graph, factors, plan.mesh), plan.strategies)
    for entry in graph.input_of("parameter"):
        hub = hubs.get(entry.name)
        if entry.needs_grad and (hub is None or not hub.partial):
            inputs[entry.name] = hubs.pop(entry.name, used[entry.name])
            again.discard(entry.name)
    return replace(plan, inputs=inputs, hubs=hubs, again=frozenset(again), states={})


__all__ = ["changed", "changed_in_stages", "stored_as_used", "transferred"]
