"""The bytes of one stage of a pipeline: what it has all the time, what it keeps of a micro-batch, and what it needs
beside that while it runs one."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.graph import Graph
from meshwright.partition import Partition
from meshwright.partition.accumulation import programs_in_time
from meshwright.partition.halves import splittable
from meshwright.partition.memory import StepWalk
from meshwright.partition.peaks import Optimizer


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one rank. `fixed`: parameters, states, buffers, buckets and the batch (`batch` alone is shared with the
    rank's other stages). `gradients`: those that stay from one micro-batch to the next. `kept`: what one micro-batch
    keeps between forward and backward, with what it received. `forward`, `backward`: the most that there is of it while
    it runs; `later`: what linears leave of it for the weights' half of backward, and `weights` the most in that half;
    `update`: the most beside what is fixed and the gradients when the weights are updated."""

    fixed: int
    batch: int
    gradients: int
    received: int
    kept: int
    forward: int
    backward: int
    later: int
    weights: int
    update: int


def stage_memory(
    parts: Partition,
    rank: int,
    stage: Graph,
    optimizer: Optimizer,
    device: str = "cpu",
    in_halves: bool = False,
) -> StageMemory:
    """Walk a stage's program once for a micro-batch that finds no gradients, and once for one that does. `in_halves`:
    whether linears leave the weights' half of backward for later."""
    walk = StepWalk(parts, rank, optimizer, device, None, device == "cpu", stage=stage)
    heap = walk.heap
    walk.start()
    borders = [i.name for i in stage.inputs if i.role == "boundary"]
    received = sum(walk.values[name].size_bytes for name in borders)
    first = heap.total
    base = kept = forward = backward = later = weights = 0
    again = {n.name for n in walk.graph.nodes if not walk.again.isdisjoint(n.values)}
    halves = splittable(walk.graph, again) if in_halves else frozenset()
    for is_last in (False, True) if programs_in_time(parts) > 1 else (True,):
        base = heap.total
        walk.gradients.begin(is_last)
        begin = len(heap.timeline)
        walk.stashes.begin()
        walk.forward()
        walk.stashes.settle()
        middle = len(heap.timeline)
        kept = heap.total - base
        for _, value in stage.outputs:  # what others read is theirs by now
            heap.drop(walk.values[value])
            walk.notes.dropped(walk.values[value])
        walk.backward(halves)
        walk.gradients.drop(borders)
        forward = max((size for _, size in heap.timeline[begin:middle]), default=base) - base
        between = len(heap.timeline)
        later = _left(walk)
        if halves:
            walk.drain()
        backward = max((size for _, size in heap.timeline[middle:between]), default=base) - base
        weights = max((size for _, size in heap.timeline[between:]), default=base) - base
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
        weights,
        update,
    )


def _left(walk: StepWalk) -> int:
    """Bytes of what waits in the queue: what came into linears, and the gradients of what they made."""
    waits = (storage for _, arrived, came_in in walk.queue for storage in (*arrived, came_in))
    return sum({id(s): s.size_bytes for s in waits if s.category == "temporary"}.values())


__all__ = ["StageMemory", "stage_memory"]
