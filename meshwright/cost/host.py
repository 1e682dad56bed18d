"""What the host does for a rank: operators that run on its processor, and copies over the link to it.

A cluster file says how much memory a rank has of its host and how fast the link is, not how fast its processor is: that
is taken to be a rank's share of the server in the preset ``cpu``. A cluster whose device is the host's processor has no
link: there the host is the device.
"""

from __future__ import annotations

import functools

from meshwright.cost import presets
from meshwright.cost.cluster import Cluster
from meshwright.cost.cluster_data import Device, Measured
from meshwright.cost.machine import launch_seconds, memory_rate
from meshwright.cost.operators import Amount


@functools.cache
def host_device() -> Device:
    """A rank's share of a server's processors."""
    return presets.preset("cpu").device


def place(cluster: Cluster, host: bool) -> tuple[Device, Measured]:
    """What an operator runs on, and what was measured of it."""
    if host and cluster.host_bytes_per_s:
        return host_device(), Measured()
    return cluster.device, cluster.measured


def transfer_seconds(size_bytes: Amount, cluster: Cluster) -> Amount:
    """Seconds of a copy between a rank's device and its host; 0 where they are one."""
    if not cluster.host_bytes_per_s:
        return 0.0 * size_bytes
    return size_bytes / cluster.host_bytes_per_s + cluster.device.launch_seconds


def copy_seconds(size_bytes: float, cluster: Cluster) -> float:
    """Seconds of a copy that is made in any case: over the link, or within the one memory there is."""
    if cluster.host_bytes_per_s:
        return float(transfer_seconds(size_bytes, cluster))
    moved = 2.0 * size_bytes  # read and written
    rate = float(memory_rate(moved, cluster.device, cluster.measured))
    return moved / rate + launch_seconds(cluster.device, cluster.measured)


__all__ = ["copy_seconds", "host_device", "place", "transfer_seconds"]
