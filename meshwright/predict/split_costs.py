"""The cost of operators in seconds and bytes, to split a program into stages, and the memory for a stage on a rank."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.cost.cluster import Cluster
from meshwright.cost.cluster_data import Level
from meshwright.cost.operators import work
from meshwright.partition import Partition
from meshwright.pipeline.actions import BACKWARD, BACKWARD_WEIGHT, FORWARD, Schedule
from meshwright.pipeline.split import Costs
from meshwright.predict.memory.allocator import optimizer_on
from meshwright.predict.memory.per_operator import state_bytes
from meshwright.predict.per_operator import kept_by_operator
from meshwright.predict.price import letter_sizes, program_price
from meshwright.redistribute.steps import origin

FLOPS_PER_S, BYTES_PER_S = 1e12, 1e11  # nominal rates, to balance stages without a cluster


def costs_of(
    parts: Partition, cluster: Cluster | None, optimizer_states: int = 2, link: Level | None = None
) -> Costs:
    """Return the cost of operators on the rank that holds most.

    Units are those of a cluster or, without one, nominal, and then memory is unlimited. `link`: the link of messages
    between stages, by default the slowest.
    """
    pieces = parts.plan.mesh.size  # pieces of a message, over ranks and micro-batches
    if cluster is None:
        return Costs(_nominal(parts), {}, {}, lambda size: size / BYTES_PER_S / pieces)
    price = program_price(parts, cluster)
    seconds = {n: p.total / parts.micro_batches for n, p in price.by_node.items()}
    for name, halves in price.by_reshard.items():
        reader = _reader(parts, name)
        if reader in seconds:
            seconds[reader] += sum(halves) / parts.micro_batches
    over = link or next((level for level in cluster.levels if level.size > 1), cluster.levels[0])
    rank = parts.plan.mesh.rank(origin(parts.plan.mesh))
    optimizer = optimizer_on(cluster.device_type, optimizer_states)
    return Costs(
        seconds,
        kept_by_operator(parts),
        state_bytes(parts, rank, optimizer, cluster.device_type),
        lambda size: cluster.message_seconds(over, size / pieces) if size else 0.0,
        1 / pieces,
    )


def stage_room(parts: Partition, schedule: Schedule, limit_bytes: float) -> tuple[float, tuple[int, ...]]:
    """Return the bytes for one stage on a rank, and the number of micro-batches whose activations each stage holds at
    once.

    The batch is on every rank; stages of one rank share the rest evenly.
    """
    peaks = tuple(_most(schedule, stage) for stage in range(schedule.stages))
    batch = sum(entry.type.size_bytes for entry in parts.resharded.graph.input_of("batch"))
    shared = max(schedule.ranks.count(rank) for rank in schedule.ranks)
    return (limit_bytes - batch) / shared, peaks


def _most(schedule: Schedule, stage: int) -> int:
    """Return the most micro-batches whose activations a stage holds at once."""
    change: Mapping[str, int] = {FORWARD: 1, BACKWARD: -1, BACKWARD_WEIGHT: -1}
    held = most = 0
    for action in schedule.actions[schedule.ranks[stage]]:
        if action.stage == stage:
            held += change.get(action.kind, 0)
            most = max(most, held)
    return most


def _reader(parts: Partition, reshard: str) -> str:
    """Return the operator before which a reshard runs: the first that reads it, if any."""
    graph = parts.resharded.graph
    while True:
        readers = graph.consumers.get(reshard, ())
        if not readers:
            return ""
        reshard = readers[0][0].name
        if reshard in parts.factors.sites:
            return reshard


def _nominal(parts: Partition) -> dict[str, float]:
    graph, mesh, found = parts.resharded.graph, parts.plan.mesh, {}
    for name, site in parts.factors.sites.items():
        sizes = letter_sizes(site, parts.resharded.ports[name], mesh, origin(mesh))
        done = work(site.node, site.rule, sizes, graph.types, [u in graph.needs_grad for u in site.node.uses])
        flops = float(done.flops_forward + done.flops_backward)
        moved = float(done.bytes_forward + done.bytes_backward)
        found[name] = max(flops / FLOPS_PER_S, moved / BYTES_PER_S)
    return found


__all__ = ["costs_of", "stage_room"]
