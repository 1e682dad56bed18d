"""A training step of one rank: leaves, program, executor, optimizer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from meshwright import heartbeat
from meshwright.core.graph import LOSS, Input
from meshwright.core.layout import TensorLayout, dim_axes
from meshwright.errors import RunError
from meshwright.partition import Partition
from meshwright.partition.accumulation import scattered_each_time
from meshwright.partition.bucket_sizes import gradient_bytes
from meshwright.partition.gradients import loss_scale, pending_gradients
from meshwright.partition.segments import Segment
from meshwright.partition.sharded_update import gathers, update_layout, updates
from meshwright.pipeline.actions import Action
from meshwright.runtime import lost_peer as peers
from meshwright.runtime.agreement import Alike
from meshwright.runtime.ambient import Ambient, check_gradients
from meshwright.runtime.before_update import BeforeUpdate
from meshwright.runtime.buckets import GradientBuckets, norm_of
from meshwright.runtime.clipping import clip_by_global_norm, global_norms
from meshwright.runtime.collectives import Handle
from meshwright.runtime.executor import Executor, plain_actions
from meshwright.runtime.host_update import HostUpdate
from meshwright.runtime.local_batch import BatchParts, Given, LocalBatch, place_of, slicer
from meshwright.runtime.micro_batches import InTime, actions_in_time
from meshwright.runtime.optimizers import OptimizerFactory, Updating, as_laid_out, make_optimizer
from meshwright.runtime.parameter_offload import Parked
from meshwright.runtime.pipeline_executor import Pipelined
from meshwright.runtime.pipeline_rank import Pipeline
from meshwright.runtime.programs import Programs
from meshwright.runtime.rank import Rank
from meshwright.runtime.results import Results
from meshwright.runtime.sharded_update import ShardedUpdate
from meshwright.runtime.state import Kept, State


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
    ) -> None:
        """`values`: input name → full tensor of every constant, and of the parameters and buffers that the state lacks,
        or this rank's shard already for the names in `held`. `bucket_bytes`: of gradients that are reduced together,
        instead of what the plan's ``fusion`` says. `before`: what is done to gradients before an update.
        `state`: of the model, where it has one. `first`: the step of which this is another program; both have one
        optimizer, and `rank` is that of the first."""
        self.first = first or self
        self.rank, self.world = rank, rank.comm if first is None else first.world
        self.state = first.state if first is not None else state or State()
        self.pipe = Pipeline(parts, self.world) if parts.plan.stages else None
        if self.pipe is not None:
            parts, rank.comm = self.pipe.parts, self.pipe.comm  # those of the ranks that share its stages
        self.parts = parts
        self.mesh = rank.comm.mesh
        self.handle = Handle(rank.comm)
        rank.runs_on(parts.plan.mesh)
        self.layouts = parts.resharded.layouts
        self.before = first.before if first is not None else before or BeforeUpdate()
        self.leaves: dict[str, torch.Tensor] = {}
        self.weights: dict[str, torch.nn.Parameter] = {}  # trained leaves, as the program reads them
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.inputs = {i.name: i for i in parts.resharded.graph.inputs}
        self._named = {(i.role, i.target): i.name for i in self.inputs.values()}
        for name, entry in self.inputs.items():
            if entry.role in ("parameter", "buffer"):
                self.state.keep(self._kept(entry))
            if entry.role != "batch" and (self.pipe is None or self.pipe.holds(name)):
                self._make_leaf(entry, values, name in held)
        self.batches = BatchParts(
            parts, rank.comm.rank, self.world.rank, lambda name: place_of(name, parts, rank.device)
        )
        self.parked = self._parked()
        self.made = Programs(parts, rank, self.handle, self.parked, self.pipe, cuts)
        self.graph, self.programs = self.made.graph, self.made.found
        if self.pipe is not None:
            self.batches.only(self.made.reads)
        segments, self.modules = self.programs[0]
        described = [g for g in pending_gradients(parts) if g.name in self.weights]
        pending = [(self.weights[g.name], g.axes) for g in described]
        self.sharded = self._split_updates(bucket_bytes)
        size = gradient_bytes(parts.plan) if bucket_bytes is None else bucket_bytes
        self.uses = self.made.uses({name: id(leaf) for name, leaf in self.leaves.items()})
        self.each_time = scattered_each_time(parts)
        with self.parked.away():  # buckets lie where gradients arrive
            self.buckets = self.state.shared_buckets(
                GradientBuckets(
                    rank.comm, pending, self.uses, size, described, self.sharded.of, self.each_time
                )
            )
        self.hosted: HostUpdate | None = None
        if "optimizer" in parts.plan.techniques.offload:
            targets = {self.inputs[n].target: home for n, home in self.parked.homes.items()}
            self.hosted = HostUpdate(self.parameters, targets, self.state.updated)
            self.parameters = dict(self.hosted.masters)
        self.state.updated |= self.parameters
        self._add_shards()
        self.state.publishers[frozenset(self.parameters)] = functools.partial(
            _publish, self.hosted, self.sharded
        )
        if first is None:
            self.alike = Alike(self.world, rank.device)
            if self.pipe is not None:
                self.alike.options = frozenset()  # stages have parameters, and so groups, of their own
            self.samples = 0
            self.optimizer, self.offered = (
                make_optimizer(optimizer, self.parameters),
                Offered(self.parameters),
            )
            self.updating, self.ambient = Updating(), Ambient()
            self.updating.apart = bool(self.sharded.shards or self.hosted is not None or self.parked.homes)
            if self.optimizer is not None:
                self.updating.guard(self.optimizer, self.state.access)
        else:
            self.alike, self.samples = first.alike, 0  # samples are counted by the first
            self.optimizer, self.updating, self.ambient = first.optimizer, first.updating, first.ambient
            self.offered = first.offered
        self.shape: Any = None  # the nest of what is returned beside the loss
        self.results = Results(parts, rank, self.handle, self.pipe)
        self._beside: dict[str, list[torch.Tensor]] = {}  # label → its pieces
        self._pieces: dict[tuple[str, int], torch.Tensor] | None = None  # of the last call's micro-batches
        self._make_executor(segments)
        self.state.next_tag = self.last_tag + 1 if self.pipe is not None else self.state.next_tag

    def _make_executor(self, segments: Sequence[Segment]) -> None:
        parts, rank, again = self.parts, self.rank, self.made.again
        saving = contextlib.nullcontext if again is None else again.saving
        scale = loss_scale(parts)
        self.added: dict[str, torch.Tensor] = {}  # gradients of earlier calls, while a step runs
        self.executor: Executor | Pipelined
        if self.pipe is not None:
            self.executor = Pipelined(
                self.pipe,
                self.made.stages,
                self.leaves,
                self.buckets,
                self._update,
                self.made.enter,
                self.made.sums,
                self.graph.loss,
                rank.device,
                self.made.queue,
                saving,
                scale,
                self.made.stores,
                self.state.next_tag,
            )
        else:
            self.executor = Executor(
                segments,
                self.modules,
                self.leaves,
                self.buckets,
                self._update,
                saving,
                scale,
                self.programs[1:],
            )
        self.executor.kinds["reduce_wait"] = lambda _: self._reduced()
        self.actions, self.in_time = plain_actions(len(segments)), None
        in_time = self.made.in_time
        if in_time is not None:
            takers = [functools.partial(self.batches.taken, number) for number in range(parts.micro_batches)]
            self.in_time = InTime(in_time, self.executor, self.made.enter, self.made.build, takers)
            self.in_time.results = frozenset(v for k, v in self.results.values.items() if k != LOSS)
            if isinstance(self.executor, Pipelined):
                self.executor.time = self.in_time
            rounds = len(in_time.rounds)
            self.actions = (
                actions_in_time(rounds, parts.micro_batches, len(segments), parts.copies)
                if self.pipe is None
                else self.pipe.actions(rounds)
            )

    def _make_leaf(self, entry: Input, values: Mapping[str, torch.Tensor], held: bool) -> None:
        """What the program reads of an input: a constant of its own, or the state's shard of a parameter or buffer."""
        trained = entry.role == "parameter" and entry.needs_grad

        def shard() -> torch.Tensor:
            value = values[entry.name].to(place_of(entry.name, self.parts, values[entry.name].device))
            if held:
                return value.detach()
            local = slicer(self.layouts[entry.name], self.mesh, self.rank.comm.rank)(value.detach())
            # A replicated tensor keeps the user's memory; a shard gets memory of its own, so the rest can be freed.
            if local.shape == value.shape and (not trained or isinstance(value, torch.nn.Parameter)):
                return local
            return local.clone(memory_format=torch.contiguous_format)

        leaf = self.leaves[entry.name] = (
            shard() if entry.role == "constant" else self.state.shard(entry, shard)
        )
        if trained:
            assert isinstance(leaf, torch.nn.Parameter)
            self.parameters[entry.target] = self.weights[entry.name] = leaf

    def _add_shards(self) -> None:
        """Note which of the parameters are shards, or copies that programs do not read, before a user has them."""
        for target, parameter in self.parameters.items():
            name = self._named["parameter", target]
            axes = [dim_axes(d) for d in self.layout_of(target).dims]
            dims = frozenset(i for i, found in enumerate(axes) if any(self.mesh.sizes[a] > 1 for a in found))
            apart = name in self.sharded.shards or self.hosted is not None or name in self.parked.homes
            self.state.access.add(target, parameter, dims, apart)

    def _kept(self, entry: Input) -> Kept:
        """How the ranks have a parameter or a buffer under the program's plan."""
        trained = entry.role == "parameter" and entry.needs_grad
        updated = self.parts.plan.states.get(entry.name) if trained else None
        holders = (0,) if self.pipe is None else self.pipe.holders[entry.name]
        return Kept(entry, self.layouts[entry.name].forward, updated, trained, holders)

    def _parked(self) -> Parked:
        """The parameters that live on the host, brought there where no other program has done so."""
        here = {n: self.leaves[n] for n in self.parts.resharded.parked if n in self.leaves}
        homes = {n: self.state.homes[t] for n in here if (t := self.inputs[n].target) in self.state.homes}
        found = Parked(here, self.rank.device, homes)
        self.state.homes |= {self.inputs[n].target: home for n, home in found.homes.items()}
        return found

    def _split_updates(self, bucket_bytes: int | None) -> ShardedUpdate:
        """The parts of weights that this rank updates, in the place of the weights among the parameters."""
        kinds = (w.device.type for w in self.weights.values())
        device = next((kind for kind in kinds if kind != "cpu"), "cpu")
        mine = {name: update for name, update in updates(self.parts).items() if name in self.weights}
        groups = (
            replace(group, members=tuple(m for m in group.members if m.name in mine))
            for group in gathers(self.parts, bucket_bytes, device)
        )
        known = {n: self.state.updated.get(self.inputs[n].target) for n in mine}
        made = ShardedUpdate(self.rank.comm, mine, self.weights, [g for g in groups if g.members], known)
        for name, shard in made.shards.items():
            self.parameters[self.inputs[name].target] = shard.leaf
        return made

    def local_batch(self, batch: Given) -> dict[str, torch.Tensor]:
        """This rank's part of a batch (of its first micro-batch). Raises BatchError for tensors that differ from the
        example."""
        self.batches.check(batch)
        return self.batches.taken(0, batch)

    def __call__(self, batch: Given, update: bool = True) -> torch.Tensor:
        """Forward, backward and update on the global batch; the global loss. Without `update` gradients stay in
        ``.grad``, where those of the next call are added to them."""
        kept, self.updating.by_hand = self._kept_gradients(), False
        self._forget_gradients()
        wanted = [v for _, v in (*self.graph.outputs, *self.graph.mutations)]
        actions = self.actions if update else [a for a in self.actions if a.kind != "update"]
        self.added, scale = kept, self.executor.scale
        self.executor.scale = scale * self.before.scale
        try:
            results = self._run(actions, batch, wanted, update)
        except BaseException:
            self._forget_gradients()
            for name, gradient in kept.items():  # a batch that was refused changes nothing
                self.state.updated[name].grad = gradient
            raise
        finally:
            self.added, self.executor.scale = {}, scale
        self.state.accumulating = not update
        if not update:
            for name, parameter in self.parameters.items():
                if parameter.grad is not None and name not in kept:  # it may lie in a bucket
                    parameter.grad = parameter.grad.clone()
        if len(self.results.values) > 1:
            self._beside = self.results.pieces(results, self._pieces)
            self._pieces = None
            del self._beside[LOSS]
        for target, value in self.graph.mutations:
            if value in results:
                self.leaves[self._named["buffer", target]].copy_(results[value])
        self.rank.step, self.rank.calls = (
            (self.rank.step + 1, 0) if update else (self.rank.step, self.rank.calls + 1)
        )
        return results[self.graph.loss]

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
        return self._run(actions, batch, [self.graph.loss])[self.graph.loss]

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
        for parameter in (*self.state.weights.values(), *self.state.updated.values()):
            parameter.grad = None

    def _run(
        self, actions: Sequence[Action], batch: Given, wanted: Sequence[str], update: bool = True
    ) -> dict[str, torch.Tensor]:
        peers.check()
        check_gradients()
        heartbeat.step(self.rank.step + 1)
        with heartbeat.during(heartbeat.IN_STEP), self.ambient.as_built():
            return self._run_all(actions, batch, wanted, update)

    def _run_all(
        self, actions: Sequence[Action], batch: Given, wanted: Sequence[str], update: bool
    ) -> dict[str, torch.Tensor]:
        local = self.local_batch(batch)
        groups = self.optimizer.param_groups if self.optimizer is not None else None
        self.alike.begin(self.rank.step, batch, groups, update)
        self.first.samples += batch.samples if isinstance(batch, LocalBatch) else self.batches.rows
        self.made.begin()
        if self.rank.mesh is not self.parts.plan.mesh:  # another program of this rank ran last
            self.rank.runs_on(self.parts.plan.mesh)
        self.buckets.serve(self.uses, self.each_time)
        with self.handle.deferring(), self.parked.away():
            try:
                results = self._executed(actions, batch, local, wanted)
            except Exception as error:
                peers.broke_off(error, f"step {self.rank.step + 1}")
                raise
        self._settle()
        return results

    def _executed(
        self, actions: Sequence[Action], batch: Given, local: dict[str, torch.Tensor], wanted: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        if self.in_time is None:
            return self.executor.run(actions, local, wanted)
        self.in_time.begin(batch)
        try:
            made = self.executor.run(actions, {}, wanted)
            self._pieces = self.in_time.pieces
            return made
        finally:
            self.in_time.end()

    def _settle(self) -> None:
        """See what the ranks said of their batches: on a CPU before the update, else a step later, when it is there
        without waiting for the device."""
        self.alike.settle(None if self.rank.device.type == "cpu" else self.rank.step)

    def _reduced(self) -> None:
        self.buckets.finish()
        self.sharded.take_gradients()
        if self.pipe is not None:
            self._sum_over_stages(self.pipe)
        if self.hosted is not None:
            self.hosted.take_gradients()
        for name, kept in self.added.items():
            parameter = self.parameters[name]
            parameter.grad = kept if parameter.grad is None else kept.add_(parameter.grad)

    def _sum_over_stages(self, pipe: Pipeline) -> None:
        """Gradients of weights that stages of several ranks use are added up over these."""
        assert isinstance(self.executor, Pipelined)
        numbers = {name: number for number, name in enumerate(self.inputs)}  # equal on all ranks
        for name, places in pipe.shared(self.weights).items():
            tag = self.executor.first_free_tag + 2 + numbers[name]
            shard = self.sharded.shards.get(name)
            leaf = self.weights[name] if shard is None else shard.leaf
            mine = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            leaf.grad = pipe.comm.sum_over(mine, places, tag, pipe.updated(name))

    def _update(self) -> None:
        self._settle()
        if self.before.looks:
            gradients = [p.grad for _, p in self._updated() if p.grad is not None]
            if not self.before.allows(gradients, self.over_ranks, self.clip, self.rank.device):
                return
        if self.optimizer is not None:
            as_laid_out(self.optimizer)
            with self.updating.now():
                if self.hosted is not None:
                    self.optimizer.step()
                    self.hosted.give_back()
                else:
                    with self.parked.present():
                        self.optimizer.step()
            self.sharded.gather()

    def _updated(self) -> list[tuple[str, torch.nn.Parameter]]:
        """The parameters of this program that the optimizer updates, by name; all where there is none. A generator's
        gradient also arrives at the discriminator, which another step trains."""
        if self.optimizer is None:
            return list(self.parameters.items())
        known = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return [(name, p) for name, p in self.parameters.items() if id(p) in known]

    def clip(self, limit: float) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most this; the norm before."""
        pipe, counted, updated = self.pipe, [], self._updated()
        for name, parameter in updated:
            if parameter.grad is not None and (pipe is None or pipe.owns(self.named("parameter", name))):
                counted.append((parameter.grad, self._axes_of(name)))
        return clip_by_global_norm(
            counted,
            [p.grad for _, p in updated if p.grad is not None],
            limit,
            self.rank.comm,
            self.rank.device,
            None if pipe is None else (pipe, self.last_tag),
        )

    def _axes_of(self, parameter: str) -> tuple[str, ...]:
        """The axes that shard what this rank updates of a parameter."""
        axes = {a for d in self.layout_of(parameter).dims for a in dim_axes(d) if self.mesh.sizes[a] > 1}
        return self.mesh.sort(axes)

    def gradient_norms(self) -> dict[str, torch.Tensor]:
        """Name → the norm of the full gradient that the last call has left; of a pipeline those of this rank's stages.
        Collective."""
        there = {n: (p.grad, self._axes_of(n)) for n, p in self.parameters.items() if p.grad is not None}
        return global_norms(there, self.rank.comm, self.rank.device)

    def over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of a number of each rank over all ranks."""
        axes = self.rank.comm.mesh.sort(a for a, size in self.rank.comm.mesh.sizes.items() if size > 1)
        heartbeat.of("a sum over all ranks")
        x = self.rank.comm.all_reduce(x, axes) if axes else x
        return (
            x
            if self.pipe is None
            else self.pipe.comm.sum_over(x, range(self.pipe.comm.places), self.last_tag)
        )

    def bucket_summary(self) -> list[tuple[tuple[str, ...], int, int]]:
        """(axes, number of gradients, bytes) of each gradient reduction."""
        return [(b.axes, len(b.parameters), b.size_bytes) for b in self.buckets.buckets]

    @property
    def last_tag(self) -> int:
        """A tag of messages between stages that nothing else has."""
        assert isinstance(self.executor, Pipelined)
        return self.executor.first_free_tag + 2 + len(self.inputs)

    @property
    def kept_inputs(self) -> list[Input]:
        """The parameters and buffers of all programs over the state, on all ranks."""
        return [kept.entry for kept in self.state.kept.values()]

    def named(self, role: str, target: str) -> str:
        """The program's input for a parameter or buffer of the model."""
        return self._named[role, target]

    def layout_of(self, parameter: str) -> TensorLayout:
        """The layout in which this rank updates a parameter: that of `parameters`."""
        return update_layout(self.parts, self.inputs[self._named["parameter", parameter]])


def _publish(hosted: HostUpdate | None, sharded: ShardedUpdate) -> None:
    if hosted is not None:
        hosted.give_back()
    sharded.gather()


def _share(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors lie in the same memory."""
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
