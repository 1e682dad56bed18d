"""The memory of a forward pass, from a walk over a rank's program in the runtime's order.

Forward frees a value after its last use unless autograd saves it (`ops/saved.py`). Views share the memory of their
base. Nothing runs: sizes are those of the local graph.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.core.graph import DTYPES, RESHARD, START, TO_HOST, TRANSFERS, WAIT, Graph, Node
from meshwright.cost.operator_tables import SHARING
from meshwright.cost.strides import copying_views
from meshwright.ops.saved import saved
from meshwright.partition import Partition
from meshwright.partition.activation_offload import activations_in
from meshwright.partition.interleave import in_copies, of_one, original
from meshwright.partition.micro_batches import first_program
from meshwright.partition.parameter_offload import is_fetch
from meshwright.partition.recompute_marks import AGAIN, keeps_of
from meshwright.predict.memory.allocator import FORWARD, Heap, Storage
from meshwright.predict.memory.in_flight import FlightMemory
from meshwright.predict.memory.messages import moved
from meshwright.predict.memory.offload import ActivationMemory, FetchMemory
from meshwright.predict.memory.operator import OperatorMemory
from meshwright.predict.memory.recompute import Notes, SavedResult
from meshwright.predict.memory.updates import ALONE, Beside
from meshwright.redistribute import Reshard


@dataclass
class _Kept:
    """The tensors that autograd saves for one node."""

    storages: list[Storage]
    notes: list[SavedResult]


class ForwardWalk:
    """A walk over forward. `values` is the memory of live values, `kept` what autograd saves for each node."""

    def __init__(
        self,
        parts: Partition,
        rank: int,
        device: str,
        staged: bool,
        apart: bool | None = None,
        stage: Graph | None = None,
        beside: Beside = ALONE,
    ) -> None:
        """`stage`: the program of one pipeline stage, instead of the full one; `beside`: the rank's other stages."""
        self.beside = beside
        self.staged = staged
        self.parts, self.rank = parts, rank
        together = first_program(parts, rank) if parts.copies > 1 else None  # all of them live at once
        self.graph: Graph = stage or (parts.local(rank) if together is None else together.graph)
        self.copy_of = {} if together is None else together.copy_of
        self.types = self.graph.types
        self.copying = copying_views(self.graph)
        self.heap = Heap()
        self.values: dict[str, Storage] = {}
        self.kept: dict[str, _Kept] = {}
        self.notes = Notes(self.heap)
        keeps = keeps_of(self.graph, in_copies(parts.resharded.keeps, parts.copies))
        self.again = {v for v, how in keeps.items() if how == AGAIN}
        self.operators = OperatorMemory(self.heap, self.notes, self.graph, self.values, self.again, device)
        self.apart = device != "cpu" if apart is None else apart  # the device's memory is not the host's
        self.activations = ActivationMemory(
            self.heap,
            self.notes,
            self.graph,
            activations_in(parts.activations, self.graph, parts.copies),
            parts.plan.mesh,
            rank,
            staged,
            self.apart,
        )
        self.fetches = FetchMemory(self.heap, self.notes, self.graph)
        self.host_parameters = parts.resharded.host_parameters
        self.hosted = parts.resharded.hosted if self.apart else frozenset()
        self.flights = FlightMemory(
            self.graph, self.heap, self.notes, self._pair, parts.plan.mesh, self._number, staged
        )
        self.on_host = {
            n.name for n in self.graph.nodes if self.apart and parts.on_host(of_one(n, self.copy_of))
        }

    def start(self) -> None:
        """Allocate the inputs of the program, which live throughout."""
        self.heap.at("start")
        batch = {}
        for whole in self.parts.resharded.graph.input_of("batch"):
            self.heap.on_host = whole.name in self.hosted
            batch[whole.name] = self.heap.new(whole.type.size_bytes, "batch")
        for entry in self.graph.inputs:
            self.heap.on_host = entry.name in self.hosted or (
                self.apart and entry.name in self.host_parameters
            )
            match entry.role:
                case "parameter":
                    self.values[entry.name] = self.heap.new(self.counted_bytes(entry.name), "parameters")
                case "batch":  # every rank receives the full batch and reads its share
                    self.values[entry.name] = batch[self.of_one(entry.name)]
                case _:
                    self.values[entry.name] = self.heap.new(self.counted_bytes(entry.name), "buffers")
        self.heap.on_host = False

    def counted_bytes(self, name: str) -> int:
        """Return the bytes of an input; 0 if another stage of the rank counts it."""
        return 0 if name in self.beside.counted else self.types[name].size_bytes

    def of_one(self, name: str) -> str:
        """Return the name of a half-batch's value in the program of one."""
        return original(name, self.copy_of[name]) if name in self.copy_of else name

    def _pair(self, reshard: Node) -> Reshard:
        return self.parts.resharded.pairs[self.of_one(reshard.name)]

    def _number(self, node: Node) -> int:
        """Return this rank's number on the plan's mesh for the half-batch of a node: they may have different sizes."""
        return self.parts.of_rank(self.rank)[self.copy_of.get(node.name, 0)] if self.copy_of else self.rank

    # ------------------------------------------------------------ forward

    def forward(self) -> None:
        self.fetches.begin()
        last: dict[str, int] = {}
        for number, node in enumerate(self.graph.nodes):
            last.update(dict.fromkeys((*node.uses, *node.values), number))
        for _, value in (*self.graph.outputs, *self.graph.mutations):
            last[value] = len(self.graph.nodes)
        ends: dict[int, list[str]] = {}
        for value, number in last.items():
            ends.setdefault(number, []).append(value)
        for number, node in enumerate(self.graph.nodes):
            self.heap.at(node.name + FORWARD)
            if node.name == self.activations.settled:
                self.activations.settle()
            self._run(node)
            self._save(node)
            for value in ends.get(number, ()):
                if value in self.graph.producers:
                    self.heap.drop(self.values[value])
                    self.notes.dropped(self.values[value])

    def _save(self, node: Node) -> None:
        """Offload or shard the results of a node that are saved so; a view is saved with its base."""
        shares = node.op not in (RESHARD, WAIT) and self._shares(node)
        for value in node.values:
            if value in self.activations.activations and not shares:
                self.activations.keep(value, self.values[value])

    def _run(self, node: Node) -> None:
        heap = self.heap
        if is_fetch(node):
            self.values[node.name] = self.fetches.take(node)
            return
        if node.op in TRANSFERS:
            self.values[node.name] = self._crossed(node, self.values[node.uses[0]], node.op == TO_HOST)
            return
        heap.on_host = node.name in self.on_host
        if node.op == RESHARD:
            self._reshard(node)
            return
        if node.op == START:
            self.flights.start(node, [self.values[name] for name in node.uses])
            self.values[node.name] = heap.new(0)
            return
        if node.op == WAIT:
            source = self.values[self.graph.producers[node.uses[0]].uses[node.args[1]]]
            self.values[node.name] = self.flights.wait(node, source)
            return
        extra: list[Storage] = []
        if not self._shares(node):
            wanted = [u in self.graph.needs_grad for u in node.uses]
            kept = saved(node, self.types, wanted, self.operators.device)
            made, extra = self.operators.computed(node, kept.extra_bytes)
        else:
            kept = None
            made = [heap.hold(self.values[node.uses[0]]) for _ in node.outputs]
        self.values.update(zip(node.values, made, strict=True))
        if kept is not None and not self.again.isdisjoint(node.values):
            self.operators.watch(node, made, extra, kept.outputs)
        if kept is not None and any(node.needs_grad):
            names = [node.uses[p] for p in kept.inputs] + [node.values[o] for o in kept.outputs]
            self._keep(node, [self.values[n] for n in names], extra)
        for storage in extra:
            heap.drop(storage)
            self.notes.dropped(storage)

    def _crossed(self, node: Node, source: Storage, host: bool) -> Storage:
        """Return a copy at the other end of the link; the memory itself if there is no link."""
        self.heap.on_host = host and self.apart
        return self.heap.new(self.types[node.name].size_bytes) if self.apart else self.heap.hold(source)

    def _shares(self, node: Node) -> bool:
        """Return whether the results share memory with the first input."""
        view = node.op in SHARING
        return view and bool(node.uses) and node.name not in self.copying

    def _keep(self, node: Node, shared: list[Storage], extra: list[Storage]) -> None:
        storages: list[Storage] = []
        notes: list[SavedResult] = []
        for storage in {id(s): s for s in (*shared, *extra)}.values():
            note = self.notes.of(storage)
            if note is None:
                storages.append(self.heap.save(storage))
            else:
                self.notes.hold(note)
                notes.append(note)
        self.kept[node.name] = _Kept(storages, notes)

    def _reshard(self, node: Node) -> None:
        source, steps = self.values[node.uses[0]], self._pair(node).forward

        def run(source: Storage) -> Storage:
            size = DTYPES[node.outputs[0].dtype]
            number = self._number(node)
            return moved(self.heap, source, steps, self.parts.plan.mesh, number, size, self.staged)

        made = self.values[node.name] = run(source)
        if node.kwarg("again") and made is not source and any(node.needs_grad):
            self.notes.watch([made], [source], lambda read: [run(*read)])


__all__ = ["ForwardWalk"]
