"""The peak bytes of a rank's step, from a walk over its program in the runtime's order.

Backward visits the nodes of forward (`forward.py`) in reverse, sums gradients of values that are read more than once,
and frees what each operator saved. Gradients of parameters stay (or go into the buckets' buffers, which exist from the
start) until the update. Nothing runs: sizes are those of the local graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace

from meshwright.core.graph import LOSS, RESHARD, START, TO_HOST, TRANSFERS, WAIT, Graph, Node
from meshwright.partition import Partition
from meshwright.partition.accumulation import programs_in_time, scattered_each_time, summed_first
from meshwright.partition.bucket_sizes import gradient_bytes
from meshwright.partition.buckets import BucketBytes, Group, fill
from meshwright.partition.gradients import pending_gradients
from meshwright.partition.insert_reshards import backward_itemsize
from meshwright.partition.parameter_offload import is_fetch
from meshwright.partition.split_backward import ADDMM
from meshwright.partition.stages import check_one_stage
from meshwright.predict.memory.allocator import (
    ADAMW,
    ADAMW_FOREACH,
    ADAMW_FUSED,
    LOSS_BACKWARD,
    Optimizer,
    Peak,
    Storage,
    optimizer_on,
)
from meshwright.predict.memory.forward import ForwardWalk
from meshwright.predict.memory.gradients import GradientMemory
from meshwright.predict.memory.messages import moved, own_part
from meshwright.predict.memory.updates import ALONE, Beside, UpdateMemory


def peak(
    parts: Partition,
    rank: int = 0,
    *,
    optimizer: Optimizer = ADAMW,
    device: str = "cpu",
    bucket_bytes: BucketBytes | None = None,
    staged: bool | None = None,
    apart: bool | None = None,
) -> Peak:
    """Return the peak of a rank's step. `device` decides, as in the runtime, which gradients are reduced in place.

    `staged`: whether a reduce-scatter receives everything before it reduces (by default on a CPU). `apart`: whether
    host memory is counted separately (by default if it is not the device's).
    """
    check_one_stage(parts.plan, "the peak")
    staged = device == "cpu" if staged is None else staged
    return StepWalk(parts, rank, optimizer, device, bucket_bytes, staged, apart).run()


class StepWalk(ForwardWalk):
    """A walk over forward, backward and update."""

    def __init__(
        self,
        parts: Partition,
        rank: int,
        optimizer: Optimizer,
        device: str,
        bucket_bytes: BucketBytes | None,
        staged: bool,
        apart: bool | None = None,
        stage: Graph | None = None,
        beside: Beside = ALONE,
    ) -> None:
        """`stage`: the program of one pipeline stage, instead of the full one; `beside`: the rank's other stages."""
        super().__init__(parts, rank, device, staged, apart, stage, beside)
        self.optimizer = optimizer
        self.queue: list[tuple[Node, list[Storage], Storage]] = []  # linears with what their weights need
        self.trained = {i.name for i in self.graph.inputs if i.role == "parameter" and i.needs_grad}
        self.offloaded = "optimizer" in parts.plan.techniques.offload
        described = pending_gradients(parts)
        if stage is not None:  # the rank has no others
            described = [g for g in described if g.name in self.trained or g.name in beside.trained]
        size = gradient_bytes(parts.plan, described) if bucket_bytes is None else bucket_bytes
        groups = fill(described, device, size)
        self.groups = groups if stage is None else _of_stage(groups, self.trained - beside.counted)
        mine = None if stage is None else self.trained
        self.update_parts = UpdateMemory(parts, rank, groups, bucket_bytes, staged, device, mine, beside)
        self.gradients = GradientMemory(
            self.graph,
            self.heap,
            self.update_parts,
            trained=self.trained,
            hosted=self.hosted,
            summed_first=summed_first(parts),
            scattered_each_time=scattered_each_time(parts),
            pieces=self.flights.pieces,
        )

    def run(self) -> Peak:
        self.start()
        heap, count = self.heap, programs_in_time(self.parts)
        # The first micro-batch, and one that finds gradients of earlier ones, determine the memory of all.
        for is_last in (False, True) if count > 1 else (True,):
            self.gradients.begin(is_last)
            self.forward()
            self.backward()
            if not is_last:  # what the step keeps of those between
                heap.new(self.result_bytes() * (count - 2))
        self.update()
        heap.at("results")
        heap.new(full_result_bytes(self.parts))
        return Peak(heap.peak, heap.instant, heap.at_peak, tuple(heap.timeline), heap.host_peak)

    # ------------------------------------------------------------ start

    def start(self) -> None:
        """Allocate the memory that lives throughout."""
        super().start()
        for self.heap.on_host in (True, False):
            mine = (n for n in self.trained if self._updated_on_host(n) == self.heap.on_host)
            trained = sum(self.updated_bytes(n) for n in mine if n not in self.beside.counted)
            self.heap.new(trained * self.optimizer.states, "optimizer")
        self.heap.on_host = self.apart
        if self.offloaded:  # a copy of what is updated lies beside the states
            mine = (
                self.trained - self.beside.counted - self.host_parameters
            )  # offloaded ones are updated in place
            self.heap.new(sum(self.updated_bytes(n) for n in mine), "optimizer")
        self.heap.on_host = False
        self.heap.new(self.update_parts.copied_bytes(), "optimizer")
        self.gradients.placed.update(self.beside.counted)  # they are added to those of the other stage
        for group in self.groups:
            self.heap.on_host = group.members[0].name in self.hosted
            if not group.alone and not group.parted:
                self.gradients.placed.update(g.name for g in group.members)
                self.heap.new(sum(g.on_wire(self.types[g.name].size_bytes) for g in group.members), "buckets")

    def _updated_on_host(self, name: str) -> bool:
        """Return whether the host updates a parameter, with its states in a memory other than the device's."""
        return name in self.hosted or (self.offloaded and self.apart)

    def updated_bytes(self, name: str) -> int:
        """Return the bytes of a parameter that the rank updates."""
        part = self.update_parts.part_bytes(name)
        return self.types[name].size_bytes if part is None else part

    def result_bytes(self) -> int:
        """Return the bytes of results beside the loss that one program of this rank returns, kept to the end of the
        step.

        Results that are accumulated over micro-batches are not counted.
        """
        found, time = self.parts.resharded, set(self.parts.plan.mesh.time)
        kept = {v for n, v in found.graph.outputs if n != LOSS and time.isdisjoint(found.layouts[v].partial)}
        mine = [self.values[v] for _, v in self.graph.outputs if self.of_one(v) in kept]
        return sum({id(storage): storage.size_bytes for storage in mine}.values())

    # ------------------------------------------------------------ backward

    def backward(self, halves: Collection[str] = ()) -> None:
        """Walk backward. Weight gradients of the linears in `halves` wait for `drain`."""
        heap, graph = self.heap, self.graph
        heap.on_host = False
        self.gradients.first_half = bool(halves)
        heap.at(LOSS_BACKWARD)
        for _, value in graph.outputs:
            if value in graph.needs_grad:
                self.gradients.add(value, heap.new(self.types[value].size_bytes))
        self._back(halves)
        if not halves:
            self.gradients.finish()

    def drain(self) -> None:
        """Compute delayed weight gradients. All are there before the first goes on to its parameter."""
        heap = self.heap
        self.gradients.first_half = False
        heap.at("weights, backward")
        made: list[tuple[str, Storage]] = []
        for node, arrived, came_in in self.queue:
            wanted = [p != _port(node) and u in self.graph.needs_grad for p, u in enumerate(node.uses)]
            made += [
                (node.uses[p], heap.new(self.types[node.uses[p]].size_bytes))
                for p, w in enumerate(wanted)
                if w
            ]
            for storage in (*arrived, came_in):
                heap.drop(storage)
        self.queue = []
        for name, storage in made:
            self.gradients.add(name, storage)
        self._back(())
        self.gradients.finish()

    def _back(self, halves: Collection[str]) -> None:
        heap = self.heap
        for node in reversed(self.graph.nodes):
            arrived = self.gradients.take(node)
            if not arrived:
                self._forget(node)
                continue
            heap.at(f"{node.name}, backward")
            self._open(node)
            wanted = [u in self.graph.needs_grad for u in node.uses]
            if node.name in halves:
                wanted = [w and port == _port(node) for port, w in enumerate(wanted)]
                source = self.values[node.uses[_port(node)]]
                alive = source.uses or source.saves  # else it was made again for this
                came_in = heap.hold(source) if alive else heap.new(source.size_bytes)
                self.queue.append((node, [heap.hold(storage) for storage in arrived], came_in))
            made = self._gradients(node, arrived, wanted)
            for storage in arrived:
                heap.drop(storage)
            self._forget(node)
            for name, storage in made:
                self.gradients.add(name, storage)

    def _open(self, node: Node) -> None:
        """Recompute what was not saved."""
        for note in self.kept[node.name].notes if node.name in self.kept else ():
            self.notes.open(note)

    def _forget(self, node: Node) -> None:
        kept = self.kept.pop(node.name, None)
        if kept is None:
            return
        for storage in kept.storages:
            self.heap.release(storage)
        for note in kept.notes:
            self.notes.release(note)

    def _gradients(
        self, node: Node, arrived: list[Storage], wanted: Sequence[bool]
    ) -> list[tuple[str, Storage]]:
        """Return the gradients that an operator computes, by value."""
        if is_fetch(node):  # a gradient goes to its leaf as it is
            return [(node.uses[0], self.heap.hold(arrived[0]))]
        if node.op in TRANSFERS:
            return [(node.uses[0], self._crossed(node, arrived[0], node.op != TO_HOST))]
        self.heap.on_host = node.name in self.on_host
        if node.op == RESHARD:
            total = self.gradients.summed(node, arrived[0])
            if total is None:
                return []
            steps, size = self._pair(node).backward, backward_itemsize(node)
            number = self._number(node)
            made = moved(self.heap, total, steps, self.parts.plan.mesh, number, size, self.staged)
            self.heap.drop(total)
            (source,) = node.uses
            if source not in self.graph.producers:
                made = own_part(self.heap, made, steps, self.types[source].size_bytes)
            return [(source, made)]
        if node.op == WAIT:
            return [(node.uses[0], self.flights.give_back(node, self.gradients.summed(node, arrived[0])))]
        if node.op == START:
            return self.flights.land(node)
        return self.operators.gradients(node, arrived, wanted)

    # ------------------------------------------------------------ update

    def update(self) -> None:
        self.heap.at("update")
        self.heap.on_host = False
        mine = (i.name for i in self.graph.inputs if i.name in self.trained)
        sizes = [self.updated_bytes(n) for n in mine if not self._updated_on_host(n)]
        present = (
            0 if self.offloaded else sum(self.updated_bytes(n) for n in self.trained & self.host_parameters)
        )
        weights = self.heap.new(present)  # copies of offloaded weights on the device
        if sizes:
            times = self.optimizer.temporaries
            # One by one, the last temporary of a parameter is there until the next one's replaces it.
            each = [times * n + (times > 1) * before for before, n in itertools.pairwise([0, *sizes])]
            self.heap.passing(times * sum(sizes) if self.optimizer.at_once else max(each))
        self.heap.drop(weights)
        self.heap.at("gather, update")
        self.update_parts.gather(self.heap)


def full_result_bytes(parts: Partition) -> int:
    """Return the bytes of a step's results beside the loss."""
    graph = parts.resharded.graph
    return sum(graph.types[value].size_bytes for label, value in graph.outputs if label != LOSS)


def _port(node: Node) -> int:
    """Return the input of a linear that is not a weight."""
    return int(node.op == ADDMM)


def _of_stage(groups: Sequence[Group], held: Collection[str]) -> tuple[Group, ...]:
    """Return the buckets without gradients that a stage does not have."""
    mine = (replace(g, members=tuple(m for m in g.members if m.name in held)) for g in groups)
    return tuple(group for group in mine if group.members)


__all__ = [
    "ADAMW",
    "ADAMW_FOREACH",
    "ADAMW_FUSED",
    "Optimizer",
    "Peak",
    "StepWalk",
    "optimizer_on",
    "peak",
]
