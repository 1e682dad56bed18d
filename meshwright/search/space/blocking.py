"""Reshards that a step waits for, whatever else it does: what makes a certificate of its time.

A program starts what it sends as early as it can (`partition/overlap.py`); only where nothing stands between the maker
of a value and its reader is there nothing to hide behind.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection

from meshwright.core.graph import PIN, Graph

Variable = tuple[str, str]  # of a space: (kind, name)
Edge = tuple[Variable, Variable, str]  # from, to, value


def waited_edges(graph: Graph, first: Callable[[str], str], hubs: Collection[str]) -> frozenset[Edge]:
    """The edges (from variable, to variable, value) that nothing can hide: what reads the value comes right after what
    makes it, so that between start and wait there is nothing to do, forward or backward.

    Operators of several results are left out: reshards of theirs may go together and share a latency.
    """
    found: set[Edge] = set()
    apart: set[Edge] = set()
    place = {node.name: number for number, node in enumerate(graph.nodes)}
    marks = list(itertools.accumulate((node.op == PIN for node in graph.nodes), initial=0))
    for value, node in graph.producers.items():
        name, source = first(value), ("node", first(node.name))
        readers = [consumer for consumer, _ in graph.consumers[value]]
        for number, consumer in enumerate(readers):
            here, there = place[node.name] + 1, place[consumer.name]
            near = number == 0 and len(node.outputs) == 1 and there - here == marks[there] - marks[here]
            edges = [(source, ("node", first(consumer.name)), name)]
            if name in hubs:
                edges = [
                    (("hub", name), edges[0][1], name),
                    *([(source, ("hub", name), name)] if number == 0 else []),
                ]
            (found if near else apart).update(edges)
    return frozenset(found - apart)
