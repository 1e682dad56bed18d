"""The saved bytes and the cost of a plan on a rank, by operator of the model, from the program that will run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.core.graph import MOVES, Graph
from meshwright.core.mesh import Mesh
from meshwright.cost.cluster import Cluster
from meshwright.cost.operators import work
from meshwright.partition import Partition, partition
from meshwright.plan.plan import Plan
from meshwright.predict.memory.per_operator import kept_bytes
from meshwright.predict.price import letter_sizes, program_price
from meshwright.redistribute.steps import origin


@dataclass(frozen=True)
class Weight:
    """The bytes saved for backward and the cost of a rank's program, by operator of the model; ``""`` for the rest.

    `cost` is in seconds, or in FLOPs without a cluster (`unit`).
    """

    kept_bytes: Mapping[str, int]
    cost: Mapping[str, float]
    unit: str

    @property
    def total_bytes(self) -> int:
        """All saved bytes."""
        return sum(self.kept_bytes.values())

    @property
    def total_cost(self) -> float:
        """The cost of all computation and its communication."""
        return sum(self.cost.values())


def weighed(graph: Graph, plan: Plan, cluster: Cluster | None) -> Weight:
    """Return the saved bytes and cost on the rank that holds most.

    The cost is in seconds of a cluster; without one it is FLOPs of recomputation.
    """
    parts = partition(graph, plan)
    seconds = (
        (_flops(parts, parts.plan.mesh), "FLOPs") if cluster is None else (_seconds(parts, cluster), "s")
    )
    return Weight(kept_by_operator(parts), *seconds)


def kept_by_operator(parts: Partition) -> dict[str, int]:
    """Return, by operator of the model, the bytes saved for one micro-batch on the rank that holds most."""
    mesh, kept = parts.plan.mesh, dict[str, int]()
    for name, size in kept_bytes(parts, mesh.rank(origin(mesh))).items():
        owner = _owner(parts, name)
        kept[owner] = kept.get(owner, 0) + size
    return kept


def _owner(parts: Partition, name: str) -> str:
    """Return the operator of the model for a node of a local program, or for the value that a reshard reads."""
    made_by = parts.resharded.graph.producers
    name = made_by[name].name if name in made_by else name
    while name in made_by and made_by[name].op in MOVES:
        value = made_by[name].uses[0]
        name = made_by[value].name if value in made_by else ""
    return parts.stands_for(name)


def _seconds(parts: Partition, cluster: Cluster) -> dict[str, float]:
    price = program_price(parts, cluster)
    found = {name: node.total for name, node in price.by_node.items()}
    for name, halves in price.by_reshard.items():
        owner = _owner(parts, name)
        found[owner] = found.get(owner, 0.0) + sum(halves)
    return found


def _flops(parts: Partition, mesh: Mesh) -> dict[str, float]:
    graph, found = parts.resharded.graph, dict[str, float]()
    for name in parts.again:
        if name in parts.factors.sites:
            site = parts.factors.sites[name]
            sizes = letter_sizes(site, parts.resharded.ports[name], mesh, origin(mesh))
            wanted = [u in graph.needs_grad for u in site.node.uses]
            found[name] = float(work(site.node, site.rule, sizes, graph.types, wanted).flops_forward)
    return found


__all__ = ["Weight", "kept_by_operator", "weighed"]
