"""The gradients of a micro-batch that are added to those before it, parameter by parameter.

The whole of a gradient is added up as it comes: of a weight that is gathered for its readers and whose sum is sent last
that is all that was gathered; where every backward scatters, it is the rank's part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.core.graph import DTYPES, Graph, Node
from meshwright.core.remembered import cached_on_first
from meshwright.cost.cluster import Cluster
from meshwright.cost.reduction import adding_seconds
from meshwright.partition import Partition
from meshwright.partition.accumulation import scattered_each_time, summed_first
from meshwright.partition.sharded_update import update_layout
from meshwright.redistribute.steps import origin


@dataclass(frozen=True)
class Added:
    """Bytes of a gradient that is added up; `host`: in the host's memory."""

    size_bytes: int
    host: bool


@cached_on_first
def added(parts: Partition) -> Mapping[str, tuple[Added, ...]]:
    """Operator → the gradients of parameters that its backward makes and that are added up over micro-batches. Of a
    parameter that several read, those of all are added up first: it counts with the first of them."""
    graph, layouts = parts.resharded.graph, parts.resharded.layouts
    mesh, at = parts.plan.mesh, origin(parts.plan.mesh)
    gathered, each_time = summed_first(parts), scattered_each_time(parts)
    found: dict[str, list[Added]] = {}
    for entry in graph.input_of("parameter"):
        readers = [node for node, _ in graph.consumers[entry.name]]
        if not entry.needs_grad or not readers:
            continue
        whole = [node for node in readers if node.name in gathered]
        parted = each_time and entry.name in parts.plan.states
        layout = update_layout(parts, entry) if parted else layouts[entry.name]
        added_up = [(node, layouts[node.name]) for node in whole] or [(readers[0], layout)]
        for reader, of in added_up:
            size = math.prod(of.local_shape(mesh, at)) * DTYPES[entry.type.dtype]
            one = Added(size, entry.name in parts.resharded.hosted)
            found.setdefault(_operator(parts, graph, reader), []).append(one)
    return {name: tuple(each) for name, each in found.items()}


def added_seconds(parts: Partition, name: str, cluster: Cluster) -> float:
    """Seconds of it at an operator, for each micro-batch on average: the first finds none."""
    if parts.micro_batches == 1:
        return 0.0
    each = (float(adding_seconds(a.size_bytes, cluster, a.host)) for a in added(parts).get(name, ()))
    return added_share(parts) * math.fsum(each)


def added_share(parts: Partition) -> float:
    """The share of micro-batches that find gradients of others."""
    return 1 - 1 / parts.micro_batches


def _operator(parts: Partition, graph: Graph, reader: Node) -> str:
    """The operator that reads a parameter, or the first that reads what brings it."""
    while reader.name not in parts.factors.sites:
        reader = graph.consumers[reader.values[0]][0][0]
    return reader.name


__all__ = ["Added", "added", "added_seconds", "added_share"]
