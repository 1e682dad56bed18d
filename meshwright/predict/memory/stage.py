"""The bytes of one stage of a pipeline: what it has all the time, what it keeps of a micro-batch, and what it needs
beside that while it runs one."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.core.graph import Graph
from meshwright.partition import Partition
from meshwright.partition.accumulation import programs_in_time
from meshwright.partition.split_backward import splittable
from meshwright.predict.memory.allocator import Optimizer
from meshwright.predict.memory.step import StepWalk, full_result_bytes
from meshwright.predict.memory.updates import ALONE, Beside


@dataclass(frozen=True)
class Backward:
    """Bytes of one micro-batch's backward on one rank, beside gradients of those before: the most while it runs
    (`most`) and in the weights' half where that comes later (`weights`); `held` of buckets from the one half to the
    other. `gradients`: those that stay after it."""

    most: int
    weights: int
    held: int
    gradients: int


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one rank. `fixed`: parameters, states, buffers, buckets and the batch (`batch` alone is shared with the
    rank's other stages). `kept`: what one micro-batch keeps between forward and backward, with what it received.
    `forward`: the most that there is of it while it runs. `first`, `middle`, `last`: its backward, where it finds no
    gradients yet, finds some, and is the one after which what was added up is reduced. `later`: what linears leave for
    the weights' half of backward; `update`: the most beside what is fixed and the gradients when the weights are
    updated. `host_fixed`, `host_kept`: the same of the host's memory, where that is not the device's."""

    fixed: int
    batch: int
    kept: int
    forward: int
    first: Backward
    middle: Backward
    last: Backward
    later: int
    update: int
    host_fixed: int
    host_kept: int


def stage_memory(
    parts: Partition,
    rank: int,
    stage: Graph,
    optimizer: Optimizer,
    device: str = "cpu",
    in_halves: bool = False,
    beside: Beside = ALONE,
    staged: bool | None = None,
) -> StageMemory:
    """Walk a stage's program for a micro-batch that finds no gradients, one that does, and the last. `in_halves`:
    whether linears leave the weights' half of backward for later. `beside`: the rank's other stages. `staged`: see
    `peak`."""
    staged = device == "cpu" if staged is None else staged
    walk = StepWalk(parts, rank, optimizer, device, None, staged, stage=stage, beside=beside)
    heap = walk.heap
    walk.start()
    borders = [i.name for i in stage.inputs if i.role == "boundary"]
    fixed, host_fixed = heap.total - sum(walk.values[name].size_bytes for name in borders), heap.host_total
    # What a stage of the same rank hands over lies where it kept it.
    received = sum(walk.values[name].size_bytes for name in borders if name not in beside.given)
    kept = host_kept = forward = later = 0
    again = {n.name for n in walk.graph.nodes if not walk.again.isdisjoint(n.values)}
    halves = splittable(walk.graph, again) if in_halves else frozenset()
    found: list[Backward] = []
    mine = 0  # gradients that stay
    for is_last in _turns(walk, programs_in_time(parts)):
        walk.gradients.begin(is_last)
        if is_last:
            walk.update_parts.resume(heap)
        base, host_base = heap.total, heap.host_total
        begin = len(heap.timeline)
        walk.stashes.begin()
        walk.forward()
        walk.stashes.settle()
        middle = len(heap.timeline)
        kept, host_kept = heap.total - base + received, heap.host_total - host_base
        for _, value in stage.outputs:  # what others read is theirs by now
            heap.drop(walk.values[value])
            walk.notes.dropped(walk.values[value])
        walk.backward(halves)
        walk.gradients.drop(borders)
        forward = _most(walk, begin, middle, base) + received
        between = len(heap.timeline)
        later = _left(walk)
        held = heap.total - later - base if halves else 0
        if halves:
            walk.drain()
        most, weights = _most(walk, middle, between, base), _most(walk, between, len(heap.timeline), base)
        mine += heap.total - base
        found.append(Backward(most + received, weights, held, mine))
    end, whole = len(heap.timeline), heap.total
    walk.update()
    update = _most(walk, end, len(heap.timeline), whole) + full_result_bytes(parts)
    fixed += walk.result_bytes() * programs_in_time(parts)  # all of them are there at the end
    # Where the last reduces nothing, it is like those between.
    return StageMemory(
        fixed=fixed,
        batch=heap.live["batch"],
        kept=kept,
        forward=forward,
        first=found[0],
        middle=found[len(found) // 2],
        last=found[-1],
        later=later,
        update=update,
        host_fixed=host_fixed,
        host_kept=host_kept,
    )


def _turns(walk: StepWalk, count: int) -> tuple[bool, ...]:
    """The micro-batches to look at, by whether they are the last: of several the first, the last, and one between if it
    leaves to the last what that reduces."""
    if count == 1:
        return (True,)
    left = walk.gradients.summed_first or (
        walk.update_parts.buckets and not walk.gradients.scattered_each_time
    )
    return (False, False, True) if left and count > 2 else (False, True)


def _most(walk: StepWalk, begin: int, end: int, base: int) -> int:
    """The most bytes beside `base` at some instants."""
    return max((size for _, size in walk.heap.timeline[begin:end]), default=base) - base


def _left(walk: StepWalk) -> int:
    """Bytes of what waits in the queue: what came into linears, and the gradients of what they made."""
    waits = (storage for _, arrived, came_in in walk.queue for storage in (*arrived, came_in))
    return sum({id(s): s.size_bytes for s in waits if s.category == "temporary"}.values())


__all__ = ["Backward", "StageMemory", "stage_memory"]
