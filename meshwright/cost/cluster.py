"""A cluster: what one device does in a second, and the links between devices from the outermost level to the innermost.

Numbers are of two kinds: a data sheet's (peaks, `presets`) and a machine's own (`measured`, by `meshwright calibrate`).
Where something is measured, prices use it; where not, a share of the peak.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.mesh import Axis, Mesh
from meshwright.redistribute.prices import Prices
from meshwright.redistribute.steps import COLLECTIVES

Curve = tuple[tuple[float, float], ...]  # (amount of work, work per second reached), ascending in the amount


@dataclass(frozen=True)
class Device:
    """One rank's device. `flops`: dtype (``f32``, ``bf16``) → peak FLOP/s. `memory_bytes_per_s` is of its own memory.

    `launch_seconds` is what starting one operator costs the host, the time a tiny operator takes.
    """

    name: str
    flops: Mapping[str, float]
    memory_bytes: int
    memory_bytes_per_s: float
    launch_seconds: float


@dataclass(frozen=True)
class Level:
    """One level of the cluster: `size` units of the next inner level, joined by links on which a rank sends
    `bytes_per_s` while all ranks send, a message taking `latency_seconds` on its way."""

    name: str
    size: int
    bytes_per_s: float
    latency_seconds: float


@dataclass(frozen=True)
class Measured:
    """What was measured on a machine; everything may be missing.

    `rates`: class of operators and dtype (``matmul f32``, ``attention f32``, ``memory``, ``update``) → curve of
    work per second (FLOP/s, or bytes/s) over the work of one call. `collectives`: level → kind → (latency seconds a
    round, bytes per second). `slowdown`: ``compute`` and ``collective`` → factor while the other runs.
    `corrections`: class of operators → factor from whole training steps.
    """

    rates: Mapping[str, Curve] = field(default_factory=dict)
    collectives: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    slowdown: Mapping[str, float] = field(default_factory=dict)
    corrections: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Cluster:
    """Devices and links. `levels` from the outermost (slowest) to the innermost."""

    name: str
    device: Device
    levels: tuple[Level, ...]
    host_memory_bytes: int = 0
    host_bytes_per_s: float = 0.0
    measured: Measured = field(default_factory=Measured)

    @functools.cached_property
    def ranks(self) -> int:
        """The number of ranks."""
        return math.prod(level.size for level in self.levels)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The finest mesh: the prime factors of each level, ``node0=2, gpu0=2, gpu1=2``."""
        return Mesh.of({level.name: level.size for level in self.levels}).linked(
            {level.name: level.name for level in self.levels}
        )

    @functools.cached_property
    def prices(self) -> Prices:
        """Seconds of collectives: as measured, else the same ring formulas for every kind on each level's link."""
        rows: dict[str, dict[str, tuple[float, float]]] = {kind: {} for kind in COLLECTIVES}
        for level in self.levels:
            known = self.measured.collectives.get(level.name, {})
            for kind in COLLECTIVES:
                rows[kind][level.name] = known.get(kind, (level.latency_seconds, level.bytes_per_s))
        return Prices.of(rows)

    def place(self, mesh: Mesh) -> Mesh:
        """The mesh with the link of every axis: axes are laid over the levels from the innermost outwards, and one
        that spans two levels runs over the slower."""
        borders: list[tuple[int, str]] = []  # (ranks within, level)
        inside = 1
        for level in reversed(self.levels):
            inside *= level.size
            borders.append((inside, level.name))
        axes: list[Axis] = []
        reach = 1
        for axis in reversed(mesh.axes):
            reach *= axis.size
            link = next((name for ranks, name in borders if reach <= ranks), borders[-1][1])
            axes.append(Axis(axis.name, axis.size, link))
        return Mesh(tuple(reversed(axes)), mesh.names, mesh.order)


__all__ = ["Cluster", "Curve", "Device", "Level", "Measured"]
