"""The bytes of one pipeline stage: permanent ones, those saved for a micro-batch, and those of running one."""

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
    """Bytes of one micro-batch's backward on one rank, without gradients of earlier ones.

    `most` is the peak, and `weights` the peak of delayed weight gradients. `held` are bytes of buckets between the two
    halves, and `gradients` those that stay after it.
    """

    most: int
    weights: int
    held: int
    gradients: int


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one rank.

    /- `fixed`: parameters, states, buffers, buckets and the batch (only `batch` is shared with the rank's other
    stages).

    - `kept`: saved for one micro-batch between forward and backward, with received values.
    - `forward`: the peak of a forward pass.
    - `first`, `middle`, `last`: a backward that finds no gradients, finds some, and is the one after which accumulated
      gradients are reduced.
    - `later`: values that linears keep for delayed weight gradients.
    - `update`: the peak of the update, beside `fixed` and the gradients.
    - `host_fixed`, `host_kept`: the same in host memory, if it is not the device's.
    """

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
    """Walk a stage's program for a micro-batch that finds no gradients, for one that does, and for the last.

    `in_halves`: linears delay weight gradients. `beside`: the rank's other stages. `staged`: see `peak`.
    """
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
        walk.activations.begin()
        walk.forward()
        walk.activations.settle()
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
    """Return the micro-batches to simulate, by whether they are the last.

    They are the first, the last and, if gradients are reduced in the last one, one in between.
    """
    if count == 1:
        return (True,)
    left = walk.gradients.summed_first or (
        walk.update_parts.buckets and not walk.gradients.scattered_each_time
    )
    return (False, False, True) if left and count > 2 else (False, True)


def _most(walk: StepWalk, begin: int, end: int, base: int) -> int:
    """Return the most bytes above `base` at some instants."""
    return max((size for _, size in walk.heap.timeline[begin:end]), default=base) - base


def _left(walk: StepWalk) -> int:
    """Return the bytes of delayed weight gradients: inputs of linears, and gradients of their results."""
    waits = (storage for _, arrived, came_in in walk.queue for storage in (*arrived, came_in))
    return sum({id(s): s.size_bytes for s in waits if s.category == "temporary"}.values())


__all__ = ["Backward", "StageMemory", "stage_memory"]
