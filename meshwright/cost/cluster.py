"""A cluster: the speed of one device, and the links between devices from the outermost level to the innermost.

Numbers come from data sheets (peaks, `presets`) or from the machine itself (`measured`, by `meshwright calibrate`).
Prices use measurements where there are any, and a share of the peak elsewhere.
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
from meshwright.cost.execution import typical
from meshwright.errors import ClusterError, path_from
from meshwright.redistribute.prices import Prices


@dataclass(frozen=True)
class Cluster(Description):
    """Devices and links. `levels` from the outermost (slowest) to the innermost.

    Get one by `Cluster.preset("h100", nodes=2)`, `Cluster.load("cluster.yaml")` or `Cluster.local(4)`.
    """

    @staticmethod
    def preset(name: str, nodes: int = 1, ranks_per_node: int = 8, execution: str = "") -> Cluster:
        """Return a well-known machine, with the figures of its data sheets: ``Cluster.preset("h100", nodes=2)``.

        Args:
            nodes: Number of nodes.
            ranks_per_node: Ranks (devices) of each node.
            execution: ``"eager"``, ``"compiled"`` or ``"fused"`` use rates that training typically reaches on it
                (`meshwright.cost.execution`) instead of the peaks.

        Raises ClusterError for an unknown name, with the known ones.
        """
        found = presets.preset(name, nodes, ranks_per_node)
        return _cluster(typical(found, execution) if execution else found)

    @staticmethod
    def local(nproc: int = 1) -> Cluster:
        """Return a rough description of this machine's processors, shared by `nproc` ranks.

        For better figures run ``meshwright calibrate``.
        """
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
        """Return the text of a cluster file, with comments; `note` becomes comment lines at its head."""
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
            hint = "choose a file in a folder that you may write to"
            raise ClusterError(what, why=error.strerror or str(error), hint=hint) from None

    @property
    def device_type(self) -> str:
        """torch's name for the type of device: one without a link to a host is the host's processor."""
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
        """The prices, in seconds, of collectives that the program waits for, as for all reshards.

        They are those measured between computations; else those measured alone; else ring formulas over each level's
        link.
        """
        known = self.measured.corrections
        factors = known.get("meeting", 1.0), known.get("waited", 1.0)
        return self._prices(self.measured.waited, dict.fromkeys(COLLECTIVES, factors))

    @functools.cached_property
    def hidden_prices(self) -> Prices:
        """The prices, in seconds, of collectives that overlap with computation, as reductions of gradients do.

        `Measured.slowdown` says how both slow each other down. Reductions are one class of work, gathers and scatters
        of rows another.
        """
        sums = self.measured.corrections.get("hidden", 1.0)
        rows = self.measured.corrections.get("hidden_rows", sums)
        return self._prices({}, dict.fromkeys(COLLECTIVES, (rows, rows)) | {"all_reduce": (sums, sums)})

    def _prices(
        self,
        first: Mapping[str, Mapping[str, tuple[float, float]]],
        factors: Mapping[str, tuple[float, float]],
    ) -> Prices:
        """Return prices. `factors` maps kinds to factors on their latency and their seconds per byte."""
        rows: dict[str, dict[str, tuple[float, float]]] = {kind: {} for kind in COLLECTIVES}
        for level in self.levels:
            known = {**self.measured.collectives.get(level.name, {}), **first.get(level.name, {})}
            for kind in COLLECTIVES:
                before, each = factors[kind]
                latency, rate = known.get(kind, (level.latency_seconds, level.bytes_per_s))
                rows[kind][level.name] = (before * latency, rate / each)
        return Prices.of(rows, self.growth)

    def message_seconds(self, level: Level, size_bytes: float) -> float:
        """Return the seconds of a message between two ranks over a level: as measured, else by its link."""
        known = self.measured.collectives.get(level.name, {})
        latency, rate = known.get("send", (level.latency_seconds, level.bytes_per_s))
        return latency + size_bytes / rate

    def place(self, mesh: Mesh) -> Mesh:
        """Return the mesh with the link of every axis.

        Axes cover the levels from the innermost outwards. An axis that spans two levels runs over the slower one.
        """
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
