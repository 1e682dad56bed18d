"""The bytes of one stage of a pipeline: what it has all the time, what it keeps of a micro-batch, and what it needs
beside that while it runs one."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.graph import Graph
from meshwright.partition import Partition
from meshwright.partition.halves import ADDMM, splittable
from meshwright.partition.memory import StepWalk
from meshwright.partition.peaks import Optimizer


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one rank. `fixed`: parameters, states, buffers, buckets and the batch (`batch` alone is shared with the
    rank's other stages). `gradients`: those that stay from one micro-batch to the next. `kept`: what one micro-batch
    keeps between forward and backward, with what it received. `forward`, `backward`: the most that there is of it while
    it runs; `later`: what linears leave of it for the weights' half of backward; `update`: the most beside what is
    fixed and the gradients when the weights are updated."""

    fixed: int
    batch: int
    gradients: int
    received: int
    kept: int
    forward: int
    backward: int
    later: int
    update: int


def stage_memory(
    parts: Partition, rank: int, stage: Graph, optimizer: Optimizer, device: str = "cpu"
) -> StageMemory:
    """Walk a stage's program once for a micro-batch that finds no gradients, and once for one that does."""
    walk = StepWalk(parts, rank, optimizer, device, None, device == "cpu", stage=stage)
    heap = walk.heap
    walk.start()
    borders = [i.name for i in stage.inputs if i.role == "boundary"]
    received = sum(walk.values[name].size_bytes for name in borders)
    first = heap.total
    base = kept = forward = backward = later = 0
    for is_last in (False, True) if parts.micro_batches > 1 else (True,):
        base = heap.total
        walk.gradients.begin(is_last)
        begin = len(heap.timeline)
        walk.forward()
        middle = len(heap.timeline)
        kept = heap.total - base
        later = _left(walk)
        walk.backward()
        walk.gradients.drop(borders)
        for _, value in stage.outputs:
            heap.drop(walk.values[value])
        forward = max((size for _, size in heap.timeline[begin:middle]), default=base) - base
        backward = max((size for _, size in heap.timeline[middle:]), default=base) - base
    end = len(heap.timeline)
    whole = heap.total
    walk.update()
    update = max((size for _, size in heap.timeline[end:]), default=whole) - whole
    batch = heap.live["batch"]
    return StageMemory(
        first - received,
        batch,
        max(base, whole) - first,
        received,
        kept + received,
        forward + received,
        backward + received,
        later,
        update,
    )


def _left(walk: StepWalk) -> int:
    """Bytes of what came into the linears that may leave their weights for later, and of their gradients."""
    again = {n.name for n in walk.graph.nodes if not walk.again.isdisjoint(n.values)}
    names = splittable(walk.graph, again)
    linears = [n for n in walk.graph.nodes if n.name in names]
    inputs = {id(s): s for n in linears for s in [walk.values[n.uses[n.op == ADDMM]]]}
    gradients = sum(n.outputs[0].size_bytes for n in linears)
    return gradients + sum(s.size_bytes for s in inputs.values() if s.category == "temporary")


__all__ = ["StageMemory", "stage_memory"]
