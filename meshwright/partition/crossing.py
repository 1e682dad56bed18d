"""The memory of a flight in one direction, as `runtime/overlap.py` has it: messages, what is under way, what came."""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshwright.mesh import Mesh
from meshwright.partition.heap import Heap, Storage
from meshwright.partition.moves import moved
from meshwright.partition.wires import Scatter, gather, scatter
from meshwright.redistribute import Step
from meshwright.redistribute.positions import Exchange, exchange
from meshwright.redistribute.steps import COLLECTIVES


class Crossing:
    """`ways`: the steps of each tensor; one item size for all. `give` every tensor, `launch`, `take` them out."""

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
        self._inside: dict[int, Storage] = {}
        self._buffer: Storage | None = None
        self._received: Storage | None = None
        self._scattered: Scatter | None = None

    def _width(self, plan: Exchange) -> int:
        return math.prod(plan.shape_before) if plan.kind == "all_reduce" else plan.padded

    def _rows(self, plan: Exchange) -> int:
        return len(plan.group) if plan.kind == "reduce_scatter" else 1

    def give(self, index: int, source: Storage) -> None:
        """A tensor goes in."""
        heap, plan = self.heap, self.sent[index]
        x = self._moved(source, self.early[index])
        if plan is None:
            self._inside[index] = x
            return
        if len(self.sent) > 1 and self._buffer is None:
            plans = [p for p in self.sent if p is not None]
            self._buffer = heap.new(sum(self._width(p) * self._rows(p) for p in plans) * self.itemsize)
        message = self._message(x, plan)
        heap.drop(x)
        if self._buffer is None:
            self._inside[index] = message
        else:
            heap.drop(message)

    def _message(self, x: Storage, plan: Exchange) -> Storage:
        heap, size = self.heap, self._width(plan) * self._rows(plan) * self.itemsize
        match plan.kind:
            case "all_gather":
                return heap.new(size) if plan.short else heap.hold(x)
            case "reduce_scatter":
                return heap.new(size)
            case "all_to_all":
                return heap.new(math.prod(plan.shape_before) * self.itemsize)
        return heap.hold(x)

    def launch(self) -> None:
        """The collective starts: what comes has its memory from here on."""
        plan, heap = self.sent[0], self.heap
        if plan is None:
            return
        elements = sum(self._width(p) for p in self.sent if p is not None)
        if self._buffer is None:
            self._buffer = self._inside.pop(0)
            if plan.kind == "all_reduce":
                own = heap.new(elements * self.itemsize)
                heap.drop(self._buffer)
                self._buffer = own
        members, size = len(plan.group), elements * self.itemsize
        match plan.kind:
            case "all_reduce":
                self._received = heap.hold(self._buffer)
            case "all_gather":
                self._received = gather(heap, members * size, self.mesh, plan.axes, self.staged)
            case "reduce_scatter":
                self._scattered = scatter(heap, members * size, members, self.staged)
            case _:
                self._received = heap.new(math.prod(plan.shape_after) * self.itemsize)

    def take(self, index: int) -> Storage:
        """A tensor comes out, held once. With the first all leave the buffer."""
        heap = self.heap
        if self._scattered is not None:
            self._received, self._scattered = self._scattered.wait(), None
        if self._received is not None and self._buffer is not None:
            heap.drop(self._buffer)
            for number, plan in enumerate(self.sent):
                assert plan is not None
                after = math.prod(plan.shape_after) * self.itemsize
                if plan.kind in ("all_gather", "all_to_all"):
                    self._inside[number] = heap.new(after)
                else:
                    self._inside[number] = heap.hold(self._received)
            heap.drop(self._received)
            self._received = self._buffer = None
        x = self._inside.pop(index)
        made = self._moved(x, self.late[index], self.sent[index] is not None)
        heap.drop(x)
        return made

    def _moved(self, x: Storage, steps: Sequence[Step], received: bool = False) -> Storage:
        return moved(self.heap, x, steps, self.mesh, self.rank, self.itemsize, self.staged, received)


__all__ = ["Crossing"]
