"""A rank's program as text: every operator, and every collective of forward and backward with its axes and bytes."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshwright.core.graph import DTYPES, START, TO_HOST, TRANSFERS, WAIT, Graph, Node
from meshwright.core.layout import TensorLayout
from meshwright.partition import RESHARD, Partition
from meshwright.partition.accumulation import summed_first
from meshwright.partition.activation_offload import part_bytes
from meshwright.partition.buckets import Group
from meshwright.partition.insert_reshards import parse_steps
from meshwright.partition.interleave import original
from meshwright.partition.micro_batches import first_micro_batch
from meshwright.partition.parameter_offload import is_fetch
from meshwright.partition.stages import Stage
from meshwright.redistribute import Step, describe
from meshwright.redistribute.steps import show_bytes


@dataclass(frozen=True)
class ProgramText:
    """The text of a rank's local program.

    `buckets`: gradients that are reduced together. `gathers`: weights with sharded updates that are gathered together.
    """

    graph: Graph
    parts: Partition
    buckets: Sequence[Group]
    gathers: Sequence[Group] = ()
    rank: int = 0
    stages: Mapping[int, Stage] = field(default_factory=dict)  # of a pipeline, those of the rank

    @functools.cached_property
    def _held(self) -> frozenset[str]:
        return summed_first(self.parts)

    def __str__(self) -> str:
        lines = [f"program {self.graph.name} on {self.parts.plan.mesh} {{"]
        read = frozenset().union(*(stage.reads for stage in self.stages.values()))
        inputs = [i for i in self.graph.inputs if not self.stages or i.name in read]
        lines += [f"  {entry}  {self._layout(entry.name) or ''}".rstrip() for entry in inputs]
        for number, stage in self.stages.items():
            lines += self._stage(number, stage)
        lines += self._nodes(self.graph) if not self.stages else []
        if self.parts.micro_batches > 1:
            lines += self._around()
        for number, group in enumerate(self.buckets):
            lines.append(f"  reduce gradients, bucket {number}: {_members(group)}, {self._reduced(group)}")
        for number, group in enumerate(self.gathers):
            sent = f"all_gather({self.parts.plan.mesh.show(group.axes)}) {show_bytes(group.size_bytes)}"
            lines.append(f"  gather weights, bucket {number}: {_members(group)}, {sent}")
        return "\n".join([*lines, "}"])

    def _of_one(self, name: str) -> str:
        """Return the name of a value in the program of one half-batch."""
        for copy in range(self.parts.copies if self.parts.copies > 1 else 0):
            found = original(name, copy)
            if found != name and found in self.parts.resharded.layouts:
                return found
        return name

    def _layout(self, name: str) -> TensorLayout | None:
        return self.parts.resharded.layouts.get(self._of_one(name))

    def _stage(self, number: int, stage: Stage) -> list[str]:
        """Return the lines of one stage, with what it receives and sends; gradients go the other way."""
        graph = stage.segment.graph
        received = [f"    receive %{v}: {graph.types[v]} from stage {s}" for v, s in stage.takes.items()]
        sent = [
            f"    send %{v}: {graph.types[v]} to stage {', '.join(map(str, later))}"
            for v, later in stage.gives.items()
        ]
        return [f"  stage {number}", *received, *(f"  {line}" for line in self._nodes(graph)), *sent]

    def _reduced(self, group: Group) -> str:
        mesh, size = self.parts.plan.mesh, group.size_bytes
        if not group.parted:
            return f"all_reduce({mesh.show(group.axes)}) {show_bytes(size)}"
        steps = [f"reduce_scatter({mesh.show(group.cut)}) {show_bytes(size)}"] if group.cut else []
        part = show_bytes(size / mesh.count(group.cut))
        return " → ".join(
            [*steps, *([f"all_reduce({mesh.show(group.summed)}) {part}"] if group.summed else [])]
        )

    def _nodes(self, graph: Graph) -> list[str]:
        lines: list[str] = []
        for node in graph.nodes:
            if node.op in (RESHARD, WAIT):
                lines.append(f"  {self._reshard(node, graph)}")
            elif node.op == START:
                lines.append(f"  %{node.name} = start({', '.join(f'%{u}' for u in node.uses)})")
            elif node.op in TRANSFERS:
                lines.append(f"  {_transfer(node)}")
            else:
                layout = self._layout(node.values[0])
                head = str(node).partition("  {")[0]
                one = replace(node, name=self._of_one(node.name))
                head += "  on the host" if self.parts.on_host(one) else ""
                lines.append(f"  {head}" + (f"  {layout}" if layout is not None else ""))
            kept = (v for v in node.values if self._of_one(v) in self.parts.activations)
            lines += [f"    {self._kept(v, graph)}" for v in kept]
        return lines

    def _kept(self, value: str, graph: Graph) -> str:
        """Return how a value is saved for backward, if sharded or offloaded."""
        activation, mesh = self.parts.activations[self._of_one(value)], self.parts.plan.mesh
        itemsize = DTYPES[graph.types[value].dtype]
        size = show_bytes(part_bytes(activation, graph, value, mesh, self.rank))
        where = " in the host's memory" if activation.host else ""
        gather = " → ".join(describe(s, mesh, itemsize) for s in activation.gather)
        return f"%{value} kept as {size}{where}" + (f" | backward {gather}" if gather else "")

    def _around(self) -> list[str]:
        """Return what runs before and after the micro-batches."""
        programs = first_micro_batch(self.parts, self.rank)
        parts, lines = self.parts, list[str]()
        if parts.copies > 1:
            lines.append(f"  {parts.copies} copies of the batch that take turns")
        if parts.micro_batches > parts.copies:
            lines.append(f"  this {parts.micro_batches // parts.copies} times; the first is shown")
        for found in programs.rounds:
            lines += [
                "  before, added up over all of them:",
                *(f"  {x}" for x in self._nodes(found.terms[0])),
            ]
            lines += ["  before, once:", *(f"  {x}" for x in self._nodes(found.sums))]
        added = ", ".join(f"%{i.name}" for i in programs.late.inputs)
        return [
            *lines,
            f"  after the last, from the sums of {added}:",
            *(f"  {x}" for x in self._nodes(programs.late)),
        ]

    def _reshard(self, node: Node, graph: Graph) -> str:
        halves = node.args[1:3]
        if node.op == WAIT:
            halves = [half[node.args[1]] for half in graph.producers[node.uses[0]].args[1:3]]
        onward, back = map(parse_steps, halves)
        itemsize = DTYPES[node.outputs[0].dtype]

        def show(steps: Sequence[Step]) -> str:
            return " → ".join(describe(s, self.parts.plan.mesh, itemsize) for s in steps) or "identity"

        text = f"forward {show(onward)}"
        once = " once, of the sum over micro-batches" if self._of_one(node.name) in self._held else ""
        text += f" | backward {show(back)}{once}" if any(node.needs_grad) else ""
        text += f" | again in backward {show(onward)}" if node.kwarg("again") else ""
        what = "wait" if node.op == WAIT else "reshard"
        return f"%{node.name}: {node.outputs[0]} = {what}(%{node.uses[0]})  {text}"


def _members(group: Group) -> str:
    count = len(group.members)
    return f"{count} parameter{'s' if count > 1 else ''}"


def _transfer(node: Node) -> str:
    """Return the line of a copy to the host or back, with the gradient's the other way."""
    size = show_bytes(node.outputs[0].size_bytes)
    there, back = ("to_host", "to_device") if node.op == TO_HOST else ("to_device", "to_host")
    backward = f" | backward {back} {size}" if any(node.needs_grad) else ""
    if is_fetch(node):
        backward = f" | again in backward {there} {size}"
    return f"%{node.name}: {node.outputs[0]} = {there}(%{node.uses[0]})  forward {there} {size}{backward}"
