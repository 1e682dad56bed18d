"""The memory of sharded and offloaded activations, as in `runtime/activation_offload.py`, and of offloaded parameters,
as in `runtime/parameter_offload.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.core.graph import DTYPES, Graph, Node
from meshwright.core.mesh import Mesh
from meshwright.partition.activation_offload import SavedActivation, part_bytes, room_bytes, settled_before
from meshwright.partition.parameter_offload import fetch_runs
from meshwright.predict.memory.allocator import Heap, Storage
from meshwright.predict.memory.messages import moved
from meshwright.predict.memory.recompute import Call, Notes


@dataclass(eq=False)
class _Run:
    layer: str
    before: _Run | None
    items: list[_Away] = field(default_factory=list)
    opened: bool = False


@dataclass(eq=False)
class _Away:
    """A value on the host: `there`, until it is brought `back`."""

    run: _Run
    there: Storage | None
    back: Storage | None = None
    call: Call | None = None


class ActivationMemory:
    """The sharded and offloaded activations of a rank. `apart`: host memory is not the device's."""

    def __init__(
        self,
        heap: Heap,
        notes: Notes,
        graph: Graph,
        activations: Mapping[str, SavedActivation],
        mesh: Mesh,
        rank: int,
        staged: bool,
        apart: bool,
    ) -> None:
        self.heap, self.notes, self.graph, self.activations = heap, notes, graph, activations
        self.mesh, self.rank, self.staged, self.apart = mesh, rank, staged, apart
        self.room_bytes = room_bytes(graph, activations, mesh, rank)
        self.settled = settled_before(graph, activations)
        self.parts: dict[str, Storage] = {}  # what is kept of values on the device
        self._leaving: deque[Storage] = deque()
        self._run: _Run | None = None

    def begin(self) -> None:
        """Begin a forward pass."""
        self._run = None

    def keep(self, value: str, storage: Storage) -> None:
        """Shard or offload a value with its own memory."""
        activation, heap = self.activations[value], self.heap
        if self.notes.of(storage) is not None:
            return
        part = (
            heap.new(part_bytes(activation, self.graph, value, self.mesh, self.rank))
            if activation.slices
            else None
        )
        if not activation.host:
            assert part is not None
            # Kept once more than the note holds it: what brings it back is the note's own function.
            self.notes.watch([storage], (), lambda _: [self._whole(value, heap.hold(part))], held=[part])
            self.parts[value] = part
            heap.drop(part)
            return
        if self._run is None or self._run.layer != activation.layer or self._run.opened:
            self._run = _Run(activation.layer, self._run)
        leaves = part if part is not None else heap.hold(storage)
        there = self._on_host(leaves.size_bytes)
        item = _Away(self._run, there)
        item.call = self.notes.watch([storage], (), lambda _: [self._taken(value, item)], held=[there])
        heap.drop(there)
        self._run.items.append(item)
        self._leaving.append(leaves)
        while len(self._leaving) > 1 and sum(s.size_bytes for s in self._leaving) > self.room_bytes:
            self._settle_one()

    def settle(self) -> None:
        """Free all offloaded values on the device."""
        while self._leaving:
            self._settle_one()

    def _settle_one(self) -> None:
        leaves = self._leaving.popleft()
        self.heap.drop(leaves)
        self.notes.dropped(leaves)

    def _on_host(self, size_bytes: int) -> Storage:
        before, self.heap.on_host = self.heap.on_host, self.apart
        made = self.heap.new(size_bytes)
        self.heap.on_host = before
        return made

    def _bring(self, run: _Run) -> None:
        self.settle()
        for item in reversed(run.items):
            if item.there is not None and item.call is not None and any(item.call.uses):
                item.back = self.heap.new(item.there.size_bytes)
                item.call.kept.remove(item.there)
                self.heap.release(item.there)
                item.there = None

    def _taken(self, value: str, item: _Away) -> Storage:
        self._bring(item.run)
        assert item.back is not None
        part, item.back = item.back, None
        found = self._whole(value, part) if self.activations[value].gather else part
        if not item.run.opened and item.run.before is not None:
            self._bring(item.run.before)
        item.run.opened = True
        return found

    def _whole(self, value: str, part: Storage) -> Storage:
        """Return a value gathered from its shards, with one use, and free the shard."""
        size = DTYPES[self.graph.types[value].dtype]
        steps = self.activations[value].gather
        made = moved(self.heap, part, steps, self.mesh, self.rank, size, self.staged)
        self.heap.drop(part)
        return made


class FetchMemory:
    """The device copies of a rank's offloaded parameters."""

    def __init__(self, heap: Heap, notes: Notes, graph: Graph) -> None:
        self.heap, self.notes, self.graph = heap, notes, graph
        self.runs = fetch_runs(graph)
        self._run_of = {name: number for number, run in enumerate(self.runs) for name in run}
        self._ahead: dict[str, Storage] = {}  # brought, and not taken yet
        self._left: set[str] = set()  # still to be taken in this forward pass
        self._calls: dict[str, Call] = {}
        self._opened: set[int] = set()

    def begin(self) -> None:
        """Begin a forward pass."""
        self._left, self._opened = set(self._run_of), set()

    def take(self, node: Node) -> Storage:
        """Return the result of a transfer in forward, with one use."""
        run = self._run_of[node.name]
        first = self._left.issuperset(self.runs[run])
        self._start(run)
        self._left.discard(node.name)
        made = self._ahead.pop(node.name)
        self._calls[node.name] = self.notes.watch([made], (), lambda _: [self._again(node.name)])
        if first and run + 1 < len(self.runs):
            self._start(run + 1)
        return made

    def _start(self, run: int) -> None:
        for name in self.runs[run]:
            if name in self._left and name not in self._ahead:
                self._ahead[name] = self._new(name)

    def _again(self, name: str) -> Storage:
        run = self._run_of[name]
        self._restart(run)
        made = self._ahead.pop(name)
        if run not in self._opened and run:
            self._restart(run - 1)
        self._opened.add(run)
        return made

    def _restart(self, run: int) -> None:
        for name in reversed(self.runs[run]):
            call = self._calls.get(name)
            if call is not None and call.made is None and any(call.uses):
                self._ahead[name] = self._new(name)
                del self._calls[name]

    def _new(self, name: str) -> Storage:
        return self.heap.new(self.graph.types[name].size_bytes)


__all__ = ["FetchMemory", "ActivationMemory"]
