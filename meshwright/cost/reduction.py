"""The cost of accumulating the gradient of a micro-batch.

Autograd reads two gradients and writes one. It accumulates all gradients once for each micro-batch, so no cache holds
them until the next one.
"""

from __future__ import annotations

from meshwright.cost.cluster import Cluster
from meshwright.cost.host import place
from meshwright.cost.machine import launch_seconds, memory_rate
from meshwright.cost.operators import Amount

PASSES = 3  # over the bytes of a gradient
STARTS = 0.5  # launches of an operator: autograd accumulates without one
FAR = 1e9  # bytes: more than any cache holds


def adding_seconds(size_bytes: Amount, cluster: Cluster, host: bool = False) -> Amount:
    """Return the seconds to add the gradient of a parameter to another. `host`: in host memory."""
    device, measured = place(cluster, host)
    rate = float(memory_rate(FAR, device, measured)) / measured.corrections.get("memory", 1.0)
    return PASSES * size_bytes / rate + STARTS * launch_seconds(device, measured)


__all__ = ["STARTS", "adding_seconds"]
