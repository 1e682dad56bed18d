"""One executor: segments and a list of actions per rank.

A step is a list of actions (`pipeline/actions.py`), whose stages are the segments here. A plain plan has one segment
and runs `forward, backward, reduce, update`; where a program is split into several, the list is longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from meshwright import heartbeat
from meshwright.partition.segments import Segment
from meshwright.pipeline.actions import Action
from meshwright.runtime.buckets import GradientBuckets
from meshwright.runtime.source_lines import in_backward


def plain_actions(segments: int) -> tuple[Action, ...]:
    """One forward and one backward through all segments, then the reduction's end and the update."""
    forward = tuple(Action("forward", s) for s in range(segments))
    backward = tuple(Action("backward", s) for s in reversed(range(segments)))
    return (Action("begin"), *forward, *backward, Action("reduce_wait"), Action("update"))


class Executor:
    """Runs action lists over the segments of one rank's program.

    `leaves` maps parameters, buffers and constants to their tensors. Values between segments are detached at
    the border, so each segment's backward is a call of its own, on the gradients its consumers left.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        modules: Sequence[Callable[..., Any]],
        leaves: Mapping[str, torch.Tensor],
        buckets: GradientBuckets,
        update: Callable[[], None],
        saving: Callable[[], AbstractContextManager[Any]] = nullcontext,
        scale: float = 1.0,
        further: Sequence[tuple[Sequence[Segment], Sequence[Callable[..., Any]]]] = (),
    ) -> None:
        """`scale`: gradients are those of the loss times this. `saving` makes the context of each forward pass, in
        which it is decided what is kept for backward. `further`: segments and modules of the micro-batches after the
        first."""
        self.programs = [(segments, modules), *further]
        self.leaves = leaves
        self.buckets, self.update, self.saving, self.scale = buckets, update, saving, scale
        self.values: dict[str, torch.Tensor] = {}  # by name: as made, with their autograd history
        self._borders: dict[
            tuple[int, str], torch.Tensor
        ] = {}  # (segment, value): the detached leaf it was read as
        self.kinds: dict[str, Callable[[Action], None]] = {
            "begin": lambda _: self.buckets.begin(),
            "forward": self._forward,
            "backward": self._backward,
            "reduce_wait": lambda _: self.buckets.finish(),
            "update": lambda _: self.update(),
        }

    def run(
        self, actions: Sequence[Action], batch: Mapping[str, torch.Tensor], results: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        """Run a list of actions on the local batch; returns the named results, detached."""
        self.values = dict(batch)
        try:
            for action in actions:
                heartbeat.doing(action.kind, action.stage, action.micro_batch)
                self.kinds[action.kind](action)
            return {name: self.value(name).detach() for name in results}
        finally:
            self.forget()

    def value(self, name: str) -> torch.Tensor:
        """A value that is there now, or a leaf."""
        return self.values[name] if name in self.values else self.leaves[name]

    def forget(self) -> None:
        """Let go of what was made."""
        self.values, self._borders = {}, {}

    def _forward(self, action: Action) -> None:
        segments, modules = self.programs[action.micro_batch]
        segment = segments[action.stage]
        arguments = []
        for entry in segment.graph.inputs:
            value = self.value(entry.name)
            if entry.role == "boundary" and entry.needs_grad and torch.is_grad_enabled():
                value = value.detach().requires_grad_()
                self._borders[action.stage, entry.name] = value
            arguments.append(value)
        with self.saving():
            results = modules[action.stage](*arguments)
        self.values.update(zip(segment.results, results, strict=True))

    def _backward(self, action: Action) -> None:
        segments, _ = self.programs[action.micro_batch]
        segment = segments[action.stage]
        roots, gradients = [], []
        for name in segment.results:
            value = self.value(name)
            if not value.requires_grad:
                continue
            if action.stage == len(segments) - 1:
                gradient = torch.full_like(value, self.scale) if value.dim() == 0 else None
            else:
                gradient = self._border_gradient(action.stage, name)
            if gradient is not None:
                roots.append(value)
                gradients.append(gradient)
        with in_backward(segment.graph):
            torch.autograd.backward(roots, gradients)

    def _border_gradient(self, made_in: int, name: str) -> torch.Tensor | None:
        """The sum of the gradients that later segments left on a value."""
        total: torch.Tensor | None = None
        for (segment, value), leaf in self._borders.items():
            if value == name and segment > made_in and leaf.grad is not None:
                total = leaf.grad if total is None else total + leaf.grad
        return total
