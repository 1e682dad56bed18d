"""The state that a rank holds between steps, whatever program runs: parameters, buffers, and the optimizer's leaves.

The first program of a model determines how each tensor is stored; later ones (another shape, another loss) read the
same tensors. Everything is identified by its name in the model, as names of inputs differ between programs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from meshwright.core.graph import Input
from meshwright.core.layout import TensorLayout
from meshwright.core.rank_numbers import PipelineRank
from meshwright.errors import PlanError
from meshwright.runtime.buckets import GradientBuckets
from meshwright.runtime.shard_access import ShardAccess


@dataclass(frozen=True)
class StoredTensor:
    """How the ranks have one parameter or buffer. `stored`: as programs read it. `updated`: as the optimizer does,
    where that is split further. `trained`: by some program so far. `holders`: the places of a pipeline that have it."""

    entry: Input
    stored: TensorLayout
    updated: TensorLayout | None = None
    trained: bool = False
    holders: tuple[PipelineRank, ...] = (PipelineRank(0),)

    @property
    def layout(self) -> TensorLayout:
        """The layout of this rank's values in `State.updated`, or of a tensor that nobody trains."""
        return self.updated or self.stored


@dataclass
class State:
    """`kept`: parameter or buffer → how the ranks have it, also those of other stages. `tensors`: this rank's shard, as
    programs read it. `weights`: those that are trained, as autograd leaves. `updated`: what an optimizer updates of
    each: the weight itself, its shard (ZeRO-1 and 2), or a copy of one of them on the host. `shards`: those shards, on
    the device. `homes`: values of parameters that live in the host's memory. `publishers`: trained parameters → what
    brings values from `updated` to `tensors`. `next_tag`: messages between stages of the next program have tags from
    here on. `accumulating`: gradients in ``.grad`` wait for an update in a later call."""

    kept: dict[str, StoredTensor] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    updated: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    shards: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    homes: dict[str, torch.Tensor] = field(default_factory=dict)
    next_tag: int = 0
    publishers: dict[frozenset[str], Callable[[], None]] = field(default_factory=dict)
    accumulating: bool = False
    buckets: list[GradientBuckets] = field(default_factory=list)

    @functools.cached_property
    def access(self) -> ShardAccess:
        """The user's access to the shards that optimizers update."""
        return ShardAccess(self.publish)

    def keep(self, new: StoredTensor) -> None:
        """Take over how a program has a parameter or a buffer. Raises PlanError where another has it otherwise."""
        name, known = new.entry.target, self.kept.get(new.entry.target)
        if known is None:
            self.kept[name] = new
            return
        if new.entry.type != known.entry.type:
            raise PlanError(
                f"{name} is {known.entry.type} in an earlier step of this model, and {new.entry.type} now",
                why="all programs of a model share its weights",
                hint="build the model again for a step of another dtype",
            )
        if not set(new.holders) <= set(known.holders):
            raise PlanError(
                f"{name} is on other ranks of the pipeline than the stage that reads it in this program",
                why="all programs of a model share its weights where they are",
                hint="a loss that calls modules in the order of the first one, or train without pipeline=",
            )
        if new.stored != known.stored or (new.trained and known.trained and new.updated != known.updated):
            raise PlanError(
                f"{name} is stored as {known.stored}, and this program needs {new.stored}",
                why="all programs of a model share its weights as they are stored",
                hint="build the model again for a step under another plan",
            )
        if new.trained and not known.trained:
            entry = replace(known.entry, needs_grad=True)
            self.kept[name] = replace(known, entry=entry, trained=True, updated=new.updated)

    def shard(self, entry: Input, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """This rank's shard of an input: the one that is there, else the one that `make` gives. A parameter that a
        program trains is an autograd leaf there, one that it only reads is not."""
        name = entry.target
        if name not in self.tensors:
            self.tensors[name] = make()
        found = self.tensors[name]
        if entry.role != "parameter":
            return found
        if not entry.needs_grad:
            return found.detach()
        if name not in self.weights:
            leaf = found if isinstance(found, torch.nn.Parameter) else torch.nn.Parameter(found.detach())
            self.tensors[name] = self.weights[name] = leaf
        return self.weights[name]

    def publish(self) -> None:
        """Bring what was written into `updated` to where programs read it. Collective."""
        done: set[str] = set()
        for names in sorted(self.publishers, key=lambda names: (-len(names), sorted(names))):
            if not names <= done:
                self.publishers[names]()
                done |= names

    def shared_buckets(self, made: GradientBuckets) -> GradientBuckets:
        """The buckets of a program, or those of an earlier one with the same gradients: their memory serves both."""
        for known in self.buckets:
            if known.same_as(made):
                made.close()
                known.programs += 1
                return known
        self.buckets.append(made)
        return made

    def release_buckets(self, buckets: GradientBuckets) -> None:
        """A program is dropped: its buckets go with the last program, of any step of the model, that has them."""
        buckets.programs -= 1
        if not buckets.programs:
            buckets.close()
            self.buckets.remove(buckets)


__all__ = ["StoredTensor", "State"]
