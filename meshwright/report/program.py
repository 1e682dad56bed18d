"""A rank's program as text: every operator, every collective of forward and backward with its axis and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.graph import DTYPES, Graph, Node
from meshwright.partition import RESHARD, Partition
from meshwright.redistribute import Step, describe
from meshwright.redistribute.steps import show_bytes


@dataclass(frozen=True)
class ProgramText:
    """Prints a local program. `buckets`: (axes, gradients, bytes) of each gradient reduction."""

    graph: Graph
    parts: Partition
    buckets: Sequence[tuple[tuple[str, ...], int, int]]

    def __str__(self) -> str:
        lines = [f"program {self.graph.name} on {self.parts.plan.mesh} {{"]
        lines += [f"  {entry}  {self.parts.resharded.layouts[entry.name]}" for entry in self.graph.inputs]
        for node in self.graph.nodes:
            if node.op == RESHARD:
                lines.append(f"  {self._reshard(node)}")
            else:
                layout = self.parts.resharded.layouts.get(node.values[0])
                head = str(node).partition("  {")[0]
                lines.append(f"  {head}" + (f"  {layout}" if layout is not None else ""))
        for number, (axes, count, size) in enumerate(self.buckets):
            lines.append(
                f"  reduce gradients, bucket {number}: {count} parameters, "
                f"all_reduce({self.parts.plan.mesh.show(axes)}) {show_bytes(size)}"
            )
        return "\n".join([*lines, "}"])

    def _reshard(self, node: Node) -> str:
        pair = self.parts.resharded.pairs[node.name]
        itemsize = DTYPES[node.outputs[0].dtype]

        def show(steps: Sequence[Step]) -> str:
            return " → ".join(describe(s, self.parts.plan.mesh, itemsize) for s in steps) or "identity"

        halves = f"forward {show(pair.forward)}"
        halves += f" | backward {show(pair.backward)}" if any(node.needs_grad) else ""
        halves += f" | again in backward {show(pair.forward)}" if node.kwarg("again") else ""
        return f"%{node.name}: {node.outputs[0]} = reshard(%{node.uses[0]})  {halves}"
