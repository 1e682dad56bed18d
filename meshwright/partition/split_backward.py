"""The linears of a program whose weight gradients may be computed later, as zero-bubble schedules do."""

from __future__ import annotations

from collections.abc import Collection

from meshwright.core.graph import Graph, Node

LINEAR, ADDMM, MM = "aten.linear.default", "aten.addmm.default", "aten.mm.default"


def splittable(graph: Graph, without: Collection[str] = ()) -> frozenset[str]:
    """Return the linears of a stage whose weight gradients may be delayed.

    Their input and weight need gradients, weight and bias depend on parameters only, and only such linears read the
    values in between, so that backward takes no path to a parameter twice.
    """
    trained = graph.needs_grad
    batch = {i.name for i in graph.inputs if i.role in ("batch", "boundary")}
    for node in graph.nodes:
        if batch.intersection(node.uses):
            batch.update(node.values)
    ends = {v for _, v in (*graph.outputs, *graph.mutations)}
    found = {n.name: n for n in graph.nodes if n.name not in without and _plain(n, trained)}
    while True:
        bad = {name for name, node in found.items() if not _alone(graph, node, found, batch, ends, trained)}
        if not bad:
            return frozenset(found)
        found = {name: node for name, node in found.items() if name not in bad}


def _plain(node: Node, trained: Collection[str]) -> bool:
    sizes = {LINEAR: (2, 3), ADDMM: (3, 3), MM: (2, 2)}.get(node.op)
    if sizes is None or node.kwargs or not sizes[0] <= len(node.uses) == len(node.args) <= sizes[1]:
        return False
    # Without a gradient of the input, or of the weight, there is nothing to separate.
    came_in, weight = node.uses[1:] if node.op == ADDMM else node.uses[:2]
    return came_in in trained and weight in trained


def _weights(node: Node) -> tuple[str, ...]:
    return (node.uses[0], node.uses[2]) if node.op == ADDMM else node.uses[1:]


def _alone(
    graph: Graph,
    node: Node,
    found: Collection[str],
    batch: Collection[str],
    ends: Collection[str],
    trained: Collection[str],
) -> bool:
    todo, seen = list(_weights(node)), set[str]()
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in batch or value in ends:
            return False
        if value in graph.producers:
            maker = graph.producers[value]
            todo += [*maker.uses, *maker.values]
        if value in trained:
            for reader, port in graph.consumers[value]:
                if reader.name not in found or reader.uses[port] not in _weights(reader):
                    todo += reader.values
    return True


__all__ = ["ADDMM", "LINEAR", "splittable"]
