"""A plan for another program of the same model: another shape, another loss, or a pass without gradients.

Operators that both programs have (of one kind, in one module, in the same order) are sharded as they were, whatever
their sizes; parameters and buffers stay where they are; what only the new program has follows its neighbours with the
least redistribution, as in ``sharding_propagation``. Stages, tables and parameters on the host stay. Without
gradients what belongs to them goes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.core.folding import UNFOLDED, Folding, matching_names
from meshwright.core.graph import Graph
from meshwright.core.layout import Dim, TensorLayout, axes_onto, dim_axes, leaves, without_axes
from meshwright.core.mesh import Mesh
from meshwright.core.techniques import PARAMETERS, Techniques
from meshwright.errors import PlanError
from meshwright.ops.analysis import factors_of
from meshwright.ops.factors import Site
from meshwright.ops.strategy import Strategy
from meshwright.plan.plan import Plan
from meshwright.search.context import SearchContext
from meshwright.search.modes import check_layouts
from meshwright.search.propagation import propagate
from meshwright.search.techniques.apply import apply
from meshwright.search.to_plan import input_layouts, pass_gradients_back


def carried(plan: Plan, graph: Graph, folding: Folding = UNFOLDED) -> Plan:
    """The plan of a graph without gradients. `folding`: its equal layers, of which a plan from a file may say two.

    Raises PlanError where the parameters of the graph are not those of the plan, or a stage has nothing to do.
    """
    if plan.own:
        own = tuple(carried(one, graph, folding) for one in plan.own)
        return replace(own[0], own=own)
    context, stand, same = _matched(plan, graph, folding)
    strategies = _strategies(context, plan, same)
    inputs = input_layouts(context, strategies)
    for entry in graph.inputs:
        if entry.role != "batch":
            inputs[entry.name] = _kept(plan, entry.name, stand, inputs[entry.name], entry.role == "parameter")
    hubs = {e.name: plan.hubs.get(e.name) or plan.hubs.get(stand.get(e.name, "")) for e in graph.inputs}
    check_layouts(context, strategies)
    return replace(
        _on_graph(plan, graph, same, strategies, inputs),
        hubs={name: layout.forward for name, layout in hubs.items() if layout is not None},
        techniques=without_gradients(plan.techniques),
    )


def carried_to_train(plan: Plan, graph: Graph, held: Sequence[Mapping[str, StoredLayout]]) -> Plan:
    """The plan of another program that trains: another shape or another loss of the same model.

    `held`: input → how a parameter or buffer is stored and updated already, which stays; what is not among them is
    placed as the plan's techniques say. One for all, or one for each of the plan's `own`. Raises
    PlanError where a stage has nothing to do.
    """
    if plan.own:
        own = tuple(_carried_to_train(one, graph, there) for one, there in zip(plan.own, held, strict=True))
        return replace(own[0], own=own)
    return _carried_to_train(plan, graph, held[0])


def _carried_to_train(plan: Plan, graph: Graph, held: Mapping[str, StoredLayout]) -> Plan:
    context, _, same = _matched(plan, graph, UNFOLDED)
    trains = {e.name: e.needs_grad for e in graph.input_of("parameter")}
    isomorphic = (
        len(same) == len(graph.nodes) == len(plan.strategies)
        and all(name in held and held[name].trained == trained for name, trained in trains.items())
        and all(_is_resized(plan.strategies[here], context.site(n), plan.mesh) for n, here in same.items())
    )
    strategies = _strategies(context, plan, same, gradients=isomorphic)
    if not isomorphic:
        pass_gradients_back(context, strategies)
    check_layouts(context, strategies)
    made = _on_graph(plan, graph, same, strategies, input_layouts(context, strategies))
    if isomorphic:
        hubs = _resized_hubs(plan, context)
        made = replace(
            made,
            hubs=hubs,
            again=plan.again & set(hubs),
            keeps={v: how for v, how in plan.keeps.items() if v in graph.types},
            states=plan.states,
        )
    else:
        made = apply(graph, made, plan.techniques)
    return replace(_stored_as_held(made, held), notes=())


@dataclass(frozen=True)
class StoredLayout:
    """How a parameter or a buffer is stored, and how it is updated where that is split further. `trained`: by some
    program so far; how one that is not will be updated is still open."""

    stored: TensorLayout
    updated: TensorLayout | None = None
    trained: bool = False


def _stored_as_held(plan: Plan, held: Mapping[str, StoredLayout]) -> Plan:
    """The plan with parameters and buffers where they are: brought to where they are used, if that differs."""
    inputs, hubs, states, again = dict(plan.inputs), dict(plan.hubs), dict(plan.states), set(plan.again)
    for name, one in held.items():
        if name not in inputs:
            continue
        hub = hubs.get(name)
        use = inputs[name] if hub is None or hub.partial else hub
        if one.trained or use.dims != one.stored.dims:
            states.pop(name, None)
        if one.updated is not None:
            states[name] = one.updated
        if use.dims == one.stored.dims:
            inputs[name] = replace(use, partial=())
            if hub is not None and not hub.partial:
                del hubs[name]
                again.discard(name)
        else:
            inputs[name] = TensorLayout(one.stored.dims)
            if hub is None:
                hubs[name] = use
                again.add(name)
    return replace(plan, inputs=inputs, hubs=hubs, states=states, again=frozenset(again))


def _matched(
    plan: Plan, graph: Graph, folding: Folding
) -> tuple[SearchContext, dict[str, str], dict[str, str]]:
    """The context of a graph, its later copies of equal layers → the second, and its nodes → those of the plan."""
    context = SearchContext(graph, factors_of(graph), plan.mesh)
    stand = matching_names(graph, [(b.start, b.length, b.repeats) for b in folding.blocks if b.repeats > 2])
    return context, stand, _same_operators(plan, graph, stand)


def _on_graph(
    plan: Plan,
    graph: Graph,
    same: Mapping[str, str],
    strategies: Mapping[str, Strategy],
    inputs: Mapping[str, TensorLayout],
) -> Plan:
    """The plan on another graph, with what does not depend on gradients. Raises PlanError for a stage that has nothing
    to do."""
    stages = _stages(plan, graph, same)
    missing = sorted({*plan.stages.values()} - {*stages.values()})
    if missing:
        raise PlanError(
            f"stage {missing[0]} of the plan has nothing to do in this program",
            why="its operators are of the loss that the plan was made for, or of functions that no "
            "module calls",
            hint='plan.pin_stage("head", …), or stages=, puts a part of the model there; to evaluate without stages: '
            "with step.full() as model",
        )
    return replace(
        plan.without_model(),
        fingerprint=graph.fingerprint,
        strategies=strategies,
        inputs=inputs,
        about={n.name: (n.op, n.module) for n in graph.nodes},
        hosts=frozenset(n for n, here in same.items() if here in plan.hosts),
        stages=stages,
        hubs={},
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
    )


def _stages(plan: Plan, graph: Graph, same: Mapping[str, str]) -> dict[str, int]:
    """Node → its stage, without nodes that read what is made in later ones: they follow what they read. What is no
    operator of the plan (the norm of another mode) is where its module is, whose parameters are there."""
    found: dict[str, int] = {}
    homes = _homes(plan, graph, same) if plan.stages else {}
    made: dict[str, int] = {}  # node → the last stage of what it depends on, and its own
    for node in graph.nodes if plan.stages else ():
        after = max((made[graph.producers[u].name] for u in node.uses if u in graph.producers), default=-1)
        stage = plan.stages.get(same.get(node.name, ""), homes.get(node.module, -1))
        if stage >= max(after, 0):
            found[node.name] = stage
        made[node.name] = max(stage, after)
    return found


def _homes(plan: Plan, graph: Graph, same: Mapping[str, str]) -> dict[str, int]:
    """Module → the stage of its operators in the plan; the last one where none of them is in the graph, as of a norm
    whose mode has changed, which counted its batches in the first stage."""
    homes: dict[str, set[int]] = {}
    for name, (_, module) in plan.about.items():
        if module and name in plan.stages:
            homes.setdefault(module, set()).add(plan.stages[name])
    known = {node.module for node in graph.nodes if node.name in same}
    return {m: max(stages) for m, stages in homes.items() if len(stages) == 1 or m not in known}


def without_gradients(asked: Techniques) -> Techniques:
    """Return the techniques that apply without backward and update. A batch is split in time only for the stages of a
    pipeline."""
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
    """Node → the node of the plan that it is: all of them where the programs differ in sizes alone."""
    mine = {node.name: (node.op, node.module) for node in graph.nodes}
    if _without_detach(mine) == _without_detach(plan.about):
        return {name: name for name in mine if name in plan.about}
    known: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in plan.strategies:
        known[plan.about.get(name, ("", ""))].append(name)
    named: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, key in mine.items():
        named[key].append(name)
    found: dict[str, str] = {}
    for key, names in named.items():
        if key[1] and len(known[key]) == len(names):
            found.update(zip(names, known[key], strict=True))
        elif key[1] and known[key]:  # called another number of times: each as the first call of the plan
            found.update(dict.fromkeys(names, known[key][0]))
    return found | {name: found[s] for name, s in stand.items() if name not in found and s in found}


def _without_detach(about: Mapping[str, tuple[str, str]]) -> list[tuple[str, tuple[str, str]]]:
    """The operators of a program but those that only a training step has: what it returns beside a loss is detached."""
    return [item for item in about.items() if item[1][0] != "aten.detach.default"]


def _strategies(
    context: SearchContext, plan: Plan, same: Mapping[str, str], gradients: bool = False
) -> dict[str, Strategy]:
    """Those of all nodes: the plan's, at the sizes of the graph, and where there is none with the least redistribution
    around it. `gradients`: keep where those of outputs are partial."""
    resized = {n: _resized(plan.strategies[here], context.site(n), context.mesh) for n, here in same.items()}
    fitting = {n: s if gradients else replace(s, grad=()) for n, s in resized.items() if s is not None}
    if len(fitting) == len(context.graph.nodes):
        return {node.name: fitting[node.name] for node in context.graph.nodes}
    states = context.option_tables.start()
    for axis in (a.name for a in context.mesh.axes if a.size > 1):
        alone = {n: _on_axis(s, axis) for n, s in fitting.items()}
        propagate(context, states, axis, {n: s for n, s in alone.items() if _is_option(context, n, s, axis)})
    return {**context.option_tables.strategies(states), **fitting}


def _resized(strategy: Strategy, site: Site, mesh: Mesh) -> Strategy | None:
    """A strategy at the sizes of another site of its operator, without the axes for which there are too few elements;
    None where the operator there has not the dims that it splits."""
    splits: list[tuple[str, Dim]] = []
    for letter, dim in strategy.splits:
        made = axes_onto(site.trees[letter], dim) if letter in site.trees else None
        if made is None:
            return None
        while (axis := _too_many(made, mesh)) is not None:
            made = without_axes(made, [axis])
        if dim_axes(made):
            splits.append((letter, made))
    found = replace(strategy, splits=tuple(splits))
    return found if _fits(found, site) else None


def _too_many(dim: Dim, mesh: Mesh) -> str | None:
    """The minor axis of a sub-dim that has fewer elements than ranks; None where there is none."""
    return next((s.axes[-1] for s in leaves(dim) if s.axes and s.pieces < mesh.count(s.axes)), None)


def _is_resized(strategy: Strategy, site: Site, mesh: Mesh) -> bool:
    """True if a strategy splits the same dims over the same axes at other sizes."""
    found = _resized(strategy, site, mesh)
    return found is not None and [(n, dim_axes(d)) for n, d in found.splits] == [
        (n, dim_axes(d)) for n, d in strategy.splits
    ]


def _resized_hubs(plan: Plan, context: SearchContext) -> dict[str, TensorLayout]:
    """The hubs of a plan at the sizes of a graph with the same values; one that does not fit is left out."""
    found: dict[str, TensorLayout] = {}
    for name, layout in plan.hubs.items():
        trees = context.factors.dims.get(name, ())
        dims = [axes_onto(t, d) for t, d in zip(trees, layout.dims, strict=False)]
        if len(trees) == len(layout.dims) and None not in dims:
            found[name] = replace(layout, dims=tuple(d for d in dims if d is not None))
    return found


def _fits(strategy: Strategy, site: Site) -> bool:
    """True if an operator has the factors that a strategy splits, and the ports through which partial sums pass."""
    trees = site.trees
    splits = all(
        letter in trees and without_axes(dim, dim_axes(dim)) == trees[letter]
        for letter, dim in strategy.splits
    )
    return splits and all(p < len(site.node.uses) for _, ports in strategy.through for p in ports)


def _on_axis(strategy: Strategy, axis: str) -> Strategy:
    """Return the part of a strategy that concerns one axis."""

    def alone(dim: Dim) -> Dim:
        return without_axes(dim, {a for a in dim_axes(dim) if a != axis})

    splits = tuple((letter, alone(dim)) for letter, dim in strategy.splits if axis in dim_axes(dim))
    return Strategy(splits, tuple(t for t in strategy.through if t[0] == axis))


def _is_option(context: SearchContext, node: str, strategy: Strategy, axis: str) -> bool:
    table = context.option_tables.tables[context.option_tables.number[node]]
    return any(
        table.strategy([(option, axis, 1)]) == strategy for option in range(len(table.entries))
    ) or not (strategy.splits or strategy.through)


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


__all__ = ["StoredLayout", "carried", "carried_to_train", "without_gradients"]
