"""How a step ends: gradients are completed over ranks and stages, looked at, clipped, and the optimizer updates."""

from __future__ import annotations

import torch

from meshwright import heartbeat
from meshwright.runtime.agreement import RankComparison
from meshwright.runtime.before_update import BeforeUpdate
from meshwright.runtime.buckets import GradientBuckets
from meshwright.runtime.clipping import clip_by_global_norm, global_norms
from meshwright.runtime.optimizers import Updating, as_laid_out
from meshwright.runtime.pipeline_rank import Pipeline
from meshwright.runtime.rank_weights import RankWeights
from meshwright.runtime.stage_borders import Kinds


class StepEnd:
    """The end of the steps of one program. `added`: name → a gradient of earlier calls, to which those of this step are
    added. `tag` is of no other message between stages, and each input of the program has one of the `tags`.
    `kinds`: the actions that end a step."""

    def __init__(
        self,
        held: RankWeights,
        buckets: GradientBuckets,
        before: BeforeUpdate,
        optimizer: torch.optim.Optimizer | None,
        updating: Updating,
        comparison: RankComparison,
        first_free_tag: int,
    ) -> None:
        """`first_free_tag`: this tag and those after it are of no message between stages; the loss takes two."""
        self.held, self.buckets, self.before = held, buckets, before
        self.optimizer, self.updating, self.comparison = optimizer, updating, comparison
        self.rank, self.pipe = held.rank, held.pipe
        self.added: dict[str, torch.Tensor] = {}
        self.repeats = False  # a step that fails is done again: what `added` has must stay
        # Numbers of inputs are equal on all ranks.
        self.tags = {name: first_free_tag + 2 + number for number, name in enumerate(held.inputs)}
        self.tag = first_free_tag + 2 + len(held.inputs)
        self.kinds: Kinds = {"reduce_wait": lambda _: self.reduce(), "update": lambda _: self.update()}

    def reduce(self) -> None:
        """Wait for the gradients."""
        held = self.held
        self.buckets.finish()
        held.sharded.take_gradients()
        if self.pipe is not None:
            self._sum_over_stages(self.pipe)
        if held.hosted is not None:
            held.hosted.take_gradients()
        for name, kept in self.added.items():
            parameter = held.parameters[name]
            if parameter.grad is not None and self.repeats:
                parameter.grad = kept + parameter.grad
            else:
                parameter.grad = kept if parameter.grad is None else kept.add_(parameter.grad)

    def _sum_over_stages(self, pipe: Pipeline) -> None:
        """Gradients of weights that stages of several ranks use are added up over these."""
        held = self.held
        for name, places in pipe.shared(held.weights).items():
            shard = held.sharded.shards.get(name)
            leaf = held.weights[name] if shard is None else shard.leaf
            mine = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            leaf.grad = pipe.comm.sum_over(mine, places, self.tags[name], pipe.updated(name))

    def update(self) -> None:
        """Update the parameters, unless gradients are not finite and such steps are skipped."""
        self.settle()
        if self.before.looks:
            gradients = [p.grad for _, p in self._updated() if p.grad is not None]
            if not self.before.allows(gradients, self.over_ranks, self.clip, self.rank.device):
                return
        if self.optimizer is None:
            return
        held = self.held
        as_laid_out(self.optimizer)
        with self.updating.now():
            if held.hosted is not None:
                self.optimizer.step()
                held.hosted.give_back()
            else:
                with held.host_parameters.present():
                    self.optimizer.step()
        held.sharded.gather()

    def settle(self) -> None:
        """Compare what the ranks say of their batches: on a CPU before the update, else a step later, when it is there
        without waiting for the device."""
        self.comparison.settle(None if self.rank.device.type == "cpu" else self.rank.step)

    def _updated(self) -> list[tuple[str, torch.nn.Parameter]]:
        """The parameters of this program that the optimizer updates, by name; all where there is none. A generator's
        gradient also arrives at the discriminator, which another step trains."""
        if self.optimizer is None:
            return list(self.held.parameters.items())
        known = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return [(name, p) for name, p in self.held.parameters.items() if id(p) in known]

    def clip(self, limit: float) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most this; the norm before."""
        held, pipe, counted, updated = self.held, self.pipe, [], self._updated()
        for name, parameter in updated:
            if parameter.grad is not None and (pipe is None or pipe.owns(held.named("parameter", name))):
                counted.append((parameter.grad, held.axes_of(name)))
        return clip_by_global_norm(
            counted,
            [p.grad for _, p in updated if p.grad is not None],
            limit,
            self.rank.comm,
            self.rank.device,
            None if pipe is None else (pipe, self.tag),
        )

    def gradient_norms(self) -> dict[str, torch.Tensor]:
        """Name → the norm of the full gradient that the last call has left; of a pipeline those of this rank's stages.
        Collective."""
        parameters, axes_of = self.held.parameters, self.held.axes_of
        there = {n: (p.grad, axes_of(n)) for n, p in parameters.items() if p.grad is not None}
        return global_norms(there, self.rank.comm, self.rank.device)

    def over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of a number of each rank over all ranks."""
        comm, pipe = self.rank.comm, self.pipe
        axes = comm.mesh.sort(a for a, size in comm.mesh.sizes.items() if size > 1)
        heartbeat.of("a sum over all ranks")
        x = comm.all_reduce(x, axes) if axes else x
        return x if pipe is None else pipe.comm.sum_over(x, pipe.meshes.every_place, self.tag)


__all__ = ["StepEnd"]
