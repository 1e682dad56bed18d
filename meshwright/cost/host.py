"""The work of the host for a rank: operators on its processor, and copies over the link.

A cluster file gives a rank's share of host memory and the speed of the link, but not the speed of the processor: that
is assumed to be a rank's share of the server in the preset ``cpu``. A cluster whose device is the host's processor
has no link: there the host is the device.
"""

from __future__ import annotations

import functools

from meshwright.cost import presets
from meshwright.cost.cluster import Cluster
from meshwright.cost.cluster_data import Device, Measured
from meshwright.cost.machine import launch_seconds, memory_rate, update_seconds
from meshwright.cost.operators import Amount


@functools.cache
def host_device() -> Device:
    """Return a rank's share of a server's processors, as a device."""
    return presets.preset("cpu").device


def place(cluster: Cluster, host: bool) -> tuple[Device, Measured]:
    """Return the device that an operator runs on, and its measurements."""
    if host and cluster.host_bytes_per_s:
        return host_device(), Measured()
    return cluster.device, cluster.measured


def transfer_seconds(size_bytes: Amount, cluster: Cluster) -> Amount:
    """Return the seconds of a copy between a rank's device and its host; 0 if they are one."""
    if not cluster.host_bytes_per_s:
        return 0.0 * size_bytes
    return size_bytes / cluster.host_bytes_per_s + cluster.device.launch_seconds


def copy_seconds(size_bytes: float, cluster: Cluster) -> float:
    """Return the seconds of a copy over the link, or within the one memory if device and host share it."""
    if cluster.host_bytes_per_s:
        return float(transfer_seconds(size_bytes, cluster))
    moved = 2.0 * size_bytes  # read and written
    rate = float(memory_rate(moved, cluster.device, cluster.measured))
    return moved / rate + launch_seconds(cluster.device, cluster.measured)


def update_seconds_there(
    elements: Amount,
    states: int,
    itemsize: int,
    cluster: Cluster,
    *,
    host: bool = False,
    offloaded: bool = False,
    parameters: bool = False,
) -> Amount:
    """Return the seconds of an update of a parameter that is on the host during the step (`host`), or that is copied:
    its optimizer is `offloaded`, or it is one of the `parameters` that are.

    The gradient goes to the host and the weight comes back; an offloaded one is there, or is copied too. Each is a
    separate copy, with its own launch.
    """
    seconds = update_seconds(elements, states, *place(cluster, offloaded or host), itemsize)
    if not (offloaded or parameters) or not cluster.host_bytes_per_s:
        return seconds
    ways = 1 if offloaded and parameters else 2
    return seconds + ways * transfer_seconds(elements * float(itemsize), cluster)


__all__ = ["copy_seconds", "host_device", "place", "transfer_seconds", "update_seconds_there"]
