"""A plan for another program of the same model: that of a training step, carried over to what runs without gradients.

Operators that both programs have (of one kind, in one module, in the same order) are cut as they were; parameters and
buffers stay where they are; what only the new program has follows its neighbours with the least redistribution, as in
``sharding_propagation``. Stages, tables on the host and parked parameters stay; what belongs to gradients goes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from meshwright.blocks import UNFOLDED, Folding
from meshwright.errors import PlanError
from meshwright.graph import Graph
from meshwright.layout import Dim, TensorLayout, dim_axes, without_axes
from meshwright.ops.analysis import factors_of
from meshwright.ops.factors import Site
from meshwright.ops.strategy import Strategy
from meshwright.plan import Plan
from meshwright.plan_folds import stand_ins
from meshwright.search.finish import input_layouts
from meshwright.search.modes import check_layouts
from meshwright.search.options import Scene
from meshwright.search.propagation import propagate
from meshwright.techniques import PARAMETERS, Techniques


def carried(plan: Plan, graph: Graph, folding: Folding = UNFOLDED) -> Plan:
    """The plan of a graph without gradients. `folding`: its equal layers, of which a plan from a file may say two.

    Raises PlanError where the parameters of the graph are not those of the plan, or a stage has nothing to do.
    """
    if plan.own:
        own = tuple(carried(one, graph, folding) for one in plan.own)
        return replace(own[0], own=own)
    scene = Scene(graph, factors_of(graph), plan.mesh)
    stand = stand_ins(graph, [(b.start, b.length, b.repeats) for b in folding.blocks if b.repeats > 2])
    same = _same_operators(plan, graph, stand)
    strategies = _strategies(scene, {n: plan.strategies[here] for n, here in same.items()})
    inputs = input_layouts(scene, strategies)
    for entry in graph.inputs:
        if entry.role != "batch":
            inputs[entry.name] = _kept(plan, entry.name, stand, inputs[entry.name], entry.role == "parameter")
    stages = {n: plan.stages[here] for n, here in same.items() if here in plan.stages}
    missing = sorted({*plan.stages.values()} - {*stages.values()})
    if missing:
        raise PlanError(
            f"stage {missing[0]} of the plan has nothing to do without a loss",
            why="all its operators are of the loss",
            hint='plan.pin_stage("head", …), or stages=, puts a part of the model there',
        )
    hubs = {e.name: plan.hubs.get(e.name) or plan.hubs.get(stand.get(e.name, "")) for e in graph.inputs}
    check_layouts(scene, strategies)
    return replace(
        plan,
        fingerprint=graph.fingerprint,
        strategies=strategies,
        inputs=inputs,
        about={n.name: (n.op, n.module) for n in graph.nodes},
        hubs={name: layout.forward for name, layout in hubs.items() if layout is not None},
        hosts=frozenset(n for n, here in same.items() if here in plan.hosts),
        stages=stages,
        techniques=without_gradients(plan.techniques),
        reasons={},
        nexts={},
        notes=(),
        again=frozenset(),
        keeps={},
        states={},
        claims={},
        folds=(),
        times={},
        stand_ins={},
        origin=None,
    )


def without_gradients(asked: Techniques) -> Techniques:
    """What of some techniques is left where there is no backward and no update. A batch is cut in time for the stages
    of a pipeline alone."""
    return Techniques(
        threshold_kb=asked.threshold_kb,
        pipeline=asked.pipeline,
        schedule=asked.schedule,
        stages=asked.stages,
        micro_batches=asked.micro_batches * asked.interleave if asked.pipeline > 1 else 1,
        fusion=asked.fusion,
        offload=tuple(word for word in asked.offload if word.partition(":")[0] == PARAMETERS),
    )


def _same_operators(plan: Plan, graph: Graph, stand: Mapping[str, str]) -> dict[str, str]:
    """Node → the node of the plan that it is."""
    known: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in plan.strategies:
        known[plan.about.get(name, ("", ""))].append(name)
    mine: dict[tuple[str, str], list[str]] = defaultdict(list)
    for node in graph.nodes:
        mine[node.op, node.module].append(node.name)
    found: dict[str, str] = {}
    for key, names in mine.items():
        if key[1] and len(known[key]) == len(names):
            found.update(zip(names, known[key], strict=True))
    return found | {name: found[s] for name, s in stand.items() if name not in found and s in found}


def _strategies(scene: Scene, given: Mapping[str, Strategy]) -> dict[str, Strategy]:
    """Those of all nodes: as `given`, and where nothing is given with the least redistribution around it."""
    fitting = {n: replace(s, grad=()) for n, s in given.items() if _fits(s, scene.site(n))}
    states = scene.board.start()
    for axis in (a.name for a in scene.mesh.axes if a.size > 1):
        alone = {n: _on_axis(s, axis) for n, s in fitting.items()}
        propagate(scene, states, axis, {n: s for n, s in alone.items() if _is_option(scene, n, s, axis)})
    return {**scene.board.strategies(states), **fitting}


def _fits(strategy: Strategy, site: Site) -> bool:
    """Whether an operator has the factors that a strategy cuts, and the ports through which sums pass."""
    trees = site.trees
    cuts = all(
        letter in trees and without_axes(dim, dim_axes(dim)) == trees[letter] for letter, dim in strategy.cuts
    )
    return cuts and all(p < len(site.node.uses) for _, ports in strategy.through for p in ports)


def _on_axis(strategy: Strategy, axis: str) -> Strategy:
    """What a strategy does on one axis."""

    def alone(dim: Dim) -> Dim:
        return without_axes(dim, {a for a in dim_axes(dim) if a != axis})

    cuts = tuple((letter, alone(dim)) for letter, dim in strategy.cuts if axis in dim_axes(dim))
    return Strategy(cuts, tuple(t for t in strategy.through if t[0] == axis))


def _is_option(scene: Scene, node: str, strategy: Strategy, axis: str) -> bool:
    menu = scene.board.menus[scene.board.number[node]]
    return any(menu.strategy([(option, axis, 1)]) == strategy for option in range(len(menu.entries))) or not (
        strategy.cuts or strategy.through
    )


def _kept(plan: Plan, name: str, stand: Mapping[str, str], made: TensorLayout, needed: bool) -> TensorLayout:
    """Where a parameter or a buffer is under the plan. Raises PlanError for a parameter that the plan does not know."""
    layout = plan.inputs.get(name) or plan.inputs.get(stand.get(name, ""))
    if layout is None and not needed:
        return made
    if layout is None or layout.shape != made.shape:
        raise PlanError(
            f"the plan has no parameter %{name} of {list(made.shape)}",
            why="it was made for another model" if layout is None else f"it has one of {list(layout.shape)}",
            hint="the plan of this model's training step, or mw.forward_step(model, batch, mesh=…)",
        )
    return TensorLayout(layout.dims)


__all__ = ["carried", "without_gradients"]
