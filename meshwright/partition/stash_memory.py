"""The memory of values that are kept elsewhere than where they lie, as `runtime/stashes.py` has it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.graph import DTYPES, Graph
from meshwright.mesh import Mesh
from meshwright.partition.heap import Heap, Storage
from meshwright.partition.moves import moved
from meshwright.partition.notes import Call, Notes
from meshwright.partition.stashes import Stash, part_bytes, room_bytes, settled_before


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


class StashMemory:
    """What a rank keeps elsewhere. `apart`: the host's memory is not the device's."""

    def __init__(
        self,
        heap: Heap,
        notes: Notes,
        graph: Graph,
        stashes: Mapping[str, Stash],
        mesh: Mesh,
        rank: int,
        staged: bool,
        apart: bool,
    ) -> None:
        self.heap, self.notes, self.graph, self.stashes = heap, notes, graph, stashes
        self.mesh, self.rank, self.staged, self.apart = mesh, rank, staged, apart
        self.room_bytes = room_bytes(graph, stashes, mesh, rank)
        self.settled = settled_before(graph, stashes)
        self.parts: dict[str, Storage] = {}  # what is kept of values on the device
        self._leaving: deque[Storage] = deque()
        self._run: _Run | None = None

    def begin(self) -> None:
        """A forward pass begins."""
        self._run = None

    def keep(self, value: str, storage: Storage) -> None:
        """A value with memory of its own is kept as its stash says."""
        stash, heap = self.stashes[value], self.heap
        if self.notes.of(storage) is not None:
            return
        part = heap.new(part_bytes(stash, self.graph, value, self.mesh, self.rank)) if stash.slices else None
        if not stash.host:
            assert part is not None
            # Kept once more than the note holds it: what brings it back is the note's own function.
            self.notes.watch([storage], (), lambda _: [self._whole(value, heap.hold(part))], held=[part])
            self.parts[value] = part
            heap.drop(part)
            return
        if self._run is None or self._run.layer != stash.layer or self._run.opened:
            self._run = _Run(stash.layer, self._run)
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
        """All have left the device."""
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
        found = self._whole(value, part) if self.stashes[value].gather else part
        if not item.run.opened and item.run.before is not None:
            self._bring(item.run.before)
        item.run.opened = True
        return found

    def _whole(self, value: str, part: Storage) -> Storage:
        """A value put together from its parts, held once; the part goes."""
        size = DTYPES[self.graph.types[value].dtype]
        steps = self.stashes[value].gather
        made = moved(self.heap, part, steps, self.mesh, self.rank, size, self.staged)
        self.heap.drop(part)
        return made


__all__ = ["StashMemory"]
