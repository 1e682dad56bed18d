"""What adding the gradient of a micro-batch to those before it costs: two are read, one is written, where autograd
ends. All gradients are added up once for each micro-batch, so that no cache holds them until the next."""

from __future__ import annotations

from meshwright.cost.cluster import Cluster
from meshwright.cost.host import place
from meshwright.cost.machine import launch_seconds, memory_rate
from meshwright.cost.operators import Amount

PASSES = 3  # over the bytes of a gradient
STARTS = 0.5  # of an operator: autograd adds by itself
FAR = 1e9  # bytes: as many as no cache holds


def adding_seconds(size_bytes: Amount, cluster: Cluster, host: bool = False) -> Amount:
    """Seconds in which the gradient of a parameter is added to another. `host`: in the host's memory."""
    device, measured = place(cluster, host)
    rate = float(memory_rate(FAR, device, measured)) / measured.corrections.get("memory", 1.0)
    return PASSES * size_bytes / rate + STARTS * launch_seconds(device, measured)


__all__ = ["STARTS", "adding_seconds"]
