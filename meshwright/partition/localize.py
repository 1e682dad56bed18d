"""Second pass: the program of one rank. Literal sizes become local ones, special operators become kernels."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from meshwright.core.graph import MOVES, Graph, Input, Node, verify
from meshwright.ops.factors import Factors
from meshwright.ops.local import localize
from meshwright.partition.insert_reshards import Resharded, local_type
from meshwright.plan.plan import Plan

SUM_OF_COUNTS = "meshwright.all_reduce"


def localize_graph(resharded: Resharded, factors: Factors, plan: Plan, rank: int) -> Graph:
    """Return the local graph of a rank: operators on its shards, with reshards between them."""
    mesh = plan.mesh
    at = mesh.coordinate(rank)
    graph = resharded.graph
    inputs = tuple(
        replace(i, type=local_type(i.type, resharded.layouts[i.name], mesh, rank)) for i in graph.inputs
    )
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op in MOVES:
            kind = local_type(node.outputs[0], resharded.layouts[node.name], mesh, rank)
            nodes.append(replace(node, outputs=(kind,)))
        else:
            site = replace(factors.sites[node.name], node=node)
            wanted = tuple(use in graph.needs_grad for use in node.uses)
            nodes += localize(site, resharded.ports[node.name], mesh, at, wanted)
    return verify(replace(graph, inputs=inputs, nodes=counts_first(inputs, nodes)))


def counts_first(inputs: Iterable[Input], nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Move all-reduces that depend on the batch only (the count of targets) to the front, with their inputs.

    There all ranks have just started together. Between forward and backward they would wait for the slowest rank.
    """
    known = {i.name for i in inputs if i.role in ("batch", "constant")}
    early: list[Node] = []
    for node in nodes:
        if known.issuperset(node.uses):
            known.update(node.values)
            early.append(node)
    needed: set[str] = set()
    for node in reversed(early):
        if node.op == SUM_OF_COUNTS or needed.intersection(node.values):
            needed.update(node.values)
            needed.update(node.uses)
    front = [n for n in early if needed.intersection(n.values)]
    moved = {n.name for n in front}
    return (*front, *(n for n in nodes if n.name not in moved))


def counted(
    resharded: Resharded, factors: Factors, plan: Plan, node: Node, early: Collection[str]
) -> set[str]:
    """Return which of some `early` values a node of the model reads for a sum that needs nothing else, such as labels
    and weights of classes for the weight of all examples."""
    helpers = localize(
        replace(factors.sites[node.name], node=node),
        resharded.ports[node.name],
        plan.mesh,
        plan.mesh.coordinate(0),
    )
    made, used = set(early), set[str]()
    for helper in helpers:
        if made.issuperset(helper.uses) and not any(helper.needs_grad):
            made.update(helper.values)
            used.update(helper.uses)
    sums = any(h.op == SUM_OF_COUNTS and made.issuperset(h.uses) for h in helpers)
    return used.intersection(early) if sums else set()


def late_values(graph: Graph) -> frozenset[str]:
    """Return the results that no operator reads, such as the loss: backward need not wait for their reduction."""
    replaced = {v for _, v in graph.mutations}
    return frozenset(v for _, v in graph.outputs if not graph.consumers[v] and v not in replaced)
