"""The memory of a reshard's steps on a rank: messages, their rows, and the results assembled from them.

It covers buffers beside a message while a collective is under way, as the communicators allocate them
(`runtime/communicator`), and the memory of a flight in one direction, as in `runtime/overlap.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.core.collectives import COLLECTIVES
from meshwright.core.mesh import Mesh
from meshwright.predict.memory.allocator import Heap, Storage
from meshwright.redistribute import Step
from meshwright.redistribute.index_maps import Exchange, exchange


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
    """Return the memory of a value after some steps, with one use.

    It is `source` itself (with one more use) if none of them allocates a tensor. `staged`: a reduce-scatter receives
    everything before it reduces, as on a CPU. `received`: the source came from other ranks, and a view of it is copied,
    so that the rest can be freed.
    """
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
    """Return the gradient of a leaf, which the leaf keeps: a view of received memory is copied, so that the rest can be
    freed.
    """
    if [step.kind for step in steps] != ["slice"]:
        return x
    part = heap.new(size_bytes)
    heap.drop(x)
    return part


def _moved(heap: Heap, x: Storage, plan: Exchange, itemsize: int, mesh: Mesh, staged: bool) -> Storage:
    """Return the memory of the result of one step, with one use."""
    before, after = (math.prod(s) * itemsize for s in (plan.shape_before, plan.shape_after))
    if plan.kind == "slice" or (plan.kind == "mask" and plan.keeps):
        return heap.hold(x)
    kind = plan.collective
    match kind.chunks, kind.splits:
        case "own", _:
            flat, received = heap.new(before), heap.new(after)
            heap.drop(flat)  # what was sent is gone before what came is put in place
            result = heap.new(after)
            heap.drop(received)
            return result
        case "padded", True:
            message = plan.padded * len(plan.group) * itemsize
            rows = heap.new(message)
            result = scatter(heap, message, len(plan.group), staged).wait()
            heap.drop(rows)
            return result
        case "padded", False:
            padded = heap.new(plan.padded * itemsize if plan.short else 0)
            rows = gather(heap, plan.padded * len(plan.group) * itemsize, mesh, plan.axes, staged)
            heap.drop(padded)
            result = heap.new(after)
            heap.drop(rows)
            return result
    return heap.new(after)


@dataclass
class Scatter:
    """A reduce-scatter under way, with its receive buffer until the wait."""

    heap: Heap
    received: Storage
    sum_bytes: int  # of a sum that is no part of what comes; 0 where it is

    def wait(self) -> Storage:
        """Return the sum, with one use."""
        if not self.sum_bytes:
            return self.received
        total = self.heap.new(self.sum_bytes)
        self.heap.drop(self.received)
        return total


def scatter(heap: Heap, message_bytes: int, members: int, staged: bool) -> Scatter:
    """Start a reduce-scatter.

    `staged`: all rows arrive before they are reduced, as between processes on a CPU. With two members the received row
    becomes the sum.
    """
    row = message_bytes // members
    if staged and members > 2:
        return Scatter(heap, heap.new(message_bytes), row)
    return Scatter(heap, heap.new(row), 0)


def gather(heap: Heap, message_bytes: int, mesh: Mesh, axes: Sequence[str], staged: bool) -> Storage:
    """Start an all-gather and return the memory of its result, with one use.

    `staged`: if some members are nearer than others, gloo gathers into a copy first.
    """
    received = heap.new(message_bytes)
    heap.passing(message_bytes if staged and not mesh.equally_near(axes) else 0)
    return received


class Crossing:
    """A flight in one direction. `ways` are the steps of each tensor; all share an item size.

    `give` every tensor, `launch`, then `take` them.
    """

    def __init__(
        self, heap: Heap, ways: Sequence[Sequence[Step]], mesh: Mesh, rank: int, itemsize: int, staged: bool
    ) -> None:
        self.heap, self.mesh, self.rank, self.itemsize, self.staged = heap, mesh, rank, itemsize, staged
        self.early: list[Sequence[Step]] = []
        self.late: list[Sequence[Step]] = []
        self.sent: list[Exchange | None] = []
        for steps in ways:
            first = next((n for n, s in enumerate(steps) if s.kind in COLLECTIVES), len(steps))
            self.early.append(steps[:first])
            self.late.append(steps[first + 1 :])
            self.sent.append(exchange(steps[first], mesh, rank) if first < len(steps) else None)
        self.given: set[int] = set()
        self.launched = False
        self._inside: dict[int, Storage] = {}
        self._buffer: Storage | None = None
        self._received: Storage | None = None
        self._scattered: Scatter | None = None

    def _rows(self, plan: Exchange) -> int:
        return len(plan.group) if plan.collective.splits else 1

    def give(self, index: int, source: Storage) -> None:
        """Put a tensor into the flight."""
        heap, plan = self.heap, self.sent[index]
        self.given.add(index)
        x = self._moved(source, self.early[index])
        if plan is None:
            self._inside[index] = x
            return
        if len(self.sent) > 1 and self._buffer is None:
            plans = [p for p in self.sent if p is not None]
            self._buffer = heap.new(sum(p.padded * self._rows(p) for p in plans) * self.itemsize)
        message = self._message(x, plan)
        heap.drop(x)
        if self._buffer is None:
            self._inside[index] = message
        else:
            heap.drop(message)

    def _message(self, x: Storage, plan: Exchange) -> Storage:
        heap, size = self.heap, plan.padded * self._rows(plan) * self.itemsize
        match plan.collective.chunks, plan.collective.splits:
            case "own", _:
                return heap.new(math.prod(plan.shape_before) * self.itemsize)
            case "padded", True:
                return heap.new(size)
            case "padded", False:
                return heap.new(size) if plan.short else heap.hold(x)
        return heap.hold(x)

    def launch(self) -> None:
        """Start the collective and allocate its result."""
        plan, heap = self.sent[0], self.heap
        self.launched = True
        if plan is None:
            return
        elements = sum(p.padded for p in self.sent if p is not None)
        if self._buffer is None:
            self._buffer = self._inside.pop(0)
            if plan.collective.chunks == "all":  # in place, of memory of its own
                own = heap.new(elements * self.itemsize)
                heap.drop(self._buffer)
                self._buffer = own
        members, size = len(plan.group), elements * self.itemsize
        match plan.collective.chunks, plan.collective.splits:
            case "own", _:
                self._received = heap.new(math.prod(plan.shape_after) * self.itemsize)
            case "padded", True:
                self._scattered = scatter(heap, members * size, members, self.staged)
            case "padded", False:
                self._received = gather(heap, members * size, self.mesh, plan.axes, self.staged)
            case _:
                self._received = heap.hold(self._buffer)

    def take(self, index: int) -> Storage:
        """Return a tensor from the flight, with one use. The first call takes all of them out of the buffer."""
        heap = self.heap
        if self._scattered is not None:
            self._received, self._scattered = self._scattered.wait(), None
        if self._received is not None and self._buffer is not None:
            heap.drop(self._buffer)
            for number, plan in enumerate(self.sent):
                assert plan is not None
                after = math.prod(plan.shape_after) * self.itemsize
                adds = plan.collective.adds
                self._inside[number] = heap.hold(self._received) if adds else heap.new(after)
            heap.drop(self._received)
            self._received = self._buffer = None
        x = self._inside.pop(index)
        made = self._moved(x, self.late[index], self.sent[index] is not None)
        heap.drop(x)
        return made

    def drop(self, index: int) -> None:
        """Drop a tensor that arrived, and that nobody takes."""
        if index in self._inside:
            self.heap.drop(self._inside.pop(index))

    def _moved(self, x: Storage, steps: Sequence[Step], received: bool = False) -> Storage:
        return moved(self.heap, x, steps, self.mesh, self.rank, self.itemsize, self.staged, received)


__all__ = ["Crossing", "Scatter", "gather", "scatter"]
