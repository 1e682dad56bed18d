"""Which values a gradient flows through: forward from the trained parameters, and back from the loss."""

from __future__ import annotations

from dataclasses import replace

from meshwright.capture.rewrite import Rewriter, rewrite
from meshwright.graph import Graph, Node, Ref

DETACH = ("aten.detach.default", "aten.detach_.default")
# Operators whose float results never carry a gradient, whatever they read.
BLIND = ("aten.bernoulli.default", "aten.histc.default", "aten.one_hot.default", "aten.floor_divide.default")


def mark_gradients(graph: Graph) -> Graph:
    """Flags on every value and parameter, and only those detaches that stop something."""
    flows, wanted = _from_parameters(graph), _from_loss(graph)

    def detach(b: Rewriter, n: Node) -> Ref | None:
        return None if n.args[0].name in flows and n.name in wanted else n.args[0]

    graph = rewrite(graph, dict.fromkeys(DETACH, detach))
    flows = _from_parameters(graph) & _from_loss(graph)
    nodes = tuple(replace(n, needs_grad=tuple(v in flows for v in n.values)) for n in graph.nodes)
    inputs = tuple(replace(i, needs_grad=i.needs_grad and i.name in flows) for i in graph.inputs)
    return replace(graph, inputs=inputs, nodes=nodes)


def _from_parameters(graph: Graph) -> set[str]:
    """Values that autograd would give a gradient function."""
    flows = {i.name for i in graph.inputs if i.needs_grad}
    for node in graph.nodes:
        if node.op not in DETACH and node.op not in BLIND and flows.intersection(node.uses):
            flows.update(v for v, t in zip(node.values, node.outputs, strict=True) if t.is_float)
    return flows


def _from_loss(graph: Graph) -> set[str]:
    """Values that reach the loss without a detach between."""
    wanted = {value for _, value in graph.outputs}
    for node in reversed(graph.nodes):
        if node.op not in DETACH and wanted.intersection(node.values):
            wanted.update(node.uses)
    return wanted
