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
from meshwright.partition.stages import Stage
from meshwright.pipeline.actions import BACKWARD, FORWARD, Action
from meshwright.runtime.local_batch import Given
from meshwright.runtime.overlap import Start

Batch = Mapping[str, torch.Tensor]
# From a graph (and the flights that its earlier segments have started) to what runs it where the rank is now.
Build = Callable[..., Callable[..., Any]]
Segments = tuple[tuple[Segment, ...], list[Callable[..., Any]]]  # those of a micro-batch, and their modules


def step_actions(
    in_time: MicroBatches, micro_batches: int, order: Sequence[Action], ends: Sequence[str]
) -> tuple[Action, ...]:
    """The list of a rank: the sums first, then forward and backward in an order, then how a step ends."""
    found = [Action("begin")]
    for number in range(len(in_time.rounds)):
        found += [Action("terms", number, m) for m in range(micro_batches)]
        found.append(Action("sums", number))
    return (*found, *order, *(Action(kind) for kind in ends))


def order_of_one_rank(stages: int, programs: int, *, training: bool = True) -> list[Action]:
    """Forward and backward of one program after the other, through all stages: those of a rank without a pipeline."""
    found: list[Action] = []
    for m in range(programs):
        found += [Action(FORWARD, s, m) for s in range(stages)]
        if training:
            found += [Action(BACKWARD, s, m) for s in reversed(range(stages))]
    return found


def modules_in_time(
    programs: Sequence[tuple[Segment, ...]],
    mesh: Mesh,
    enter: Callable[[int], None],
    build: Build,
    copies: int = 1,
) -> list[Segments]:
    """The modules of the segments of each micro-batch, built once for all that run the same. `enter` puts the rank into
    a micro-batch."""
    found: list[Segments] = []
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
    """Return whether a reshard differs between micro-batches: it takes another slice, or masks a term."""
    found = [half for n in graph.nodes if n.op == RESHARD for half in n.args[1:3]]
    found += [one for n in graph.nodes if n.op == START for half in n.args[1:3] for one in half]
    return any(not set(mesh.time).isdisjoint(axes.split(".")) for half in found for _, axes, _, _ in half)


class StepBatch:
    """The batch of a step: what each micro-batch reads of it, and what remains of each.

    `values`: results of the step, by name. `pieces`: (value, micro-batch) → a result of one of them. `shared`: what all
    micro-batches read: sums, and buffers handed on. `kinds`: the actions before and after the micro-batches.
    """

    def __init__(
        self,
        in_time: MicroBatches,
        leaves: Batch,
        enter: Callable[[int], None],
        build: Build,
        inputs: Sequence[Callable[[Given], Batch]],
        results: frozenset[str],
    ) -> None:
        """`enter` puts the rank into a micro-batch. `inputs`: for each one, from the batch of a step to what it
        reads. `results`: the values that are kept of each."""
        self.in_time, self.leaves, self.put, self.inputs = in_time, leaves, enter, inputs
        self.results = results
        self.copies = len(inputs) // len(in_time.programs)
        self._terms = [self._each(r.terms, build) for r in in_time.rounds]
        self._sums = [build(r.sums) for r in in_time.rounds]
        self._late = build(in_time.late) if in_time.late.outputs else None
        self.begin({})
        self.kinds: dict[str, Callable[[Action], None]] = {
            "terms": self._run_terms,
            "sums": self._run_sums,
            "late": self._run_late,
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
        self.batch = batch
        self.values: dict[str, torch.Tensor] = {}
        self.pieces: dict[tuple[str, int], torch.Tensor] = {}
        self.shared: dict[str, torch.Tensor] = {}
        self._added: dict[str, torch.Tensor] = {}  # terms so far

    def end(self) -> None:
        """Let go of the batch and of all values."""
        self.begin({})
        self.put(0)

    def enter(self, program: int) -> None:
        """Put the rank into a program: into the first of its micro-batches."""
        self.put(program * self.copies)

    def given(self, program: int) -> dict[str, torch.Tensor]:
        """Return a program's inputs other than parameters and buffers: its shard of the batch, and shared ones."""
        if self.copies == 1:
            return {**self.shared, **self.inputs[program](self.batch)}
        found = dict(self.shared)
        for copy in range(self.copies):
            mine = self.inputs[program * self.copies + copy](self.batch)
            found |= {named(k, copy): v for k, v in mine.items()}
        return found

    def keep(self, stage: Stage, made: Mapping[str, torch.Tensor], program: int) -> None:
        """Keep what outlives a program: terms of sums, new buffers, the results of the last one, and of each the
        `results`, each copy's apart where it has copies."""
        for entry in self.in_time.late.inputs:
            if entry.name in stage.ends:
                self._add(entry.name, made[entry.name])
        for name, value in self.in_time.carried:
            if value in stage.ends:
                self.shared[name] = made[value].detach()
        ended = {value: made[value].detach() for value in stage.ends}
        self.values |= ended
        for copy in range(self.copies if self.results else 0):
            number = program * self.copies + copy
            for value in self.results:
                found = ended.get(named(value, copy) if self.copies > 1 else value, ended.get(value))
                if found is not None:
                    self.pieces[value, number] = found

    def _add(self, name: str, term: torch.Tensor) -> None:
        """One more term of a sum over micro-batches."""
        before = self._added.get(name)
        self._added[name] = term.detach() if before is None else before + term.detach()

    def _arguments(self, graph: Graph, values: Batch) -> list[torch.Tensor]:
        return [values[i.name] if i.name in values else self.leaves[i.name] for i in graph.inputs]

    def _run_terms(self, action: Action) -> None:
        number, m = action.stage, action.micro_batch
        self.put(m)
        graph = self.in_time.rounds[number].terms[m]
        values = {**self.shared, **self.inputs[m](self.batch)}
        with torch.no_grad():
            found = self._terms[number][m](*self._arguments(graph, values))
        for (name, _), term in zip(graph.outputs, found, strict=True):
            self._add(name, term)

    def _run_sums(self, action: Action) -> None:
        graph = self.in_time.rounds[action.stage].sums
        with torch.no_grad():
            found = self._sums[action.stage](*self._arguments(graph, self._added))
        self.shared |= {name: value for (name, _), value in zip(graph.outputs, found, strict=True)}

    def _run_late(self, action: Action) -> None:
        if self._late is not None:
            graph = self.in_time.late
            with torch.no_grad():
                found = self._late(*self._arguments(graph, self._added))
            self.values |= {name: value for (name, _), value in zip(graph.outputs, found, strict=True)}


__all__ = ["Build", "Segments", "StepBatch", "modules_in_time", "order_of_one_rank", "step_actions"]
