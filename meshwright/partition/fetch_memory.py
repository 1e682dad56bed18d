"""The memory of parameters that are brought from the host for their uses, as `runtime/fetches.py` has it."""

from __future__ import annotations

from meshwright.graph import Graph, Node
from meshwright.partition.fetches import fetch_runs
from meshwright.partition.heap import Heap, Storage
from meshwright.partition.notes import Call, Notes


class FetchMemory:
    """What a rank brings of parked parameters."""

    def __init__(self, heap: Heap, notes: Notes, graph: Graph) -> None:
        self.heap, self.notes, self.graph = heap, notes, graph
        self.runs = fetch_runs(graph)
        self._run_of = {name: number for number, run in enumerate(self.runs) for name in run}
        self._ahead: dict[str, Storage] = {}  # brought, and not taken yet
        self._left: set[str] = set()  # still to be taken in this forward pass
        self._calls: dict[str, Call] = {}
        self._opened: set[int] = set()

    def begin(self) -> None:
        """A forward pass begins."""
        self._left, self._opened = set(self._run_of), set()

    def take(self, node: Node) -> Storage:
        """What a transfer brings in forward, held once."""
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


__all__ = ["FetchMemory"]
