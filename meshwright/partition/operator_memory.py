"""The memory of one operator while it runs: its results, what autograd keeps of it, and what it needs for a moment."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from meshwright.graph import DTYPES, Graph, Node
from meshwright.partition.heap import Heap, Storage
from meshwright.partition.notes import Notes
from meshwright.partition.workspace import gradients_of, workspace

DROPOUT = "meshwright.dropout"
TINY_BYTES = 256  # what an operator saves of its own and is no larger is kept (`runtime.again`)


class OperatorMemory:
    """The operators of a program. `values` has the memory of what is there, `again` names what backward computes
    again."""

    def __init__(
        self, heap: Heap, notes: Notes, graph: Graph, values: Mapping[str, Storage], again: Collection[str]
    ) -> None:
        self.heap, self.notes, self.graph, self.types = heap, notes, graph, graph.types
        self.values, self.again = values, again

    def computed(self, node: Node, extra_bytes: int) -> tuple[list[Storage], list[Storage]]:
        """The memory of an operator's results, and of what autograd keeps beside them, each held once."""
        heap = self.heap
        before, beside = workspace(node, self.types, [u in self.graph.needs_grad for u in node.uses])
        scratch = heap.new(before)
        made = [heap.new(t.size_bytes) for t in node.outputs]
        extra = [heap.new(extra_bytes)] if extra_bytes else []
        heap.passing(beside)
        heap.drop(scratch)
        return made, extra

    def watch(self, node: Node, made: list[Storage], extra: list[Storage], own: tuple[int, ...]) -> None:
        """The results of an operator that backward computes again, and what autograd keeps of it: its `own` results and
        something `extra`."""
        read = [self.values[u] for u in node.uses]
        if node.op == DROPOUT and extra:  # its mask is drawn apart
            (mask,) = extra
            self.notes.watch(extra, (), lambda _: [self._drawn(node, mask.size_bytes)])
            self.notes.watch(made, [*read, mask], lambda _: self.computed(node, 0)[0])
            return
        large = [s for s in extra if s.size_bytes > TINY_BYTES]
        mine = [
            k
            for k, (v, s) in enumerate(zip(node.values, made, strict=True))
            if v in self.again or (k in own and s.size_bytes > TINY_BYTES)
        ]

        def run(_: list[Storage]) -> list[Storage]:
            results, beside = self.computed(node, sum(s.size_bytes for s in large))
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

    def gradients(
        self, node: Node, arrived: Sequence[Storage], wanted: Sequence[bool]
    ) -> list[tuple[str, Storage]]:
        """The gradients of those inputs that are `wanted`, by value."""
        found: list[tuple[str, Storage]] = []
        plan = gradients_of(node, self.types, wanted)
        scratch = self.heap.new(plan.before)
        for port, size in plan.made:
            made = self.heap.hold(arrived[0]) if size is None else self.heap.new(size)
            found.append((node.uses[port], made))
        self.heap.passing(plan.beside)
        self.heap.drop(scratch)
        return found


__all__ = ["OperatorMemory"]
