"""Parameters that live in the host's memory between their uses: brought to the device a layer ahead, forward and
backward, and freed after.

A program has a transfer for each (``again=True``: brought once more for backward). Those of one layer that follow each
other are one *run*; when the first of a run is taken, the next one starts.
"""

from __future__ import annotations

from meshwright.core.folding import layer_of
from meshwright.core.graph import MOVES, START, TO_DEVICE, WAIT, Graph, Node


def is_fetch(node: Node) -> bool:
    """Return whether a node brings a parked parameter."""
    return node.op == TO_DEVICE and bool(node.kwarg("again"))


def fetch_runs(graph: Graph) -> tuple[tuple[str, ...], ...]:
    """The transfers of a program that bring parked parameters, run by run."""
    found: list[list[str]] = []
    layer = None
    for node in graph.nodes:
        if is_fetch(node):
            here = layer_of(_reader(node, graph).module)
            if here != layer or not found:
                found.append([])
            layer = here
            found[-1].append(node.name)
    return tuple(map(tuple, found))


def _reader(node: Node, graph: Graph) -> Node:
    """The first operator that reads what a node brings."""
    while node.op in (*MOVES, START, WAIT) and graph.consumers[node.name]:
        node = graph.consumers[node.name][0][0]
    return node


__all__ = ["fetch_runs", "is_fetch"]
