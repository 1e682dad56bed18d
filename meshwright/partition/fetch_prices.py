"""Seconds of bringing a parked parameter to the device."""

from __future__ import annotations

import math

from meshwright.cost.cluster import Cluster
from meshwright.cost.host import copy_seconds
from meshwright.graph import DTYPES
from meshwright.mesh import Mesh
from meshwright.partition import Partition
from meshwright.redistribute.steps import origin


def fetch_seconds(parts: Partition, name: str, mesh: Mesh, cluster: Cluster) -> float:
    """Seconds of one copy of a parked parameter, by its transfer's name."""
    elements = math.prod(parts.resharded.layouts[name].local_shape(mesh, origin(mesh)))
    return copy_seconds(elements * DTYPES[parts.resharded.graph.types[name].dtype], cluster)


__all__ = ["fetch_seconds"]
