"""Gradient accumulation over micro-batches, parameter by parameter.

The accumulated gradient of a gathered weight that is reduced last has the full gathered size. If every backward
reduce-scatters, it is the rank's shard.
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
from meshwright.redistribute.steps import largest_size


@dataclass(frozen=True)
class Added:
    """The bytes of an accumulated gradient; `host`: in host memory."""

    size_bytes: int
    host: bool


@cached_on_first
def added(parts: Partition) -> Mapping[str, tuple[Added, ...]]:
    """Return the gradients of parameters that the backward of each operator accumulates over micro-batches.

    If several operators read a parameter, their gradients are summed first and count with the first of them.
    """
    graph, layouts = parts.resharded.graph, parts.resharded.layouts
    mesh = parts.plan.mesh
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
            size = largest_size(of, mesh) * DTYPES[entry.type.dtype]
            one = Added(size, entry.name in parts.resharded.hosted)
            found.setdefault(_operator(parts, graph, reader), []).append(one)
    return {name: tuple(each) for name, each in found.items()}


def added_seconds(parts: Partition, name: str, cluster: Cluster) -> float:
    """Return the seconds of accumulation at an operator, averaged over micro-batches; the first adds nothing."""
    if parts.micro_batches == 1:
        return 0.0
    each = (float(adding_seconds(a.size_bytes, cluster, a.host)) for a in added(parts).get(name, ()))
    return added_share(parts) * math.fsum(each)


def added_share(parts: Partition) -> float:
    """Return the share of micro-batches that find gradients of earlier ones."""
    return 1 - 1 / parts.micro_batches


def _operator(parts: Partition, graph: Graph, reader: Node) -> str:
    """Return the operator that reads a parameter, or the first that reads its reshard or transfer."""
    while reader.name not in parts.factors.sites:
        reader = graph.consumers[reader.values[0]][0][0]
    return reader.name


__all__ = ["Added", "added", "added_seconds", "added_share"]
