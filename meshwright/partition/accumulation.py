"""When gradients are reduced in a step with several backward passes, one for each program in time.

That is after the last of them or, with `gradient_accumulation_shard`, after each, so that no rank holds a full sum:

    False   every rank accumulates full gradients and reduces the sum in the last backward: least communication
    True    at levels 2 and 3 each backward reduces and scatters, and a rank accumulates its shards: least memory
"""

from __future__ import annotations

from meshwright.core.collectives import COLLECTIVES
from meshwright.core.graph import RESHARD
from meshwright.core.remembered import cached_on_first
from meshwright.partition import Partition


def programs_in_time(parts: Partition) -> int:
    """Return how often backward runs in a step. Interleaved half-batches are one program."""
    return parts.micro_batches // parts.copies


def scattered_each_time(parts: Partition) -> bool:
    """Return whether reduce-scatters of buckets run in every backward."""
    asked = parts.plan.techniques
    return programs_in_time(parts) > 1 and asked.gradient_accumulation_shard and asked.optimizer_parallel >= 2


@cached_on_first
def summed_first(parts: Partition) -> frozenset[str]:
    """Return the reshards of parameters whose gradients accumulate in the layout of use and are sent in the last
    backward.

    Accumulation and every step of a redistribution are linear, so their order is free. Weights in host memory, and
    reshards that differ between micro-batches, are not among them.
    """
    if programs_in_time(parts) == 1 or parts.plan.techniques.gradient_accumulation_shard:
        return frozenset()
    trained = {i.name for i in parts.resharded.graph.input_of("parameter") if i.needs_grad}
    time, found = set(parts.plan.mesh.time), set[str]()
    for node in parts.resharded.graph.nodes:
        if node.op != RESHARD or node.uses[0] not in trained:
            continue
        pair = parts.resharded.pairs[node.name]
        sends = any(s.kind in COLLECTIVES for s in pair.backward)
        if sends and all(time.isdisjoint(s.axes) for s in (*pair.forward, *pair.backward)):
            found.add(node.name)
    for flight in parts.flights:  # one collective is sent at one time
        if not found.issuperset(flight.members):
            found.difference_update(flight.members)
    return frozenset(found)


__all__ = ["programs_in_time", "scattered_each_time", "summed_first"]
