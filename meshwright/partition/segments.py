"""Split a local program into segments, which the runtime runs one by one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.core.graph import Graph, Input


@dataclass(frozen=True)
class Segment:
    """A segment of a program as a graph.

    The inputs of its graph are the inputs of the full program that it reads and the values that cross its border (role
    "boundary"). Its outputs are the values that later segments or the caller read, labelled with their names.
    """

    graph: Graph
    boundary: tuple[str, ...]
    results: tuple[str, ...]


def split_segments(graph: Graph, cuts: Sequence[int] = ()) -> tuple[Segment, ...]:
    """Split a program before the nodes at the positions `cuts`; without any there is one segment."""
    edges = [0, *sorted(cuts), len(graph.nodes)]
    wanted_at_end = {v for _, v in (*graph.outputs, *graph.mutations)}
    own_inputs = {i.name: i for i in graph.inputs}
    segments: list[Segment] = []
    for start, end in itertools.pairwise(edges):
        nodes = graph.nodes[start:end]
        made = {v for n in nodes for v in n.values}
        read = dict.fromkeys(u for n in nodes for u in n.uses if u not in made)
        later = {u for n in graph.nodes[end:] for u in n.uses} | wanted_at_end
        results = tuple(v for n in nodes for v in n.values if v in later)
        if end == len(graph.nodes):
            results += tuple(
                v for v in dict.fromkeys(v for _, v in (*graph.outputs, *graph.mutations)) if v in own_inputs
            )
        inputs, boundary = [], []
        for name in (*read, *(r for r in results if r in own_inputs and r not in read)):
            if name in own_inputs:
                inputs.append(own_inputs[name])
            else:
                boundary.append(name)
                inputs.append(Input(name, "boundary", name, graph.types[name], name in graph.needs_grad))
        piece = replace(
            graph, inputs=tuple(inputs), nodes=nodes, outputs=tuple((v, v) for v in results), mutations=()
        )
        segments.append(Segment(piece, tuple(boundary), results))
    return tuple(segments)
