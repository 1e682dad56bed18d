"""What a rank holds between steps, whatever program runs on it: parameters, buffers, and what an optimizer updates.

The first program of a model says how each tensor is stored; later ones (another shape, another loss) read the same
tensors. Everything is known by its name in the model: names of a program's inputs are its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from meshwright.errors import PlanError
from meshwright.graph import Input
from meshwright.layout import TensorLayout
from meshwright.runtime.buckets import GradientBuckets


@dataclass
class State:
    """`tensors`: parameter or buffer → this rank's shard, as programs read it. `weights`: those that are trained, as
    autograd leaves. `updated`: what an optimizer updates of each: the weight itself, its shard (ZeRO-1 and 2), or a
    copy on the host. `layouts`: how each is stored, and updated where that is split further. `homes`: values of
    parameters that live in the host's memory. `next_tag`: messages between stages of the next program have tags from
    here on."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    updated: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    layouts: dict[str, tuple[TensorLayout, TensorLayout | None]] = field(default_factory=dict)
    homes: dict[str, torch.Tensor] = field(default_factory=dict)
    next_tag: int = 0
    _buckets: list[GradientBuckets] = field(default_factory=list)

    def place(
        self, entry: Input, layout: tuple[TensorLayout, TensorLayout | None], make: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """This rank's shard of an input: the one that is there, else the one that `make` gives. A parameter that a
        program trains is an autograd leaf there, one that it only reads is not. Raises PlanError for a program that
        wants it stored in another way."""
        name = entry.target
        if self.layouts.setdefault(name, layout) != layout:
            raise PlanError(
                f"{name} is stored as {self.layouts[name][0]}, and this program wants {layout[0]}",
                why="all programs of a model share its weights",
                hint="build one step for each plan from a model of its own",
            )
        if name not in self.tensors:
            self.tensors[name] = make()
        found = self.tensors[name]
        if entry.role != "parameter":
            return found
        if not entry.needs_grad:
            return found.detach()
        if name not in self.weights:
            leaf = found if isinstance(found, torch.nn.Parameter) else torch.nn.Parameter(found.detach())
            leaf.requires_grad_()
            self.tensors[name] = self.weights[name] = leaf
        return self.weights[name]

    def shared_buckets(self, made: GradientBuckets) -> GradientBuckets:
        """The buckets of a program, or those of an earlier one with the same gradients: their memory serves both."""
        for known in self._buckets:
            if known.same_as(made):
                made.close()
                return known
        self._buckets.append(made)
        return made


__all__ = ["State"]
