"""``recompute``: which values are not kept for backward, but computed again there.

``"full"`` keeps what enters each layer and nothing else of it. ``"selective"`` computes again what is cheap to compute
(norms, activations, the core of attention, masks of dropout, casts, anything pointwise) where all that it is made from
is kept anyway, so that memory falls by what is computed again; products are kept (Korthikanti et al., *Reducing
Activation Recomputation in Large Transformer Models*, 2022, section 5, for the core of attention). Patterns give
modules a policy each; the first that matches counts. What the model says of itself (`mw.recompute`) counts before. A
number is a budget of kept bytes (`budget.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from meshwright.core.graph import Graph, Node
from meshwright.core.remembered import cached_on_first
from meshwright.core.techniques import RECOMPUTE
from meshwright.cost.cluster import Cluster
from meshwright.cost.operator_tables import CONVOLUTIONS, PRODUCTS
from meshwright.errors import PlanError, did_you_mean
from meshwright.ops.saved import has_line, saved_in
from meshwright.partition.backward_demand import demand_of
from meshwright.partition.insert_reshards import Resharded
from meshwright.plan.plan import Plan
from meshwright.predict.per_operator import weighed
from meshwright.search.techniques.budget import solve
from meshwright.search.techniques.layers import (
    Layer,
    layers_of,
    marked_layers,
    matched_layers,
    root_of,
    without,
)

IDLE = "mw.recompute ({}) finds nothing to compute again: what enters its calls and what they return is kept as ever"
DEAR = PRODUCTS | CONVOLUTIONS | {"transformers.grouped_mm_fallback.default"}


def recompute(graph: Graph, plan: Plan, cluster: Cluster | None = None) -> Plan:
    """The plan with what ``recompute`` asks for. Raises PlanError for a pattern that names no module, and for a budget
    that cannot be kept."""
    asked = plan.techniques.recompute
    marked = marked_layers(graph)
    taken = {n.name for layer in marked.values() for n in layer.nodes}
    again: set[str] = set()
    for policy in RECOMPUTE:
        if policy in marked:
            values = full([marked[policy]]) if policy == "full" else selective(graph, [marked[policy]])
            plan = plan if values else plan.with_notes(IDLE.format(policy))
            again |= values
    match asked:
        case "":
            pass
        case tuple():
            again |= by_pattern(graph, asked, taken)
        case _:
            layers = [without(graph, layer, taken) for layer in layers_of(graph)]
            match asked:
                case "full":
                    again |= full(layers)
                case "selective":
                    again |= selective(graph, layers)
                case _:
                    return within(float(asked), graph, _with(plan, again), layers, cluster)
    return _with(plan, again)


def within(
    budget: float,
    graph: Graph,
    plan: Plan,
    layers: Sequence[Layer],
    cluster: Cluster | None,
) -> Plan:
    """The plan whose layers have the cheapest policies that keep no more than a budget."""

    def again(chosen: Sequence[str]) -> set[str]:
        mine = {
            policy: [x for x, p in zip(layers, chosen, strict=True) if p == policy] for policy in set(chosen)
        }
        return full(mine.get("full", ())) | selective(graph, mine.get("selective", ()))

    solved = solve(budget, layers, lambda chosen: weighed(graph, _with(plan, again(chosen)), cluster))
    return _with(plan, again(solved.chosen)).with_notes(solved.describe(budget))


def _with(plan: Plan, again: set[str]) -> Plan:
    return replace(plan, keeps={**plan.keeps, **dict.fromkeys(sorted(again), "again")}) if again else plan


@cached_on_first
def again_of(graph: Graph, policy: str | float | tuple[tuple[str, str], ...]) -> frozenset[str]:
    """The values that a policy for all layers computes again; for a budget and for patterns those that they may."""
    if not policy:
        return frozenset()
    layers = layers_of(graph)
    return frozenset(selective(graph, layers) if policy == "selective" else full(layers))


@cached_on_first
def computed_again(graph: Graph, policy: str) -> frozenset[str]:
    """Return the operators that backward computes again under ``"full"`` or ``"selective"`` for all layers."""
    values = again_of(graph, policy)
    again = {n.name for n in graph.nodes if not values.isdisjoint(n.values)}
    return frozenset(demand_of(Resharded(graph, {}, {}, {}), again).again)


def full(layers: Iterable[Layer]) -> set[str]:
    """All values that stay inside a layer."""
    return {value for layer in layers for value in layer.inside}


def selective(graph: Graph, layers: Sequence[Layer]) -> set[str]:
    """The values of layers that are cheap to make from what is kept anyway."""
    inside = {value for layer in layers for value in layer.inside}
    near = {n.name for layer in layers for n in layer.nodes if not inside.isdisjoint(n.values)}
    cheap = {n.name for n in graph.nodes if n.op not in DEAR and has_line(n.op) and n.name in near}
    keepers: set[str] = set()  # values whose memory autograd keeps for somebody
    saves = saved_in(graph)
    for node in graph.nodes:
        kept = saves[node.name]
        for value in (*(node.uses[p] for p in kept.inputs), *(node.values[o] for o in kept.outputs)):
            keepers.add(root_of(graph, value))
    there = {i.name for i in graph.inputs}  # what backward has, or makes from what it has
    again: set[str] = set()
    for node in graph.nodes:
        made = node.name in cheap and all(u in there or root_of(graph, u) in there for u in node.uses)
        # its mask needs nothing to be drawn again
        if made or (node.op == "meshwright.dropout" and node.name in cheap):
            again.update(inside.intersection(node.values))
        there.update(v for v in node.values if made or v in keepers)
    return again


def by_pattern(graph: Graph, asked: Iterable[tuple[str, str]], taken: set[str]) -> set[str]:
    """The values that policies of module patterns name; the first pattern that matches an operator counts, and none for
    those that are `taken`."""
    taken = set(taken)
    again: set[str] = set()
    modules = sorted({p for n in graph.nodes for p in _around(n)})
    for pattern, policy in asked:
        layers = matched_layers(graph, pattern)
        if not layers:
            raise PlanError(
                f"no module of the model matches {pattern!r} of recompute",
                why=f"{len(modules)} modules have operators",
                hint=did_you_mean(pattern, modules),
            )
        free = [without(graph, layer, taken) for layer in layers]
        taken.update(n.name for layer in layers for n in layer.nodes)
        if policy:
            again |= full(free) if policy == "full" else selective(graph, free)
    return again


def _around(node: Node) -> Iterable[str]:
    """A node's module and those around it."""
    parts = node.module.split(".") if node.module else []
    return (".".join(parts[: k + 1]) for k in range(len(parts)))
