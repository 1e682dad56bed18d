"""The modes without a cost model: stand alone, data parallel, semi-automatic, sharding propagation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.errors import PlanError, did_you_mean
from meshwright.graph import Graph
from meshwright.layout import verify
from meshwright.mesh import Mesh
from meshwright.ops.factors import Factors, analyze
from meshwright.ops.strategy import WHOLE, layouts
from meshwright.ops.table import has_rule, rules_of
from meshwright.plan import Plan, fingerprint
from meshwright.search.data_parallel import assign_batch, check_batch
from meshwright.search.finish import input_layouts, pass_gradients_back
from meshwright.search.options import Assignment, Scene
from meshwright.search.pins import Seeds, given_values, mark_seeds, module_seeds, pin_specs, region
from meshwright.search.propagation import propagate

MODES = ("stand_alone", "data_parallel", "semi_auto", "sharding_propagation")
LATER = ("recursive_programming", "dynamic_programming", "auto")


def make_plan(
    graph: Graph, mesh: Mesh, mode: str, pins: Mapping[str, Mapping[str, Any]] | None = None
) -> Plan:
    """The plan of a graph on a mesh under a mode. `pins`: module pattern → letter → axis.

    Raises PlanError for an unknown mode, StrategyError for cuts that cannot be.
    """
    if mode not in MODES:
        known = (
            "it comes with the cost model and is not there yet"
            if mode in LATER
            else did_you_mean(mode, MODES)
        )
        raise PlanError(f"there is no mode {mode!r}", hint=known)
    if mode == "stand_alone" and mesh.size != 1:
        raise PlanError(
            f'mode="stand_alone" runs on one rank, the mesh has {mesh.size}', hint='mode="data_parallel"'
        )
    scene = Scene(graph, analyze(graph, rules_of(graph)), mesh)
    assignment: Assignment = {n.name: WHOLE for n in graph.nodes}
    reasons: dict[str, str] = {}
    axes = tuple(a.name for a in mesh.axes if a.size > 1)
    specs = pin_specs(graph)
    seeds = _joined(mark_seeds(scene, specs), module_seeds(scene, pins or {}))
    pinned_axes = {a for a, nodes in seeds.items() if any(s != WHOLE for s in nodes.values())}
    given = given_values(graph, specs)
    match mode:
        case "data_parallel":
            check_batch(scene, axes)
            assign_batch(scene, assignment, axes, graph.nodes)
        case "semi_auto":
            inside = region(graph, specs) | {n for nodes in seeds.values() for n in nodes}
            for axis in axes:
                propagate(scene, assignment, axis, seeds.get(axis, {}), within=inside, given=given)
            outside = tuple(n for n in graph.nodes if n.name not in inside)
            assign_batch(scene, assignment, axes, outside)
            reasons |= dict.fromkeys(inside, "annotated") | {n.name: "data parallel" for n in outside}
        case "sharding_propagation":
            for axis in axes:
                if axis in pinned_axes:
                    wanted = {n: s for n, s in seeds[axis].items() if s != WHOLE}
                    propagate(scene, assignment, axis, wanted, given=given)
                else:
                    assign_batch(scene, assignment, (axis,), graph.nodes)
            seeded = {n for axis in pinned_axes for n, s in seeds[axis].items() if s != WHOLE}
            reasons |= {n.name: "annotated" if n.name in seeded else "propagated" for n in graph.nodes}
    pass_gradients_back(scene, assignment)
    plan = Plan(
        mesh,
        mode,
        fingerprint(graph),
        assignment,
        input_layouts(graph, scene.factors, mesh, assignment),
        reasons,
        about={n.name: (n.op, n.module) for n in graph.nodes},
        pins=dict(pins or {}),
    )
    check_layouts(graph, scene.factors, plan)
    return plan.with_notes(*_unknown(graph))


def check_layouts(graph: Graph, factors: Factors, plan: Plan) -> None:
    """Verify every port of every node against the laws. Raises LayoutError with the operator and its line."""
    for node in graph.nodes:
        ports = layouts(factors.sites[node.name], plan.strategies[node.name])
        for layout in (*ports.inputs, *ports.outputs):
            verify(layout, plan.mesh, f"%{node.name} ({node.op})")


def _joined(*many: Seeds) -> Seeds:
    result: Seeds = {}
    for seeds in many:
        for axis, nodes in seeds.items():
            result.setdefault(axis, {}).update(nodes)
    return result


def _unknown(graph: Graph) -> tuple[str, ...]:
    unknown = {n.op: n for n in graph.nodes if not has_rule(n.op)}
    return tuple(
        f"no rule is known for {op}: it stays whole and every rank repeats it ({node.where}); "
        f'give it one with mw.rule("{op}", "…")'
        for op, node in unknown.items()
    )
