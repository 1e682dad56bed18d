"""The executor: it runs a rank's list of actions over its stages.

A step is a list of actions (`pipeline/actions.py`). A plain step has one stage and runs ``forward``, ``backward``,
``reduce_wait``, ``update``; micro-batches repeat the first two, and a rank of a pipeline has stages of its own and
messages in between (`stage_messages.py`). Backward of a stage is a call of its own, on the sum of the gradients that
its readers left. What weights need of backward may wait in a queue (`kernels/split_linear.py`) for an action of its
own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright import heartbeat
from meshwright.partition.stages import Stage
from meshwright.pipeline.actions import Action
from meshwright.pipeline.messages import Message
from meshwright.runtime.buckets import GradientBuckets
from meshwright.runtime.local_batch import BatchParts, Given
from meshwright.runtime.micro_batches import StepBatch
from meshwright.runtime.programs import Programs
from meshwright.runtime.results import Results
from meshwright.runtime.source_lines import in_backward
from meshwright.runtime.stage_borders import Borders
from meshwright.runtime.stage_messages import StageMessages


@dataclass(frozen=True)
class Made:
    """The results of a step. `values`: its results, by name, as far as this rank has them; `pieces`: those of single
    micro-batches, by name and number."""

    values: dict[str, torch.Tensor]
    pieces: dict[tuple[str, int], torch.Tensor]


@dataclass
class _Pass:
    """One stage of one micro-batch between its forward and its backward."""

    results: dict[str, torch.Tensor]  # with their autograd history
    borders: dict[str, torch.Tensor]  # detached leaves, as values of earlier stages were read
    queue: list[Any] = field(default_factory=list)  # what the weights still need


class _Seed(torch.autograd.Function):
    """Gives the roots of a backward pass their gradients, and holds them no longer: what `torch.autograd.backward` is
    given lives until it returns."""

    @staticmethod
    def forward(ctx, gradients: list[torch.Tensor], *roots: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found = (None, *ctx.gradients)
        ctx.gradients.clear()
        return found


class Executor:
    """Runs action lists. `kinds` maps each kind of action to what does it, `programs` a stage of this rank to its
    segment and module in each micro-batch. Gradients are those of the loss times `scale`."""

    def __init__(
        self,
        made: Programs,
        leaves: Mapping[str, torch.Tensor],
        buckets: GradientBuckets,
        batch: StepBatch,
        borders: Borders,
        loss: str = "",
        scale: float = 1.0,
    ) -> None:
        """`leaves`: input of the program → its tensor. `loss`: the value that backward starts from. Whoever has an
        ``update`` adds it to the kinds."""
        self.made, self.programs, self.leaves, self.buckets = made, made.programs, leaves, buckets
        self.batch, self.borders, self.loss, self.scale = batch, borders, loss, scale
        self.saving = nullcontext if made.again is None else made.again.saving
        self.stages, self.turns = [*made.programs], made.turns
        self.count = len(made.programs[self.stages[0]])
        self._graded = {s: _graded(made.cut[s]) for s in self.stages}
        self._passes: dict[tuple[int, int], _Pass] = {}
        self._done: dict[tuple[str, int], int] = {}  # halves of backward that a stage has done, and
        self._ended = 0  # micro-batches whose backward is over, in all stages
        self.kinds: dict[str, Callable[[Action], None]] = {
            "begin": lambda _: self.buckets.begin(),
            "forward": self._forward,
            "backward": self._backward,
            "backward_input": self._backward_input,
            "backward_weight": self._backward_weight,
            "reduce_wait": lambda _: self.buckets.finish(),
            **batch.kinds,
            **borders.kinds,
        }

    def run(self, actions: Sequence[Action], batch: Given, results: Sequence[str]) -> Made:
        """Run a list of actions on a batch; return those of the named results that this rank has, detached. All ranks
        have the loss."""
        self._done, self._ended = {}, 0
        self.batch.begin(batch)
        try:
            for action in actions:
                heartbeat.doing(action.kind, action.stage, action.micro_batch)
                self.kinds[action.kind](action)
            values = self.batch.values
            return Made({n: values[n].detach() for n in results if n in values}, self.batch.pieces)
        finally:
            self._passes = {}
            self.borders.forget()
            self.batch.end()

    # ------------------------------------------------------------ forward

    def _forward(self, action: Action) -> None:
        s, m = action.stage, action.micro_batch
        stage, (segment, module) = self.made.cut[s], self.programs[s][m]
        self.batch.enter(m)
        given, borders, arguments = self.batch.given(m), dict[str, torch.Tensor](), []
        for entry in segment.graph.inputs:
            if entry.name in stage.takes:
                value = self.borders.take(Message(entry.name, stage.takes[entry.name], s, m, False))
                assert value is not None
                if entry.needs_grad and torch.is_grad_enabled():
                    value = borders[entry.name] = value.detach().requires_grad_()
            else:
                value = given[entry.name] if entry.name in given else self.leaves[entry.name]
            arguments.append(value)
        self.borders.acknowledge(action)
        store = self.made.stores.get(s)
        if store is not None:
            store.begin()
        with self.saving():
            made = module(*arguments)
        if store is not None:
            store.settle()
        results = dict(zip(segment.results, made, strict=True))
        for value, readers in stage.gives.items():
            for reader in readers:
                self.borders.give(Message(value, s, reader, m, False), results[value])
        self.batch.keep(stage, results, m)
        self._passes[s, m] = _Pass({k: v for k, v in results.items() if v.requires_grad}, borders)

    # ------------------------------------------------------------ backward

    def _backward(self, action: Action) -> None:
        with nullcontext() if self.turns == "step" else self._reducing(action):
            self._input_half(action)
            self._weight_half(action)

    def _backward_input(self, action: Action) -> None:
        self._input_half(action)

    def _backward_weight(self, action: Action) -> None:
        with nullcontext() if self.turns == "step" else self._reducing(action):
            self._weight_half(action)

    @contextmanager
    def _reducing(self, action: Action) -> Iterator[None]:
        """Run the half of backward that ends a micro-batch in a stage. Gradients of each turn (`Programs.turns`) are
        reduced by themselves; with those of the last one all that waits for the end of the step."""
        self._ended += 1
        first = end = True
        if self.turns == "stage":
            turn, last = self.stages.index(action.stage), self._ended == self.count * len(self.stages)
        else:
            turn, last = action.micro_batch, action.micro_batch == self.count - 1
            first, end = action.stage == self.stages[-1], action.stage == self.stages[0]
        if first:
            self.buckets.enter(turn, last)
        yield
        if end and not last:  # whose sums are waited for at the end of the step
            self.buckets.finish()

    def _input_half(self, action: Action) -> None:
        s, m = action.stage, action.micro_batch
        stage, one = self.made.cut[s], self._passes[s, m]
        graph = stage.segment.graph
        self.batch.enter(m)
        self._count("input", s)
        roots, gradients = self._seeds(s, one, m)
        self.borders.acknowledge(action)
        one.results = {}
        if roots:
            queue = self.made.queue
            with nullcontext() if queue is None else queue.into(one.queue), in_backward(graph):
                _run_backward(roots, gradients)
        for value, maker in stage.takes.items():
            if value in graph.needs_grad:
                border = one.borders.pop(value)
                gradient = border.grad
                if gradient is None and self.borders.away(maker):
                    gradient = torch.zeros_like(border)
                self.borders.give(Message(value, maker, s, m, True), gradient)

    def _seeds(self, s: int, one: _Pass, m: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return what a stage has made that has a gradient, and the gradients: those of its readers, added up."""
        waiting = dict(self._graded[s])
        roots, gradients = [], []
        for value, result in one.results.items():
            total = torch.full_like(result, self.scale) if value == self.loss else None
            for reader in waiting.pop(value, ()):
                term = self.borders.take(Message(value, s, reader, m, True))
                total = term if total is None else total if term is None else total + term
            if total is not None:
                roots.append(result)
                gradients.append(total)
        for value, readers in waiting.items():  # of what turned out to need none
            for reader in readers:
                self.borders.drop(Message(value, s, reader, m, True))
        return roots, gradients

    def _weight_half(self, action: Action) -> None:
        s, m = action.stage, action.micro_batch
        one, queue = self._passes.pop((s, m)), self.made.queue
        if queue is not None:
            self.batch.enter(m)
            self._count("weight", s)
            with in_backward(self.made.cut[s].segment.graph):
                queue.drain(one.queue)

    def _count(self, half: str, stage: int) -> None:
        """Note whether the gradients of a half of backward are the last of a stage: then what was added up is sent."""
        self._done[half, stage] = done = self._done.get((half, stage), 0) + 1
        self.made.sums[stage].last = done == self.count


def make_executor(
    made: Programs,
    leaves: Mapping[str, torch.Tensor],
    buckets: GradientBuckets,
    batches: BatchParts,
    results: Results,
    scale: float = 1.0,
    first_tag: int = 0,
) -> Executor:
    """The executor of a rank's programs. `first_tag`: messages between stages have tags from here on."""
    parts, pipe, loss = made.parts, made.pipe, made.graph.loss
    takers = [functools.partial(batches.taken, number) for number in range(parts.micro_batches)]
    kept = frozenset(results.values.values())
    batch = StepBatch(made.in_time, leaves, made.enter, made.build, takers, kept)
    borders = Borders() if pipe is None else StageMessages(pipe, made, batch, loss, first_tag)
    return Executor(made, leaves, buckets, batch, borders, loss, scale)


def _graded(stage: Stage) -> dict[str, tuple[int, ...]]:
    """Return what later stages read of a stage and give a gradient for, with these stages."""
    wanted = stage.segment.graph.needs_grad
    return {value: readers for value, readers in stage.gives.items() if value in wanted}


def _run_backward(roots: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    """Backward from some roots. Takes the gradients out of their list, to free each as soon as it is used."""
    if len(roots) == 1 and roots[0].dim() == 0:  # a loss: nothing to free
        torch.autograd.backward(roots, gradients)
        return
    end = _Seed.apply(gradients, *roots)
    roots.clear()
    assert end is not None
    end.backward()


__all__ = ["Executor", "Made", "make_executor"]
