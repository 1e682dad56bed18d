"""A training step of one rank: leaves, program, executor, optimizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from meshwright import heartbeat
from meshwright.core.graph import LOSS, Input
from meshwright.core.layout import TensorLayout
from meshwright.errors import RunError
from meshwright.partition import Partition
from meshwright.partition.accumulation import scattered_each_time
from meshwright.partition.bucket_sizes import gradient_bytes
from meshwright.partition.gradients import loss_scale, pending_gradients
from meshwright.pipeline.actions import Action
from meshwright.runtime import lost_peer as peers
from meshwright.runtime.agreement import RankComparison
from meshwright.runtime.ambient import Ambient, check_gradients
from meshwright.runtime.before_update import BeforeUpdate
from meshwright.runtime.buckets import GradientBuckets, norm_of
from meshwright.runtime.collectives import Handle
from meshwright.runtime.executor import Made, make_executor
from meshwright.runtime.local_batch import BatchParts, Given, LocalBatch, place_of
from meshwright.runtime.operators import copy_all
from meshwright.runtime.optimizers import Updating, make_optimizer
from meshwright.runtime.pipeline_rank import Pipeline
from meshwright.runtime.programs import Programs
from meshwright.runtime.rank import Rank
from meshwright.runtime.rank_weights import RankWeights
from meshwright.runtime.results import Results
from meshwright.runtime.stage_buffers import handed_on
from meshwright.runtime.state import State
from meshwright.runtime.step_end import StepEnd
from meshwright.runtime.trained import OptimizerFactory


class Offered(dict[str, torch.nn.Parameter]):
    """The shards that an optimizer was made from, by the name of their parameter."""

    def __missing__(self, name: str) -> Any:
        """Raises KeyError, with a note that says how a parameter is trained from now on."""
        error = KeyError(name)
        error.add_note(
            f"the step trains {len(self)} parameters, and {name} is none of them. To unfreeze one: "
            "parameter.requires_grad_(True) of the model's own; the next step(batch) trains it, in the group of the "
            "optimizer that its factory puts it in"
        )
        raise error


class LocalStep:
    """One program of a rank over its `State`. `__call__` takes the global batch as path → tensor, or this rank's part
    of it as a `LocalBatch`, and returns the global loss.

    `parameters` maps the name of each parameter that the program trains to what this rank updates of it, a leaf whose
    ``.grad`` is this rank's part of the gradient. `leaves` maps the program's inputs to what it reads: the same
    tensors, unless weights are put together again after an update in parts. `samples` counts those of the steps so far,
    without what filled a batch up. `offered`: what its optimizer was made from.
    """

    def __init__(
        self,
        parts: Partition,
        rank: Rank,
        values: Mapping[str, torch.Tensor],
        optimizer: OptimizerFactory | None,
        *,
        before: BeforeUpdate | None = None,
        bucket_bytes: int | None = None,
        cuts: Sequence[int] = (),
        held: Collection[str] = (),
        state: State | None = None,
        first: LocalStep | None = None,
        after: LocalStep | None = None,
    ) -> None:
        """`values`: input name → full tensor of every constant, and of the parameters and buffers that the state lacks,
        or this rank's shard already for the names in `held`. `bucket_bytes`: of gradients that are reduced together,
        instead of what the plan's ``fusion`` says. `before`: what is done to gradients before an update.
        `state`: of the model, where it has one. `first`: the step of which this is another program; both have one
        optimizer, and `rank` is that of the first. `after`: the step whose state and optimizer this one takes over, on
        other ranks."""
        self.first = first or self
        self.rank, self.world = rank, rank.comm if first is None else first.world
        known = first or after
        self.state = known.state if known is not None else state or State()
        self.pipe = Pipeline(parts, self.world) if parts.plan.stages else None
        if self.pipe is not None:
            parts, rank.comm = self.pipe.parts, self.pipe.comm  # those of the ranks that share its stages
        self.parts, self.mesh, self.handle = parts, rank.comm.mesh, Handle(rank.comm)
        rank.runs_on(parts.plan.mesh)
        own = self.own = RankWeights(parts, rank, self.state, self.pipe, values, held, bucket_bytes)
        self.layouts, self.inputs, self.leaves = own.layouts, own.inputs, own.leaves
        self.weights, self.parameters = own.weights, own.parameters
        self.host_parameters, self.sharded = own.host_parameters, own.sharded
        self.batches = BatchParts(
            parts, rank.comm.rank, self.world.rank, lambda name: place_of(name, parts, rank.device)
        )
        self.made = Programs(parts, rank, self.handle, self.host_parameters, self.pipe, cuts)
        self.graph, self.modules, self.actions = self.made.graph, self.made.modules, self.made.actions
        if self.pipe is not None:
            self.batches.only(self.made.reads)
        self._share_optimizer(optimizer, before, after)
        self.uses = self.made.uses({name: id(leaf) for name, leaf in self.leaves.items()})
        self.each_time = scattered_each_time(parts)
        self.buckets = self._buckets(bucket_bytes)
        self.results = Results(parts, rank, self.handle, self.pipe)
        scale, tag = loss_scale(parts), self.state.next_tag
        self.executor = make_executor(
            self.made, own.leaves, self.buckets, self.batches, self.results, scale, tag
        )
        tag = self.executor.borders.first_free_tag
        self.end = StepEnd(
            own, self.buckets, self.before, self.optimizer, self.updating, self.comparison, tag
        )
        self.executor.kinds |= {**self.end.kinds, "update": lambda _: self._update()}
        if self.pipe is not None:
            self.state.next_tag = self.last_tag + 1
        # Whether ranks may ask one another between steps; not where a job goes on without those that are lost, who may
        # be lost in between.
        self.asks = True
        self.shape: Any = None  # the nest of what is returned beside the loss
        self._beside: dict[str, list[torch.Tensor]] = {}  # label → its pieces

    def _share_optimizer(
        self, optimizer: OptimizerFactory | None, before: BeforeUpdate | None, after: LocalStep | None
    ) -> None:
        """Make the optimizer, or take that of the first program, and what else all programs of a step have in common.
        Samples are counted by the first."""
        self.samples = 0
        if after is not None:
            self.samples, self.before, self.ambient = after.samples, after.before, after.ambient
            self.optimizer, self.offered, self.updating = after.optimizer, after.offered, after.updating
            self.comparison = RankComparison(self.world, self.rank.device)
            self.comparison.options = after.comparison.options
            return
        if self.first is not self:
            first = self.first
            self.before, self.comparison, self.ambient = first.before, first.comparison, first.ambient
            self.optimizer, self.offered, self.updating = first.optimizer, first.offered, first.updating
            return
        self.before = before or BeforeUpdate()
        self.comparison = RankComparison(self.world, self.rank.device)
        if self.pipe is not None:
            self.comparison.options = frozenset()  # stages have parameters, and so groups, of their own
        self.optimizer = make_optimizer(optimizer, self.own.offered, self.rank.device)
        self.offered, self.updating, self.ambient = Offered(self.parameters), Updating(), Ambient()
        self.updating.apart = self.own.apart
        if self.optimizer is not None:
            self.updating.guard(self.optimizer, self.state.access)

    def _update(self) -> None:
        """Update, once everything has come that other ranks send in this step: if one of them is lost, no rank has
        updated anything."""
        if self.end.repeats:
            self.handle.settle()
        self.end.update()

    def _buckets(self, bucket_bytes: int | None) -> GradientBuckets:
        """The buckets of this program, or of another one that reduces the same gradients."""
        parts = self.parts
        described = [g for g in pending_gradients(parts) if g.name in self.weights]
        pending = [(self.weights[g.name], g.axes) for g in described]
        size = gradient_bytes(parts.plan, described) if bucket_bytes is None else bucket_bytes
        with self.host_parameters.away():  # buckets lie where gradients arrive
            return self.state.shared_buckets(
                GradientBuckets(
                    self.rank.comm, pending, self.uses, size, described, self.sharded.of, self.each_time
                )
            )

    def local_batch(self, batch: Given) -> dict[str, torch.Tensor]:
        """This rank's part of a batch (of its first micro-batch). Raises BatchError for tensors that differ from the
        example."""
        self.batches.check(batch)
        return self.batches.taken(0, batch)

    def __call__(self, batch: Given, update: bool = True) -> torch.Tensor:
        """Forward, backward and update on the global batch; the global loss. Without `update` gradients stay in
        ``.grad``, where those of the next call are added to them."""
        kept, self.updating.by_hand = self._kept_gradients(), False
        samples = self.first.samples
        self._forget_gradients()
        wanted = [v for _, v in (*self.graph.outputs, *self.graph.mutations)]
        actions = self.actions if update else [a for a in self.actions if a.kind != "update"]
        self.end.added, scale = kept, self.executor.scale
        self.executor.scale = scale * self.before.scale
        try:
            made = self._run(actions, batch, wanted, update)
        except BaseException:
            self.first.samples = samples
            self._forget_gradients()
            for name, gradient in kept.items():  # a batch that was refused changes nothing
                self.state.updated[name].grad = gradient
            raise
        finally:
            self.end.added, self.executor.scale = {}, scale
        self.state.accumulating = not update
        if not update:
            for name, parameter in self.parameters.items():
                if parameter.grad is not None and name not in kept:  # it may lie in a bucket
                    parameter.grad = parameter.grad.clone()
        if len(self.results.values) > 1:
            self._beside = self.results.pieces(made.values, made.pieces)
            del self._beside[LOSS]
        if self.graph.mutations:
            self._replace_buffers(made.values)
        self.rank.step, self.rank.calls = (
            (self.rank.step + 1, 0) if update else (self.rank.step, self.rank.calls + 1)
        )
        return made.values[self.graph.loss]

    def _replace_buffers(self, made: Mapping[str, torch.Tensor]) -> None:
        new = [(self.named("buffer", target), target, value) for target, value in self.graph.mutations]
        if self.pipe is None:
            found = [(self.leaves[name], made[value]) for name, _, value in new if value in made]
        else:
            kept, tensors = self.state.kept, self.state.tensors
            held = {name: (tensors.get(target), kept[target].holders) for name, target, _ in new}
            found = handed_on(self.pipe, [(n, v) for n, _, v in new], made, held, self.end.tags)
        copy_all([x for x, _ in found], [x for _, x in found])

    def beside_loss(self, gather: bool) -> list[torch.Tensor | None]:
        """The results of the last call beside the loss: full on all ranks with `gather`, else as this rank has them,
        None where only other stages of a pipeline do. Collective with `gather`."""
        found, self._beside = self._beside, {}
        tag = 0 if self.pipe is None else self.last_tag
        made: list[torch.Tensor | None] = []
        for label, pieces in found.items():
            x = self.results.together(label, pieces, gather, gather, tag)
            # It may be a weight, or a view of one, which the next step changes.
            made.append(x.clone() if x is not None and any(_share(x, piece) for piece in pieces) else x)
            pieces.clear()
        return made

    def gradients(self, batch: Given) -> torch.Tensor:
        """The loss and, in ``.grad``, the gradients, without an update; buffers and the step count stay as they are.
        Raises RunError where gradients of earlier calls wait for an update."""
        if self._kept_gradients():
            raise RunError(
                "gradients of step(batch, update=False) wait for an update",
                why="gradients(batch) and local_norms(batch) would replace them",
                hint="step(batch) first, or drop them: step.optimizer.zero_grad()",
            )
        self._forget_gradients()
        self.updating.by_hand = True
        actions = [a for a in self.actions if a.kind != "update"]
        return self._run(actions, batch, [self.graph.loss]).values[self.graph.loss]

    def _kept_gradients(self) -> dict[str, torch.Tensor]:
        """Name → the gradient that earlier calls without an update have left. Raises RunError for one of a parameter
        that this program does not train."""
        if not self.state.accumulating:
            return {}
        kept = {n: p.grad for n, p in self.state.updated.items() if p.grad is not None}
        other = next((n for n in kept if n not in self.parameters), None)
        if other is not None:
            raise RunError(
                f"the gradient of {other} waits for an update",
                why="another program of this step has left it there, and this one does not train the parameter",
                hint="an update by the program that made it, or drop it: step.optimizer.zero_grad()",
            )
        return kept

    def local_norms(self, batch: Given) -> dict[str, torch.Tensor]:
        """Name → the norm of this rank's gradient before it is added up with the others'; no update."""
        self.buckets.heard = {}
        try:
            self.gradients(batch)
            heard = self.buckets.heard
        finally:
            self.buckets.heard = None
        found: dict[str, torch.Tensor] = {}
        for name, leaf in self.weights.items():
            norm = heard.get(id(leaf))
            if norm is None and leaf.grad is not None:
                norm = norm_of(leaf.grad)
            if norm is not None:
                found[self.inputs[name].target] = norm
        return found

    def _forget_gradients(self) -> None:
        weights = self.state.weights
        for parameter in weights.values():
            parameter.grad = None
        for name, parameter in self.state.updated.items():
            if parameter is not weights.get(name):  # most are
                parameter.grad = None

    def _run(
        self, actions: Sequence[Action], batch: Given, wanted: Sequence[str], update: bool = True
    ) -> Made:
        peers.check()
        check_gradients()
        heartbeat.step(self.rank.step + 1)
        with heartbeat.during(heartbeat.IN_STEP), self.ambient.as_built():
            return self._run_all(actions, batch, wanted, update)

    def _run_all(self, actions: Sequence[Action], batch: Given, wanted: Sequence[str], update: bool) -> Made:
        self.batches.check(batch)
        groups = self.optimizer.param_groups if self.optimizer is not None else None
        self.comparison.begin(self.rank.step, batch, groups, update, self.before.clip_norm)
        self.first.samples += batch.samples if isinstance(batch, LocalBatch) else self.batches.rows
        self.made.begin()
        if self.rank.mesh is not self.parts.plan.mesh:  # another program of this rank ran last
            self.rank.runs_on(self.parts.plan.mesh)
        self.buckets.serve(self.uses, self.each_time)
        with self.handle.deferring(), self.host_parameters.away():
            try:
                made = self.executor.run(actions, batch, wanted)
            except Exception as error:
                peers.broke_off(error, f"step {self.rank.step + 1}")
                raise
        self.end.settle()
        return made

    def clip(self, limit: float) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most this; the norm before."""
        return self.end.clip(limit)

    def gradient_norms(self) -> dict[str, torch.Tensor]:
        """Name → the norm of the full gradient that the last call has left; of a pipeline those of this rank's stages.
        Collective."""
        return self.end.gradient_norms()

    def over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of a number of each rank over all ranks."""
        return self.end.over_ranks(x)

    def bucket_summary(self) -> list[tuple[tuple[str, ...], int, int]]:
        """(axes, number of gradients, bytes) of each gradient reduction."""
        return [(b.axes, len(b.parameters), b.size_bytes) for b in self.buckets.buckets]

    @property
    def last_tag(self) -> int:
        """A tag of messages between stages that nothing else has."""
        return self.end.tag

    @property
    def kept_inputs(self) -> list[Input]:
        """The parameters and buffers of all programs over the state, on all ranks."""
        return [kept.entry for kept in self.state.kept.values()]

    def named(self, role: str, target: str) -> str:
        """The program's input for a parameter or buffer of the model."""
        return self.own.named(role, target)

    def layout_of(self, parameter: str) -> TensorLayout:
        """The layout in which this rank updates a parameter: that of `parameters`."""
        return self.own.layout_of(parameter)


def _share(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether two tensors share memory."""
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
