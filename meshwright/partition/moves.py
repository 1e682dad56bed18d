"""The memory of a reshard's steps on a rank: messages, rows, and what they are put together into."""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshwright.mesh import Mesh
from meshwright.partition.heap import Heap, Storage
from meshwright.partition.wires import gather, scatter
from meshwright.redistribute import Step
from meshwright.redistribute.positions import Exchange, exchange


def moved(
    heap: Heap,
    source: Storage,
    steps: Sequence[Step],
    mesh: Mesh,
    rank: int,
    itemsize: int,
    staged: bool,
    received: bool = False,
) -> Storage:
    """The memory in which a value lies after some steps, held once; `source` itself (held once more) where none of
    them makes a new tensor. `staged`: all that is scattered comes before it is added up, as on a CPU (`wires.py`).
    `received`: the source came from others, and a part of it is copied, so that the rest can go."""
    here = heap.hold(source)
    for number, step in enumerate(steps):
        plan = exchange(step, mesh, rank)
        there = _moved(heap, here, plan, itemsize, mesh, staged)
        size = math.prod(plan.shape_after) * itemsize
        if (
            (number or received)
            and step.kind == "slice"
            and there.size_bytes >= 2 * size
            and there.size_bytes > 1024
        ):
            heap.drop(there)
            there = heap.new(size)  # a part of what an earlier step made is copied
        heap.drop(here)
        here = there
    return here


def own_part(heap: Heap, x: Storage, steps: Sequence[Step], size_bytes: int) -> Storage:
    """The gradient of a leaf, which the leaf keeps: a part of what came alone is copied, so that the rest can go."""
    if [step.kind for step in steps] != ["slice"]:
        return x
    part = heap.new(size_bytes)
    heap.drop(x)
    return part


def _moved(heap: Heap, x: Storage, plan: Exchange, itemsize: int, mesh: Mesh, staged: bool) -> Storage:
    """What one step makes, held once."""
    before, after = (math.prod(s) * itemsize for s in (plan.shape_before, plan.shape_after))
    match plan.kind:
        case "slice":
            return heap.hold(x)
        case "mask" if plan.keeps:
            return heap.hold(x)
        case "mask" | "pad" | "all_reduce":
            return heap.new(after)
        case "reduce_scatter":
            message = plan.padded * len(plan.group) * itemsize
            rows = heap.new(message)
            result = scatter(heap, message, len(plan.group), staged).wait()
            heap.drop(rows)
            return result
        case "all_gather":
            padded = heap.new(plan.padded * itemsize if plan.short else 0)
            rows = gather(heap, plan.padded * len(plan.group) * itemsize, mesh, plan.axes, staged)
            result = heap.new(after)
            heap.drop(rows)
            heap.drop(padded)
            return result
        case "all_to_all":
            flat, received = heap.new(before), heap.new(after)
            result = heap.new(after)
            heap.drop(received)
            heap.drop(flat)
            return result
    raise AssertionError(plan.kind)
