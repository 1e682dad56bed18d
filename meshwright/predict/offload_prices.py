"""Seconds of sharded and offloaded activations (gathers, and copies to the host and back) and of fetching offloaded
parameters.
"""

from __future__ import annotations

from meshwright.core.graph import DTYPES, Graph
from meshwright.core.mesh import Mesh
from meshwright.cost.cluster import Cluster
from meshwright.cost.host import copy_seconds
from meshwright.cost.strides import copying_views
from meshwright.partition import Partition
from meshwright.partition.activation_offload import SavedActivation, activations_in
from meshwright.partition.recompute import VIEWS
from meshwright.redistribute.prices import total_seconds
from meshwright.redistribute.steps import largest_size


def activation_prices(
    parts: Partition, local: Graph, mesh: Mesh, cluster: Cluster
) -> dict[str, tuple[float, float]]:
    """Return the seconds, forward and backward, of each stored activation on the rank at the origin."""
    found: dict[str, tuple[float, float]] = {}
    for value in moved_values(parts, local):
        activation = parts.activations[value]
        itemsize = DTYPES[parts.resharded.graph.types[value].dtype]
        once = host_seconds(parts, activation, mesh, cluster)
        gather = total_seconds(activation.gather, mesh, itemsize, cluster.prices)
        found[value] = (once, once + gather)
    return found


def moved_values(parts: Partition, local: Graph) -> list[str]:
    """Return the activations of a rank that are sharded or offloaded; a view is saved with its base."""
    copying = copying_views(local) if parts.activations else frozenset[str]()
    made_by = parts.resharded.graph.producers
    return [
        value
        for value in activations_in(parts.activations, local)
        if made_by[value].op not in VIEWS or made_by[value].name in copying
    ]


def host_seconds(parts: Partition, activation: SavedActivation, mesh: Mesh, cluster: Cluster) -> float:
    """Return the seconds of a copy to the host, or back; 0 if the value stays on the device."""
    if not activation.host:
        return 0.0
    layout = activation.slices[-1].after if activation.slices else parts.resharded.layouts[activation.value]
    elements = largest_size(layout, mesh)
    return copy_seconds(elements * DTYPES[parts.resharded.graph.types[activation.value].dtype], cluster)


def fetch_seconds(parts: Partition, name: str, mesh: Mesh, cluster: Cluster) -> float:
    """Return the seconds of one copy of an offloaded parameter, by its transfer's name."""
    return copy_seconds(copied_bytes(parts, name, mesh), cluster)


def copied_bytes(parts: Partition, name: str, mesh: Mesh) -> int:
    """Return the bytes of a transfer's result on the rank at the origin."""
    elements = largest_size(parts.resharded.layouts[name], mesh)
    return elements * DTYPES[parts.resharded.graph.types[name].dtype]


__all__ = ["copied_bytes", "fetch_seconds", "host_seconds", "moved_values", "activation_prices"]
