"""A cluster: what one device does in a second, and the links between devices from the outermost level to the innermost.

Numbers are of two kinds: a data sheet's (peaks, `presets`) and a machine's own (`measured`, by `meshwright calibrate`).
Where something is measured, prices use it; where not, a share of the peak.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwright.core.collectives import COLLECTIVES
from meshwright.core.mesh import Axis, Mesh
from meshwright.cost import cluster_file, cluster_text, presets
from meshwright.cost import local_machine as local
from meshwright.cost.cluster_data import Curve, Description, Device, Level, Measured
from meshwright.errors import ClusterError, path_from
from meshwright.redistribute.prices import Prices


@dataclass(frozen=True)
class Cluster(Description):
    """Devices and links. `levels` from the outermost (slowest) to the innermost.

    Get one by `Cluster.preset("h100", nodes=2)`, `Cluster.load("cluster.yaml")` or `Cluster.local(4)`.
    """

    @staticmethod
    def preset(name: str, nodes: int = 1, ranks_per_node: int = 8) -> Cluster:
        """A well-known machine by the numbers of its data sheets. Raises ClusterError, with the names there are."""
        return _cluster(presets.preset(name, nodes, ranks_per_node))

    @staticmethod
    def local(nproc: int = 1) -> Cluster:
        """This machine's processors shared by `nproc` ranks, not calibrated: see `meshwright.cost.local_machine`."""
        return _cluster(local.describe(nproc))

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """Read a cluster file. Raises ClusterError that names the entry and its line."""
        return _cluster(cluster_file.load(path))

    @staticmethod
    def from_yaml(text: str, source: str = "the cluster") -> Cluster:
        """Parse the text of a cluster file. Raises ClusterError."""
        return _cluster(cluster_file.parse(text, source))

    def to_yaml(self, note: str = "") -> str:
        """The text of a cluster file, commented; `note` becomes comment lines at its head."""
        return cluster_text.write(self, note)

    def save(self, path: str | Path, note: str = "") -> None:
        """Write a cluster file. Raises ClusterError for a cluster that `load` would refuse."""
        text = self.to_yaml(note)
        cluster_file.parse(text, str(path))
        what = f"the cluster file {str(path)!r:.80} cannot be written"
        try:
            path_from(path, what, ClusterError, 'cluster.save("cluster.yaml")').write_text(
                text, encoding="utf-8"
            )
        except OSError as error:
            hint = "a file in a folder that you may write to"
            raise ClusterError(what, why=error.strerror or str(error), hint=hint) from None

    @property
    def device_type(self) -> str:
        """torch's name for what the ranks compute on: a device without a link to a host is the host's processor."""
        return "cuda" if self.host_bytes_per_s else "cpu"

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
        """Seconds of collectives that the program waits for, as all reshards are: as measured between what ranks
        compute, else as measured at all, else the same ring formulas for every kind on each level's link."""
        known = self.measured.corrections
        factors = known.get("meeting", 1.0), known.get("waited", 1.0)
        return self._prices(self.measured.waited, dict.fromkeys(COLLECTIVES, factors))

    @functools.cached_property
    def hidden_prices(self) -> Prices:
        """Seconds of collectives that are started and run beside what is computed, as sums of gradients do. What they
        slow down, and what slows them, is `Measured.slowdown`. Sums are one class of work and rows another."""
        sums = self.measured.corrections.get("hidden", 1.0)
        rows = self.measured.corrections.get("hidden_rows", sums)
        return self._prices({}, dict.fromkeys(COLLECTIVES, (rows, rows)) | {"all_reduce": (sums, sums)})

    def _prices(
        self,
        first: Mapping[str, Mapping[str, tuple[float, float]]],
        factors: Mapping[str, tuple[float, float]],
    ) -> Prices:
        """`factors`: kind → what multiplies its latency and its seconds per byte."""
        rows: dict[str, dict[str, tuple[float, float]]] = {kind: {} for kind in COLLECTIVES}
        for level in self.levels:
            known = {**self.measured.collectives.get(level.name, {}), **first.get(level.name, {})}
            for kind in COLLECTIVES:
                before, each = factors[kind]
                latency, rate = known.get(kind, (level.latency_seconds, level.bytes_per_s))
                rows[kind][level.name] = (before * latency, rate / each)
        return Prices.of(rows, self.growth)

    def message_seconds(self, level: Level, size_bytes: float) -> float:
        """What a message between two ranks takes over a level, from when it is sent: as measured, else by its link."""
        known = self.measured.collectives.get(level.name, {})
        latency, rate = known.get("send", (level.latency_seconds, level.bytes_per_s))
        return latency + size_bytes / rate

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


def _cluster(description: Description) -> Cluster:
    return Cluster(
        description.name,
        description.device,
        description.levels,
        description.host_memory_bytes,
        description.host_bytes_per_s,
        description.measured,
        description.growth,
    )


__all__ = ["Cluster", "Curve", "Device", "Level", "Measured"]
