"""A step in micro-batches: what runs before, between and after their forward and backward passes.

Gradients add up where they will be reduced, in the backward of the last micro-batch or of each. The sums
that every micro-batch divides by are there before the first forward; the loss is added up from its terms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from meshwright.core.graph import RESHARD, START, Graph
from meshwright.core.mesh import Mesh
from meshwright.partition.interleave import named
from meshwright.partition.micro_batches import MicroBatches
from meshwright.partition.segments import Segment
from meshwright.pipeline.actions import Action
from meshwright.runtime.executor import Executor
from meshwright.runtime.local_batch import Given
from meshwright.runtime.overlap import Start

Batch = Mapping[str, torch.Tensor]
# From a graph (and the flights that its earlier segments have started) to what runs it where the rank is now.
Build = Callable[..., Callable[..., Any]]
Program = tuple[tuple[Segment, ...], list[Callable[..., Any]]]


def actions_in_time(rounds: int, micro_batches: int, segments: int, copies: int = 1) -> tuple[Action, ...]:
    """The sums first; then forward and backward of one program after the other, results, reduction and update.
    `micro_batches` counts all of them, `copies` those that run as one program."""
    found = [Action("begin")]
    for number in range(rounds):
        found += [Action("terms", number, m) for m in range(micro_batches)]
        found.append(Action("sums", number))
    for m in range(micro_batches // copies):
        found.append(Action("enter", 0, m))
        found += [Action("forward", s, m) for s in range(segments)]
        found += [Action("backward", s, m) for s in reversed(range(segments))]
        found.append(Action("leave", 0, m))
    return (*found, Action("late"), Action("reduce_wait"), Action("update"))


def modules_in_time(
    programs: Sequence[tuple[Segment, ...]],
    mesh: Mesh,
    enter: Callable[[int], None],
    build: Build,
    copies: int = 1,
) -> list[Program]:
    """The modules of the segments of each micro-batch, built once for all that run the same. `enter` puts the rank into
    a micro-batch."""
    found: list[Program] = []
    for number, segments in enumerate(programs):
        if number and any(_knows_time(s.graph, mesh) for s in segments):
            same = None
        else:
            same = next((n for n in range(number) if programs[n] == segments), None)
        if same is not None:
            found.append(found[same])
            continue
        enter(number * copies)
        starts = dict[str, Start]()
        found.append((segments, [build(s.graph, starts=starts) for s in segments]))
    enter(0)
    return found


def _knows_time(graph: Graph, mesh: Mesh) -> bool:
    """Whether a reshard does something else in each micro-batch: takes its slice, or masks a term."""
    found = [half for n in graph.nodes if n.op == RESHARD for half in n.args[1:3]]
    found += [one for n in graph.nodes if n.op == START for half in n.args[1:3] for one in half]
    return any(not set(mesh.time).isdisjoint(axes.split(".")) for half in found for _, axes, _, _ in half)


class InTime:
    """The state of a step between its micro-batches. It adds its kinds of actions to an executor."""

    def __init__(
        self,
        parts: MicroBatches,
        executor: Executor,
        enter: Callable[[int], None],
        build: Build,
        inputs: Sequence[Callable[[Given], Batch]],
    ) -> None:
        """`inputs`: for each micro-batch, from the batch of a step to what its program reads."""
        self.parts, self.executor, self.put, self.inputs = parts, executor, enter, inputs
        self.copies = len(inputs) // len(parts.programs)
        self.terms = [self._each(r.terms, build) for r in parts.rounds]
        self.sums = [build(r.sums) for r in parts.rounds]
        self.late = build(parts.late)
        self.results: frozenset[str] = frozenset()  # what is kept of each micro-batch
        self.pieces: dict[tuple[str, int], torch.Tensor] = {}  # (value, micro-batch) → a result
        self.batch: Given = {}
        self.shared: dict[str, torch.Tensor] = {}  # what all micro-batches read: sums, and buffers handed on
        self._added: dict[str, torch.Tensor] = {}  # terms so far
        executor.kinds |= {
            "terms": self._terms,
            "sums": self._sums,
            "enter": self._enter,
            "leave": self._leave,
            "late": self._late,
        }

    def _each(self, graphs: Sequence[Graph], build: Build) -> list[Callable[..., Any]]:
        found = []
        for number, graph in enumerate(graphs):
            self.put(number)
            found.append(build(graph))
        self.put(0)
        return found

    def begin(self, batch: Given) -> None:
        """Take the batch of a step."""
        self.batch, self.shared, self._added, self.pieces = batch, {}, {}, {}

    def end(self) -> None:
        """Let go of the batch and of all values."""
        self.begin({})
        self.put(0)

    def _arguments(self, graph: Graph, values: Batch) -> list[torch.Tensor]:
        leaves = self.executor.leaves
        return [values[i.name] if i.name in values else leaves[i.name] for i in graph.inputs]

    def add(self, name: str, term: torch.Tensor) -> None:
        """One more term of a sum over micro-batches."""
        before = self._added.get(name)
        self._added[name] = term.detach() if before is None else before + term.detach()

    def keep(self, made: Mapping[str, torch.Tensor], program: int) -> None:
        """Keep what a program has made of the results, each copy's apart where it has copies."""
        for copy in range(self.copies):
            number = program * self.copies + copy
            for value in self.results:
                name = named(value, copy) if self.copies > 1 else value
                found = made.get(name, made.get(value))
                if found is not None:
                    self.pieces[value, number] = found.detach()

    def _terms(self, action: Action) -> None:
        number, m = action.stage, action.micro_batch
        self.put(m)
        graph = self.parts.rounds[number].terms[m]
        values = {**self.shared, **self.inputs[m](self.batch)}
        with torch.no_grad():
            found = self.terms[number][m](*self._arguments(graph, values))
        for (name, _), term in zip(graph.outputs, found, strict=True):
            self.add(name, term)

    def _sums(self, action: Action) -> None:
        graph = self.parts.rounds[action.stage].sums
        with torch.no_grad():
            found = self.sums[action.stage](*self._arguments(graph, self._added))
        self.shared |= {name: value for (name, _), value in zip(graph.outputs, found, strict=True)}

    def _enter(self, action: Action) -> None:
        self.put(action.micro_batch * self.copies)
        self.executor.buckets.enter(action.micro_batch)
        self.executor.values = self.given(action.micro_batch)

    def given(self, program: int) -> dict[str, torch.Tensor]:
        """What a program reads beside parameters and buffers: its part of the batch, and what all of them read."""
        found = dict(self.shared)
        for copy in range(self.copies):
            mine = self.inputs[program * self.copies + copy](self.batch)
            found |= mine if self.copies == 1 else {named(k, copy): v for k, v in mine.items()}
        return found

    def _leave(self, action: Action) -> None:
        values = self.executor.values
        for entry in self.parts.late.inputs:
            self.add(entry.name, self.executor.value(entry.name))
        for name, value in self.parts.carried:
            self.shared[name] = self.executor.value(value).detach()
        self.keep(values, action.micro_batch)
        self.executor.forget()
        if action.micro_batch + 1 < len(self.parts.programs):
            self.executor.buckets.finish()
        else:
            self.executor.values = {k: v.detach() for k, v in values.items()}

    def _late(self, action: Action) -> None:
        graph = self.parts.late
        with torch.no_grad():
            found = self.late(*self._arguments(graph, self._added))
        self.executor.values |= {name: value for (name, _), value in zip(graph.outputs, found, strict=True)}
