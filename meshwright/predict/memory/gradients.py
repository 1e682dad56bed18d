"""The memory of gradients: where they are accumulated, and where those of parameters stay until the update."""

from __future__ import annotations

from collections.abc import Collection

from meshwright.core.graph import Graph, Node
from meshwright.predict.memory.allocator import Heap, Storage
from meshwright.predict.memory.updates import UpdateMemory


class GradientMemory:
    """The gradients of one rank's step.

    `trained`: the parameters. `hosted`: those in host memory. `summed_first`: reshards whose gradients are accumulated
    over micro-batches before they are sent. `scattered_each_time`: buckets are reduced after each micro-batch.
    `pieces`: memory that holds the gradients of one flight one after the other.
    """

    def __init__(
        self,
        graph: Graph,
        heap: Heap,
        update_parts: UpdateMemory,
        *,
        trained: Collection[str],
        hosted: Collection[str],
        summed_first: Collection[str],
        scattered_each_time: bool,
        pieces: Collection[Storage],
    ) -> None:
        self.graph, self.heap, self.update_parts = graph, heap, update_parts
        self.trained, self.hosted, self.pieces = trained, hosted, pieces
        self.summed_first, self.scattered_each_time = summed_first, scattered_each_time
        self.placed: set[str] = set()  # parameters whose gradient goes into a bucket's buffer
        self.is_last = True  # whether the micro-batch is the last one, after which gradients are reduced
        self._arrived: dict[str, Storage] = {}
        self._held: dict[str, Storage] = {}  # gradients of the micro-batches before
        self.first_half = False  # of two halves of backward: what is scattered each time waits for the other
        self._waiting: dict[str, Storage] = {}
        # How often a parameter's gradient is still to arrive: once from each use.
        self._missing: dict[str, int] = {}

    def begin(self, is_last: bool) -> None:
        """Begin a micro-batch."""
        self.is_last = is_last
        self.update_parts.begin()
        self._missing = {n: len(self.graph.consumers[n]) for n in self.trained}

    def take(self, node: Node) -> list[Storage]:
        """Return the gradients that have arrived at a node's results."""
        return [self._arrived.pop(v) for v in node.values if v in self._arrived]

    def drop(self, names: Collection[str]) -> None:
        """Free the gradients that have arrived at some inputs, after they are sent."""
        for name in names:
            if name in self._arrived:
                self.heap.drop(self._arrived.pop(name))

    def finish(self) -> None:
        """End backward: no more gradients arrive."""
        self.first_half = False
        for name in [n for n in self._arrived if n in self.trained]:
            self._place(name)
        for name, gradient in self._waiting.items():
            self.update_parts.place(self.heap, name, gradient)
        self._waiting = {}
        if self.is_last or self.scattered_each_time:
            again = self.is_last and self.scattered_each_time
            self.update_parts.finish(self.heap, added=again)

    def summed(self, node: Node, gradient: Storage) -> Storage | None:
        """Return the gradient that a reshard sends back, with one more use.

        It includes the accumulated gradients of earlier micro-batches. It is None if it is kept for the last one.
        """
        if node.name not in self.summed_first:
            return self.heap.hold(gradient)
        total = self._held.pop(node.name, None) or self._new(node.name, "gradients")
        if self.is_last:
            return total
        self._held[node.name] = total
        return None

    def _new(self, name: str, category: str = "temporary") -> Storage:
        return self.heap.new(self.graph.types[name].size_bytes, category)

    def add(self, name: str, gradient: Storage) -> None:
        """Add an arriving gradient to a value's, in place if nothing else uses it."""
        self.heap.on_host = name in self.hosted
        held = self._arrived.get(name)
        if held is None:
            self._arrived[name] = gradient
        elif held.uses == 1:
            self.heap.drop(gradient)
        else:
            self._arrived[name] = self._new(name)
            self.heap.drop(held)
            self.heap.drop(gradient)
        if name in self.trained:
            self._missing[name] -= 1
            if not self._missing[name]:
                self._place(name)

    def _place(self, name: str) -> None:
        """Finish a parameter's gradient: it stays, or is copied into its bucket."""
        gradient = self._arrived.pop(name)
        self.heap.on_host = name in self.hosted
        if name in self._held:  # added in place
            self.heap.drop(gradient)
            gradient = self._held.pop(name)
        if name in self.placed:  # copied, or added to what is there
            self.heap.drop(gradient)
        elif self.update_parts.takes(name) and self.first_half and self.scattered_each_time:
            self._waiting[name] = self._of_its_own(name, gradient)
        elif self.update_parts.takes(name) and (self.is_last or self.scattered_each_time):
            self.update_parts.place(self.heap, name, gradient)
        elif not self.is_last:
            self._held[name] = self._of_its_own(name, gradient)
        else:
            self._of_its_own(name, gradient)

    def _of_its_own(self, name: str, gradient: Storage) -> Storage:
        """Return a gradient that stays, in memory that nothing else uses."""
        if gradient.uses == 1 or gradient in self.pieces:
            self.heap.rename(gradient, "gradients")
            return gradient
        made = self._new(name, "gradients")
        self.heap.drop(gradient)
        return made


__all__ = ["GradientMemory"]
