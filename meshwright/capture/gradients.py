"""Find the values that need a gradient: forward from the trained parameters, and back from the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshwright.capture.rewrite import Rewriter, rewrite
from meshwright.core.graph import Graph, Node, Ref

DETACH = ("aten.detach.default", "aten.detach_.default")
# Operators whose float results never carry a gradient, whatever they read.
BLIND = ("aten.bernoulli.default", "aten.one_hot.default")


def mark_gradients(graph: Graph) -> Graph:
    """Set the gradient flags of every node's values, and remove detaches that stop nothing."""
    wanted = _from_loss(graph)  # behind any other detach stands another wall
    graph = _without(graph, lambda n: n.name not in wanted)
    reached = _from_parameters(graph)
    graph = _without(graph, lambda n: n.args[0].name not in reached)
    flows = _from_parameters(graph) & _from_loss(graph)
    nodes = tuple(replace(n, needs_grad=tuple(v in flows for v in n.values)) for n in graph.nodes)
    return replace(graph, nodes=nodes)


def settle_parameters(graph: Graph) -> Graph:
    """Clear the flags of parameters that no gradient reaches. Last: until then the flag is that of autograd."""
    reached = _from_loss(graph)
    inputs = tuple(replace(i, needs_grad=i.needs_grad and i.name in reached) for i in graph.inputs)
    return replace(graph, inputs=inputs)


def _without(graph: Graph, useless: Callable[[Node], bool]) -> Graph:
    def detach(b: Rewriter, n: Node) -> Ref | None:
        return n.args[0] if useless(n) else None

    return rewrite(graph, dict.fromkeys(DETACH, detach))


def _from_parameters(graph: Graph) -> set[str]:
    """Return the values to which autograd would give a gradient function."""
    flows = {i.name for i in graph.inputs if i.needs_grad}
    for node in graph.nodes:
        if node.op not in DETACH and node.op not in BLIND and flows.intersection(node.uses):
            flows.update(v for v, t in zip(node.values, node.outputs, strict=True) if t.is_float)
    return flows


def _from_loss(graph: Graph) -> set[str]:
    """Return the values that reach the loss without a detach."""
    wanted = {value for _, value in graph.outputs}
    for node in reversed(graph.nodes):
        if node.op not in DETACH and wanted.intersection(node.values):
            wanted.update(node.uses)
    return wanted
