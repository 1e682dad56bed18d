"""Parameters that are offloaded to host memory between their uses.

They are prefetched a layer ahead, in forward and backward, and freed after use. A program has a transfer for each
(``again=True``: it is fetched again for backward). Consecutive transfers of one layer are one *run*; when the first
of a run is used, the next run starts.
"""

from __future__ import annotations

import itertools

from meshwright.core.folding import layer_of
from meshwright.core.graph import MOVES, START, TO_DEVICE, WAIT, Graph, Node


def is_fetch(node: Node) -> bool:
    """Return whether a node fetches an offloaded parameter."""
    return node.op == TO_DEVICE and bool(node.kwarg("again"))


def fetch_runs(graph: Graph) -> tuple[tuple[str, ...], ...]:
    """Return the transfers of a program that fetch offloaded parameters, run by run."""
    fetches = filter(is_fetch, graph.nodes)
    runs = itertools.groupby(fetches, key=lambda node: layer_of(_reader(node, graph).module))
    return tuple(tuple(node.name for node in run) for _, run in runs)


def _reader(node: Node, graph: Graph) -> Node:
    """Return the first operator that reads the result of a transfer."""
    while node.op in (*MOVES, START, WAIT) and graph.consumers[node.name]:
        node = graph.consumers[node.name][0][0]
    return node


__all__ = ["fetch_runs", "is_fetch"]
