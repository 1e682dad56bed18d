"""The most bytes that live at once on a rank in a step, by walking its program as the runtime runs it.

Forward frees a value after its last use unless autograd keeps it (`cost/saved.py`); views share the memory of their
base; backward goes through the same nodes in reverse, adds up gradients where a value is read more than once and lets
go of what each operator kept. Parameters' gradients stay (or go into the buckets' buffers, which are there from the
start) until the update. Nothing is run: sizes are those of the local graph.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from meshwright.cost.operators import PIECES, REPEATS, VIEWS
from meshwright.cost.saved import saved
from meshwright.cost.strides import copying_views
from meshwright.graph import DTYPES, RESHARD, START, TO_HOST, TRANSFERS, WAIT, Graph, Node
from meshwright.partition import Partition
from meshwright.partition.accumulation import scattered_each_time, summed_first
from meshwright.partition.fetch_memory import FetchMemory
from meshwright.partition.fetches import is_fetch
from meshwright.partition.flight_memory import FlightMemory
from meshwright.partition.fusion import gradient_bytes
from meshwright.partition.gradient_memory import GradientMemory
from meshwright.partition.gradients import pending_gradients
from meshwright.partition.halves import ADDMM
from meshwright.partition.heap import Heap, Storage
from meshwright.partition.interleave import in_copies, of_one, original
from meshwright.partition.keeps import AGAIN, keeps_of
from meshwright.partition.micro_batches import first_program
from meshwright.partition.moves import moved
from meshwright.partition.notes import Held, Notes
from meshwright.partition.peaks import ADAMW, ADAMW_FOREACH, ADAMW_FUSED, Optimizer, Peak, optimizer_on
from meshwright.partition.reshards import backward_itemsize
from meshwright.partition.stages import check_one_stage
from meshwright.partition.stash_memory import StashMemory
from meshwright.partition.update_memory import UpdateMemory
from meshwright.partition.workspace import gradients_of, workspace
from meshwright.redistribute import Reshard
from meshwright.redistribute.buckets import BucketBytes, Group, fill

DROPOUT = "meshwright.dropout"
TINY_BYTES = 256  # what an operator saves of its own and is no larger is kept (`runtime.again`)


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
    """The peak of a rank's step. `device` decides, as in the runtime, which gradients are reduced where they lie.

    `staged`: whether all that is scattered comes before it is added up (`wires.py`; by default on a CPU).
    `apart`: whether the host's memory is counted apart (by default where it is not the device's).
    """
    check_one_stage(parts.plan, "the peak")
    staged = device == "cpu" if staged is None else staged
    return StepWalk(parts, rank, optimizer, device, bucket_bytes, staged, apart).run()


@dataclass
class _Kept:
    """What autograd keeps of one node."""

    storages: list[Storage]
    notes: list[Held]


class StepWalk:
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
    ) -> None:
        """`stage`: the program of one stage of a pipeline, in place of the whole."""
        self.staged = staged
        self.parts, self.rank, self.optimizer = parts, rank, optimizer
        together = first_program(parts, rank) if parts.copies > 1 else None  # all of them live at once
        self.graph: Graph = stage or (parts.local(rank) if together is None else together.graph)
        self.copy_of = {} if together is None else together.copy_of
        self.types = self.graph.types
        self.copying = copying_views(self.graph)
        self.heap = Heap()
        self.values: dict[str, Storage] = {}
        self.kept: dict[str, _Kept] = {}
        self.queue: list[tuple[Node, list[Storage], Storage]] = []  # linears with what their weights need
        self.notes = Notes(self.heap)
        keeps = keeps_of(self.graph, in_copies(parts.resharded.keeps, parts.copies))
        self.again = {v for v, how in keeps.items() if how == AGAIN}
        self.apart = device != "cpu" if apart is None else apart  # the device's memory is not the host's
        self.stashes = StashMemory(
            self.heap,
            self.notes,
            self.graph,
            in_copies(parts.stashes, parts.copies),
            parts.plan.mesh,
            rank,
            staged,
            self.apart,
        )
        self.fetches = FetchMemory(self.heap, self.notes, self.graph)
        self.parked = parts.resharded.parked
        self.trained = {i.name for i in self.graph.inputs if i.role == "parameter" and i.needs_grad}
        self.offloaded = "optimizer" in parts.plan.techniques.offload
        described = pending_gradients(parts)
        size = gradient_bytes(parts.plan) if bucket_bytes is None else bucket_bytes
        groups = fill(described, device, size)
        self.groups = groups if stage is None else _of_stage(groups, self.trained)
        mine = None if stage is None else self.trained
        self.update_parts = UpdateMemory(parts, rank, self.groups, bucket_bytes, staged, device, mine)
        self.hosted = parts.resharded.hosted if self.apart else frozenset()
        self.flights = FlightMemory(
            self.graph, self.heap, self.notes, self._pair, parts.plan.mesh, self._number, staged
        )
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
        self.on_host = {
            n.name for n in self.graph.nodes if self.apart and parts.on_host(of_one(n, self.copy_of))
        }

    def run(self) -> Peak:
        self.start()
        # Of micro-batches the first, and one that finds the gradients of others, tell what all of them need.
        for is_last in (False, True) if self.parts.micro_batches > self.parts.copies else (True,):
            self.gradients.begin(is_last)
            self.forward()
            self.backward()
        self.update()
        heap = self.heap
        return Peak(heap.peak, heap.instant, heap.at_peak, tuple(heap.timeline), heap.host_peak)

    # ------------------------------------------------------------ start

    def start(self) -> None:
        """What lives all the time."""
        self.heap.at("start")
        batch = {}
        for whole in self.parts.resharded.graph.input_of("batch"):
            self.heap.on_host = whole.name in self.hosted
            batch[whole.name] = self.heap.new(whole.type.size_bytes, "batch")
        for entry in self.graph.inputs:
            self.heap.on_host = entry.name in self.hosted or (self.apart and entry.name in self.parked)
            match entry.role:
                case "parameter":
                    self.values[entry.name] = self.heap.new(entry.type.size_bytes, "parameters")
                case "batch":  # every rank is given the whole batch and looks at its part
                    self.values[entry.name] = batch[self._of_one(entry.name)]
                case _:
                    self.values[entry.name] = self.heap.new(entry.type.size_bytes, "buffers")
        for self.heap.on_host in (True, False):
            mine = (n for n in self.trained if self._updated_on_host(n) == self.heap.on_host)
            trained = sum(self.updated_bytes(n) for n in mine)
            self.heap.new(trained * self.optimizer.states, "optimizer")
        self.heap.on_host = self.apart
        if self.offloaded:  # a copy of what is updated lies beside the states
            mine = (n for n in self.trained if n not in self.parked)  # which are updated where they lie
            self.heap.new(sum(self.updated_bytes(n) for n in mine), "optimizer")
        self.heap.on_host = False
        self.heap.new(self.update_parts.copied_bytes(), "optimizer")
        for group in self.groups:
            self.heap.on_host = group.members[0].name in self.hosted
            if not group.alone and not group.parted:
                self.gradients.placed.update(g.name for g in group.members)
                self.heap.new(sum(g.on_wire(self.types[g.name].size_bytes) for g in group.members), "buckets")

    def _of_one(self, name: str) -> str:
        """What a value of a copy is called in the program of one."""
        return original(name, self.copy_of[name]) if name in self.copy_of else name

    def _pair(self, reshard: Node) -> Reshard:
        return self.parts.resharded.pairs[self._of_one(reshard.name)]

    def _number(self, node: Node) -> int:
        """This rank's number on the plan's mesh in the copy that a node is of: copies may be of several sizes."""
        return self.parts.of_rank(self.rank)[self.copy_of.get(node.name, 0)] if self.copy_of else self.rank

    def _updated_on_host(self, name: str) -> bool:
        """Whether a parameter's states, and what its update needs, are in another memory than the device's."""
        return name in self.hosted or (self.offloaded and self.apart)

    def updated_bytes(self, name: str) -> int:
        """Bytes of what the rank updates of a parameter."""
        part = self.update_parts.part_bytes(name)
        return self.types[name].size_bytes if part is None else part

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
            self.heap.at(f"{node.name}, forward")
            if node.name == self.stashes.settled:
                self.stashes.settle()
            self._run(node)
            self._stash(node)
            for value in ends.get(number, ()):
                if value in self.graph.producers:
                    self.heap.drop(self.values[value])
                    self.notes.dropped(self.values[value])

    def _stash(self, node: Node) -> None:
        """What a node makes, and is kept elsewhere than where it lies; a view is kept with what it lies in."""
        shares = node.op not in (RESHARD, WAIT) and self._shares(node)
        for value in node.values:
            if value in self.stashes.stashes and not shares:
                self.stashes.keep(value, self.values[value])

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
            kept = saved(node, self.types, [u in self.graph.needs_grad for u in node.uses])
            made, extra = self._computed(node, kept.extra_bytes)
        else:
            kept = None
            made = [heap.hold(self.values[node.uses[0]]) for _ in node.outputs]
        self.values.update(zip(node.values, made, strict=True))
        if kept is not None and not self.again.isdisjoint(node.values):
            self._watch(node, made, extra, kept.outputs)
        if kept is not None and any(node.needs_grad):
            names = [node.uses[p] for p in kept.inputs] + [node.values[o] for o in kept.outputs]
            self._keep(node, [self.values[n] for n in names], extra)
        for storage in extra:
            heap.drop(storage)
            self.notes.dropped(storage)

    def _computed(self, node: Node, extra_bytes: int) -> tuple[list[Storage], list[Storage]]:
        """The memory of an operator's results, and of what autograd keeps beside them, each held once."""
        heap = self.heap
        before, beside = workspace(node, self.types, [u in self.graph.needs_grad for u in node.uses])
        scratch = heap.new(before)
        made = [heap.new(t.size_bytes) for t in node.outputs]
        extra = [heap.new(extra_bytes)] if extra_bytes else []
        heap.passing(beside)
        heap.drop(scratch)
        return made, extra

    def _watch(self, node: Node, made: list[Storage], extra: list[Storage], own: tuple[int, ...]) -> None:
        """The results of an operator that backward computes again, and what autograd keeps of it: its `own` results and
        something `extra`."""
        read = [self.values[u] for u in node.uses]
        if node.op == DROPOUT and extra:  # its mask is drawn apart
            (mask,) = extra
            self.notes.watch(extra, (), lambda _: [self._drawn(node, mask.size_bytes)])
            self.notes.watch(made, [*read, mask], lambda _: self._computed(node, 0)[0])
            return
        large = [s for s in extra if s.size_bytes > TINY_BYTES]
        mine = [
            k
            for k, (v, s) in enumerate(zip(node.values, made, strict=True))
            if v in self.again or (k in own and s.size_bytes > TINY_BYTES)
        ]

        def run(_: list[Storage]) -> list[Storage]:
            results, beside = self._computed(node, sum(s.size_bytes for s in large))
            for k, storage in enumerate(results):
                if k not in mine:
                    self.heap.drop(storage)
            return [*(results[k] for k in mine), *beside]

        self.notes.watch([*(made[k] for k in mine), *large], read, run)

    def _drawn(self, node: Node, size_bytes: int) -> Storage:
        """A mask, by uniform numbers in f32."""
        numbers = self.heap.new(DTYPES["f32"] * size_bytes)
        mask = self.heap.new(size_bytes)
        self.heap.drop(numbers)
        return mask

    def _crossed(self, node: Node, source: Storage, host: bool) -> Storage:
        """A copy on the other side of the link; the memory itself where there is none."""
        self.heap.on_host = host and self.apart
        return self.heap.new(self.types[node.name].size_bytes) if self.apart else self.heap.hold(source)

    def _shares(self, node: Node) -> bool:
        """Whether the results lie in the memory of the first input."""
        view = node.op in VIEWS or node.op in REPEATS or node.op in PIECES
        return view and bool(node.uses) and node.name not in self.copying

    def _keep(self, node: Node, shared: list[Storage], extra: list[Storage]) -> None:
        storages: list[Storage] = []
        notes: list[Held] = []
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

    # ------------------------------------------------------------ backward

    def backward(self, halves: Collection[str] = ()) -> None:
        """Of the linears in `halves`, what their weights need waits for `drain`."""
        heap, graph = self.heap, self.graph
        heap.on_host = False
        heap.at("loss, backward")
        for _, value in graph.outputs:
            if value in graph.needs_grad:
                self.gradients.add(value, heap.new(self.types[value].size_bytes))
        self._back(halves)
        if not halves:
            self.gradients.finish()

    def drain(self) -> None:
        """What waited. All weights' gradients are there before the first goes on to its parameter."""
        heap = self.heap
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
        """Make again what was not kept."""
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
        """The gradients that an operator makes, by the value they belong to."""
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
            return [(node.uses[0], made)]
        if node.op == WAIT:
            return [(node.uses[0], self.flights.give_back(node, self.gradients.summed(node, arrived[0])))]
        if node.op == START:
            return self.flights.land(node)
        found: list[tuple[str, Storage]] = []
        plan = gradients_of(node, self.types, wanted)
        scratch = self.heap.new(plan.before)
        for port, size in plan.made:
            made = self.heap.hold(arrived[0]) if size is None else self.heap.new(size)
            found.append((node.uses[port], made))
        self.heap.passing(plan.beside)
        self.heap.drop(scratch)
        return found

    # ------------------------------------------------------------ update

    def update(self) -> None:
        self.heap.at("update")
        self.heap.on_host = False
        sizes = [self.updated_bytes(n) for n in self.trained if not self._updated_on_host(n)]
        present = 0 if self.offloaded else sum(self.updated_bytes(n) for n in self.trained & self.parked)
        weights = self.heap.new(present)  # copies of parked weights on the device
        if sizes:
            copied = sum(sizes) if self.optimizer.at_once else max(sizes)
            self.heap.passing(copied * self.optimizer.temporaries)
        self.heap.drop(weights)
        self.heap.at("gather, update")
        self.update_parts.gather(self.heap)


def _port(node: Node) -> int:
    """Which input of a linear is no weight."""
    return int(node.op == ADDMM)


def _of_stage(groups: Sequence[Group], held: Collection[str]) -> tuple[Group, ...]:
    """The groups of gradients without those that a stage does not have."""
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
