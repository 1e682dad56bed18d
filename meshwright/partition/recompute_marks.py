"""Apply a plan's choice of saved activations to a program.

The plan names values of the model; this pass marks operators, helpers and reshards of the program. A reshard is
recomputed if the value it reads and all of its readers are. Results of collectives are saved if the plan says so
(``recompute_communication=False``), and if shards are uneven: ranks might then save different things and start
collectives in different orders.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from meshwright.core.collectives import COLLECTIVES
from meshwright.core.graph import MOVES, RESHARD, Graph, Node
from meshwright.ops.collectives import site_collectives
from meshwright.ops.factors import Factors
from meshwright.partition.activation_offload import SavedActivation, saved_activations_of
from meshwright.partition.backward_demand import FirstReaders, demand_of
from meshwright.partition.insert_reshards import Resharded
from meshwright.partition.recompute import has_even_blocks
from meshwright.partition.stages import places
from meshwright.plan.plan import Plan

AGAIN = "again"


def with_keeps(resharded: Resharded, factors: Factors, plan: Plan) -> Resharded:
    """Return the program with the plan's choice of saved activations."""
    if not plan.keeps:
        return resharded
    graph = resharded.graph
    again = {n.name for n in graph.nodes if any(plan.keeps.get(v) == AGAIN for v in n.values)}
    even = made_alike(resharded, again, plan)
    if not (even and plan.techniques.recompute_communication):
        types = graph.types
        again -= {
            name
            for name in again
            if any(
                t.phase == "forward"
                for t in site_collectives(factors.sites[name], resharded.ports[name], plan.mesh, types)
            )
        }
    nodes = tuple(_marked(node, resharded, again, even, plan) for node in graph.nodes)
    made_by = graph.producers
    keeps = {v: how for v, how in plan.keeps.items() if how == AGAIN and made_by[v].name in again}
    return replace(resharded, graph=replace(graph, nodes=nodes), keeps=keeps)


def settled(
    resharded: Resharded, plan: Plan
) -> tuple[Resharded, dict[str, SavedActivation], Mapping[str, FirstReaders]]:
    """Return three things that follow from what backward needs.

    They are the program, without recompute marks on reshards that backward never needs; the activations that are saved
    sharded or on the host; and the first nodes that need each recomputed value.
    """
    graph = resharded.graph
    if not (plan.keeps or resharded.host_parameters or plan.again):
        return resharded, {}, {}
    again = {n.name for n in graph.nodes if any(resharded.keeps.get(v) == AGAIN for v in n.values)}
    where = places(graph, {**plan.stages, **resharded.borders}) if plan.stages else None
    asked = demand_of(resharded, again, where)
    even = made_alike(resharded, again, plan)
    activations = saved_activations_of(resharded, plan, asked.values, even)
    nodes = (_without_demand(n) if n.op == RESHARD and n.name not in asked.again else n for n in graph.nodes)
    return replace(resharded, graph=replace(graph, nodes=tuple(nodes))), activations, asked.again


def without_keeps(resharded: Resharded, plan: Plan) -> Resharded:
    """Return the program that saves what autograd saves, except for what the plan gathers again."""
    graph = resharded.graph

    def kept(node: Node) -> Node:
        mine = node.op == RESHARD and node.kwarg("again") and _root(node, graph) not in plan.again
        return _without_demand(node) if mine else node

    return replace(resharded, graph=replace(graph, nodes=tuple(map(kept, graph.nodes))), keeps={})


def _without_demand(node: Node) -> Node:
    """Return a reshard without its recompute mark."""
    kwargs = tuple(k for k in node.kwargs if k[0] != "again")
    return node if kwargs == node.kwargs else replace(node, kwargs=kwargs)


def keeps_of(local: Graph, keeps: Mapping[str, str]) -> dict[str, str]:
    """Return how values of a rank's program are saved; helpers of a recomputed operator are recomputed too."""
    again = {v.partition(".")[0] for v, how in keeps.items() if how == AGAIN}
    found = dict(keeps)
    for node in local.nodes:
        stands, helper, _ = node.name.rpartition("_k")
        if helper and node.name not in again and stands in again and node.op not in MOVES:
            found.update(dict.fromkeys(node.values, AGAIN))
    return found


def made_alike(resharded: Resharded, again: Collection[str], plan: Plan) -> bool:
    """Return whether all ranks save, and so recompute, the same values at the same places."""
    graph = resharded.graph
    near: set[str] = set()
    todo = [v for n in graph.nodes if n.name in again for v in n.values]
    while todo:  # readers of recomputed values and of their reshards
        for reader, _ in graph.consumers[todo.pop()]:
            if reader.name not in near:
                near.add(reader.name)
                todo += reader.values if reader.op in MOVES else ()
    for name in near.union(again):
        if name in resharded.ports:
            ports = resharded.ports[name]
            layouts = (*ports.inputs, *ports.outputs)
        else:
            layouts = (resharded.layouts[name],)
        if not all(has_even_blocks(layout, plan.mesh) for layout in layouts):
            return False
    return True


def _marked(node: Node, resharded: Resharded, again: set[str], even: bool, plan: Plan) -> Node:
    """Return a reshard, marked if its result is recomputed."""
    if node.op != RESHARD:
        return node
    graph, talks = resharded.graph, _talks(node, resharded)
    readers = _readers(node, graph)
    if node.kwarg("again"):
        # A gathered parameter. If an operator that is recomputed needs it again, it is gathered again everywhere.
        return node if even or not talks or again.isdisjoint(readers) else replace(node, kwargs=())
    if talks and not (even and plan.techniques.recompute_communication):
        return node
    source = graph.producers.get(_root(node, graph))
    if talks and source is None and not plan.techniques.reshard_after_forward:
        return node
    mine = source is not None and (source.name in again or (readers and again.issuperset(readers)))
    return replace(node, kwargs=(("again", True),)) if mine and any(node.needs_grad) else node


def _talks(node: Node, resharded: Resharded) -> bool:
    return any(s.kind in COLLECTIVES for s in resharded.pairs[node.name].forward)


def _root(node: Node, graph: Graph) -> str:
    """Return the value of the model that a reshard reads."""
    value = node.uses[0]
    while value in graph.producers and graph.producers[value].op in MOVES:
        value = graph.producers[value].uses[0]
    return value


def _readers(node: Node, graph: Graph) -> set[str]:
    """Return the operators that read the result of a reshard."""
    found: set[str] = set()
    for reader, _ in graph.consumers[node.name]:
        found |= _readers(reader, graph) if reader.op in MOVES else {reader.name}
    return found
