"""The memory of flights: those under way, those that backward repeats, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from meshwright.core.graph import DTYPES, Graph, Node
from meshwright.core.mesh import Mesh
from meshwright.partition.insert_reshards import backward_itemsize
from meshwright.partition.overlap import members_of
from meshwright.predict.memory.allocator import Heap, Storage
from meshwright.predict.memory.messages import Crossing, own_part
from meshwright.predict.memory.recompute import Notes, SavedResult
from meshwright.redistribute import Reshard


@dataclass(eq=False)
class _Once:
    """The part of a flight that backward repeats: its waits with their sources, and the flight before it.

    `sources` are its inputs, which live until its last wait. `notes` are those that have to be recomputed first.
    """

    before: _Once | None
    ahead: int  # flights before it that start with its first result
    sources: list[Storage]
    notes: list[SavedResult]
    waits: list[tuple[Node, Storage, SavedResult]] = field(default_factory=list)
    crossing: Crossing | None = None
    opened: bool = False


class FlightMemory:
    """The flights of one rank's program.

    `pair` returns the steps of a reshard, and `number` the rank's number on the mesh for the half-batch of a node.
    `staged`: see `messages.moved`.
    """

    def __init__(
        self,
        graph: Graph,
        heap: Heap,
        notes: Notes,
        pair: Callable[[Node], Reshard],
        mesh: Mesh,
        number: Callable[[Node], int],
        staged: bool,
    ) -> None:
        self.graph, self.heap, self.notes, self.pair = graph, heap, notes, pair
        self.mesh, self.number, self.staged = mesh, number, staged
        self.pieces: set[Storage] = set()  # in which gradients of one flight lie behind one another
        self._under_way: dict[str, Crossing] = {}  # start → its flight forward
        self._coming: dict[str, Crossing] = {}  # start → its flight backward
        self._held_back: set[str] = set()  # starts whose gradients are not sent now
        self._once: dict[str, _Once] = {}
        self._latest: _Once | None = None

    def _crossing(self, members: Sequence[Node], *, back: bool = False) -> Crossing:
        pairs = [self.pair(m) for m in members]
        ways = [p.backward if back else p.forward for p in pairs]
        size = backward_itemsize(members[0]) if back else DTYPES[members[0].outputs[0].dtype]
        return Crossing(self.heap, ways, self.mesh, self.number(members[0]), size, self.staged)

    # ------------------------------------------------------------ forward

    def start(self, node: Node, sources: Sequence[Storage]) -> None:
        """Start a flight, and record what backward will repeat of it."""
        crossing = self._under_way[node.name] = self._crossing(members_of(self.graph, node))
        for index, source in enumerate(sources):
            crossing.give(index, source)
        crossing.launch()
        if node.kwarg("again"):
            notes = [n for i in node.kwarg("again") if (n := self.notes.of(sources[i])) is not None]
            for note in notes:
                self.notes.hold(note)
            mine = [self.heap.hold(source) for source in sources]
            self._latest = self._once[node.name] = _Once(self._latest, node.kwarg("ahead", 1), mine, notes)

    def wait(self, node: Node, source: Storage) -> Storage:
        """Return the memory that a wait takes from its flight, to which `source` went."""
        (start,), index = node.uses, node.args[1]
        made = self._under_way[start].take(index)
        once = self._once.get(start)
        if once is not None and node.kwarg("again"):
            place = len(once.waits)
            call = self.notes.watch([made], [source], lambda _: [self._taken(once, place)])
            once.waits.append((node, source, (call, 0)))
        if once is not None and index == len(once.sources) - 1:
            for storage in once.sources:
                self.heap.drop(storage)
                self.notes.dropped(storage)
        return made

    def _taken(self, once: _Once, place: int) -> Storage:
        """Return the memory that a wait takes from a repeated flight, and start the flights before it."""
        self._bring(once)
        assert once.crossing is not None
        made = once.crossing.take(place)
        before, ahead = once.before, 0 if once.opened else once.ahead
        while before is not None and ahead:
            if any(any(c.uses) for _, _, (c, _) in before.waits):
                self._bring(before)
            before, ahead = before.before, ahead - 1
        once.opened = True
        return made

    def _bring(self, once: _Once) -> None:
        """Repeat a flight, after its inputs are recomputed."""
        if once.crossing is None:
            once.crossing = self._crossing([node for node, _, _ in once.waits])
            for index, (_, source, _) in enumerate(once.waits):
                once.crossing.give(index, self.notes.opened(source))
            for note in once.notes:
                self.notes.release(note)
            once.crossing.launch()

    # ------------------------------------------------------------ backward

    def give_back(self, wait: Node, gradient: Storage | None) -> Storage:
        """Send a gradient into its flight, which starts when all are there (None: not sent now).

        Returns the gradient of the token.
        """
        (start,), index = wait.uses, wait.args[1]
        if gradient is None:
            self._held_back.add(start)
            return self.heap.new(0)
        if start not in self._coming:
            members = members_of(self.graph, self.graph.producers[start])
            self._coming[start] = self._crossing(members, back=True)
        self._coming[start].give(index, gradient)
        self.heap.drop(gradient)
        if not index:
            self._coming[start].launch()
        return self.heap.new(0)

    def land(self, start: Node) -> list[tuple[str, Storage]]:
        """Return the gradients that arrive from a flight, by value; empty if they were not sent, or none was given:
        a tensor that is only compared or detached has no gradient."""
        back = self._coming.pop(start.name, None)
        held_back = start.name in self._held_back
        self._held_back.discard(start.name)
        if held_back or back is None:
            return []
        if not back.launched:  # the first tensor has no gradient: zeros go for it
            back.launch()
        taken = {i: self._kept(name, back, i) for i, name in enumerate(start.uses) if i in back.given}
        for index in set(range(len(start.uses))) - back.given:
            back.drop(index)
        arrived = list(taken.values())
        self.pieces.update(s for s in arrived if arrived.count(s) > 1)
        return [(start.uses[index], gradient) for index, gradient in taken.items()]

    def _kept(self, name: str, back: Crossing, index: int) -> Storage:
        gradient = back.take(index)
        if name in self.graph.producers or back.sent[index] is not None:
            return gradient
        return own_part(self.heap, gradient, back.early[index], self.graph.types[name].size_bytes)


__all__ = ["FlightMemory"]
