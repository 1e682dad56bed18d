"""A training step of one rank: leaves, program, executor, optimizer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from meshwright.errors import RunError
from meshwright.graph import Graph, Input
from meshwright.layout import TensorLayout, dim_axes
from meshwright.partition import Partition
from meshwright.partition.accumulation import scattered_each_time, summed_first
from meshwright.partition.fetches import fetch_runs, is_fetch
from meshwright.partition.fusion import gradient_bytes
from meshwright.partition.gradients import loss_scale, pending_gradients
from meshwright.partition.interleave import in_copies, of_one
from meshwright.partition.keeps import keeps_of
from meshwright.partition.localize import late_values
from meshwright.partition.micro_batches import micro_batches_of
from meshwright.partition.segments import Segment, split_segments
from meshwright.partition.stashes import room_bytes, settled_before
from meshwright.partition.updates import gathers, update_layout, updates
from meshwright.runtime.accumulation import Accumulation
from meshwright.runtime.again import Again
from meshwright.runtime.batches import BatchParts, Given, slicer
from meshwright.runtime.buckets import GradientBuckets
from meshwright.runtime.collectives import Handle
from meshwright.runtime.executor import Action, Executor, plain_actions
from meshwright.runtime.fetches import Fetches, Parked
from meshwright.runtime.host_update import HostUpdate
from meshwright.runtime.kernels.split_linear import Queue
from meshwright.runtime.micro_batches import InTime, Program, actions_in_time, modules_in_time
from meshwright.runtime.pipeline import Pipeline
from meshwright.runtime.pipelined import Pipelined
from meshwright.runtime.program import HOST, build_module
from meshwright.runtime.rank import Rank
from meshwright.runtime.sharded_update import ShardedUpdate
from meshwright.runtime.stashes import Store

OptimizerFactory = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]


def taker(name: str, parts: Partition, rank: Rank) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from the whole tensor of an input to what a rank holds of it, where that lives."""
    take = slicer(parts.resharded.layouts[name], rank.comm.mesh, rank.comm.rank)
    there = name in parts.resharded.hosted or name in parts.resharded.parked
    place = HOST if there else rank.device
    return lambda x: take(x).to(place)


class LocalStep:
    """What a rank runs each step. `__call__` takes the whole batch as path → tensor, or this rank's part of it as a
    `LocalBatch`, and returns the global loss.

    `parameters` maps each parameter's name to the part that this rank updates, a leaf whose ``.grad`` is this rank's
    part of the gradient. `leaves` maps the program's inputs to what it reads: the same tensors, unless weights are put
    together again after an update in parts.
    """

    def __init__(
        self,
        parts: Partition,
        rank: Rank,
        values: Mapping[str, torch.Tensor],
        optimizer: OptimizerFactory | None,
        *,
        clip_norm: float | None = None,
        bucket_bytes: int | None = None,
        cuts: Sequence[int] = (),
        held: Collection[str] = (),
    ) -> None:
        """`values`: input name → whole tensor of every parameter, buffer and constant, or this rank's part already for
        the names in `held`. `bucket_bytes`: of gradients that are reduced together, instead of what the plan's
        ``fusion`` says."""
        self.parts, self.rank, self.world = parts, rank, rank.comm
        self.pipe = Pipeline(parts, rank.comm) if parts.plan.stages else None
        if self.pipe is not None:
            rank.comm = self.pipe.comm  # from here on, the ranks that share its stages
        self.mesh = rank.comm.mesh
        self.handle = Handle(rank.comm)
        rank.runs_on(parts.plan.mesh)
        cut = parts.micro_batches > 1 or self.pipe is not None
        in_time = micro_batches_of(parts, rank.comm.rank) if cut else None
        if self.pipe is not None and in_time is not None:
            in_time = self.pipe.begin(in_time)
        self.graph: Graph = in_time.programs[0] if in_time is not None else parts.local(rank.comm.rank)
        self.layouts = parts.resharded.layouts
        self.clip_norm = clip_norm
        self.leaves: dict[str, torch.Tensor] = {}
        self.weights: dict[str, torch.nn.Parameter] = {}  # trained leaves, as the program reads them
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.inputs = {i.name: i for i in parts.resharded.graph.inputs}
        self._named = {(i.role, i.target): i.name for i in self.inputs.values()}
        for name, entry in self.inputs.items():
            if entry.role != "batch" and (self.pipe is None or self.pipe.holds(name)):
                value = values[name].to(self._place(name, values[name].device))
                self._make_leaf(entry, value, name in held)
        self.batches = BatchParts(
            parts, rank.comm.rank, self.world.rank, lambda name: self._place(name, rank.device)
        )
        self.parked = Parked({n: self.leaves[n] for n in parts.resharded.parked}, rank.device)
        self.sums = Accumulation(summed_first(parts))
        stage_sums = {s: Accumulation(self.sums.names) for s in (self.pipe.mine if self.pipe else ())}
        self._all_sums = (self.sums, *stage_sums.values())
        late = late_values(self.graph if in_time is None else in_time.late)
        if self.pipe is not None:  # its loss is sent on as soon as it is there
            late = frozenset()
        copy_of = in_time.copy_of if in_time is not None else {}
        keeps = keeps_of(self.graph, in_copies(parts.resharded.keeps, parts.copies))
        stashes = in_copies(parts.stashes, parts.copies)
        again = Again() if keeps or stashes or any(n.kwarg("again") for n in self.graph.nodes) else None
        brought = {n.name: self.parked.homes[n.uses[0]] for n in self.graph.nodes if is_fetch(n)}
        self.fetches = None
        if again is not None and brought:
            self.fetches = Fetches(again, self.parked.link, fetch_runs(self.graph), brought)
        room = room_bytes(self.graph, stashes, parts.plan.mesh, rank.comm.rank)
        store = Store(again, rank.device, room) if again is not None and stashes else None
        hosts = frozenset(
            n.name for n in self.graph.nodes if parts.plan.hosts and parts.on_host(of_one(n, copy_of))
        )
        build = functools.partial(
            build_module,
            rank=rank,
            handle=self.handle,
            late=late,
            again=again,
            keeps=keeps,
            hosts=hosts,
            copy_of=copy_of,
            stashes=stashes,
            store=store,
            settled=settled_before(self.graph, stashes),
            fetches=self.fetches,
        )
        queue = Queue() if self.pipe is not None and self.pipe.splits_backward else None
        stages: dict[int, list[Program]] = {}
        if self.pipe is not None and in_time is not None:
            for s, found in self.pipe.segments(in_time).items():
                own = functools.partial(build, sums=stage_sums[s], queue=queue)
                stages[s] = modules_in_time(found, parts.plan.mesh, self._enter, own, 1)
            programs = [program for found in stages.values() for program in found]
        else:
            build = functools.partial(build, sums=self.sums)
            graphs = [self.graph] if in_time is None else in_time.programs
            found = [split_segments(graph, cuts) for graph in graphs]
            programs = modules_in_time(found, parts.plan.mesh, self._enter, build, parts.copies)
        if self.pipe is not None and in_time is not None:
            graphs = [segment.graph for segments, _ in programs for segment in segments]
            graphs += [terms for one in in_time.rounds for terms in one.terms]
            self.batches.only(i.name for graph in graphs for i in graph.inputs)
        segments, modules = programs[0]
        self.modules, self.programs = modules, programs
        described = [g for g in pending_gradients(parts) if g.name in self.weights]
        pending = [(self.weights[g.name], g.axes) for g in described]
        self.sharded = self._split_updates(bucket_bytes)
        size = gradient_bytes(parts.plan) if bucket_bytes is None else bucket_bytes
        with self.parked.away():  # buckets lie where gradients arrive
            self.buckets = GradientBuckets(
                rank.comm,
                pending,
                self._all_uses(programs),
                size,
                described,
                self.sharded.of,
                scattered_each_time(parts),
            )
        self.hosted: HostUpdate | None = None
        if "optimizer" in parts.plan.techniques.offload:
            targets = {self.inputs[n].target: home for n, home in self.parked.homes.items()}
            self.hosted = HostUpdate(self.parameters, targets)
            self.parameters = dict(self.hosted.masters)
        trained = list(self.parameters.values())
        self.optimizer = optimizer(trained) if optimizer is not None and trained else None
        if isinstance(self.optimizer, torch.optim.Optimizer):
            apart_by_device(self.optimizer)
        if optimizer is not None and trained and not isinstance(self.optimizer, torch.optim.Optimizer):
            raise RunError(
                f"optimizer(parameters) gave a {type(self.optimizer).__name__}, not a torch.optim.Optimizer",
                hint="optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)",
            )
        saving = contextlib.nullcontext if again is None else again.saving
        scale = loss_scale(parts)
        self.executor: Executor | Pipelined
        if self.pipe is not None:
            self.executor = Pipelined(
                self.pipe,
                stages,
                self.leaves,
                self.buckets,
                self._update,
                self._enter,
                stage_sums,
                self.graph.loss,
                rank.device,
                queue,
                saving,
                scale,
            )
        else:
            self.executor = Executor(
                segments, modules, self.leaves, self.buckets, self._update, saving, scale, programs[1:]
            )
        self.executor.kinds["reduce_wait"] = lambda _: self._reduced()
        self.actions, self.in_time = plain_actions(len(segments)), None
        if in_time is not None:
            takers = [functools.partial(self.batches.taken, number) for number in range(parts.micro_batches)]
            self.in_time = InTime(in_time, self.executor, self._enter, build, takers)
            if isinstance(self.executor, Pipelined):
                self.executor.time = self.in_time
            rounds = len(in_time.rounds)
            self.actions = (
                actions_in_time(rounds, parts.micro_batches, len(segments), parts.copies)
                if self.pipe is None
                else self.pipe.actions(rounds)
            )

    def _place(self, name: str, device: torch.device) -> torch.device:
        """Where an input lives: in the host's memory, or on the given device."""
        found = self.parts.resharded
        return HOST if name in found.hosted or name in found.parked else device

    def _make_leaf(self, entry: Input, value: torch.Tensor, held: bool) -> None:
        local = value.detach()
        if not held:
            local = slicer(self.layouts[entry.name], self.mesh, self.rank.comm.rank)(local)
        if entry.role == "parameter" and entry.needs_grad:
            # A whole parameter stays the user's own tensor; a cut one gets memory of its own, so the rest can be freed.
            whole = local.shape == value.shape
            if whole and isinstance(value, torch.nn.Parameter):
                leaf = value
            elif held:
                leaf = torch.nn.Parameter(local)
            else:
                leaf = torch.nn.Parameter(local.clone(memory_format=torch.contiguous_format))
            self.parameters[entry.target] = self.weights[entry.name] = self.leaves[entry.name] = leaf
        else:
            self.leaves[entry.name] = local if local.shape == value.shape else local.clone()

    def _split_updates(self, bucket_bytes: int | None) -> ShardedUpdate:
        """The parts of weights that this rank updates, in the place of the weights among the parameters."""
        kinds = (w.device.type for w in self.weights.values())
        device = next((kind for kind in kinds if kind != "cpu"), "cpu")
        mine = {name: update for name, update in updates(self.parts).items() if name in self.weights}
        groups = (
            replace(group, members=tuple(m for m in group.members if m.name in mine))
            for group in gathers(self.parts, bucket_bytes, device)
        )
        made = ShardedUpdate(self.rank.comm, mine, self.weights, [g for g in groups if g.members])
        for name, shard in made.shards.items():
            self.parameters[self.inputs[name].target] = shard.leaf
        return made

    def _enter(self, micro_batch: int) -> None:
        self.rank.micro_batch = micro_batch
        self.sums.last = micro_batch + self.parts.copies >= self.parts.micro_batches

    def _all_uses(self, programs: Sequence[Program]) -> list[dict[int, int]]:
        """How often each backward (in a pipeline, each step) reaches the weights."""
        if self.pipe is None:
            return [self._uses(segments) for segments, _ in programs]
        return [self._uses(segment for segments, _ in programs for segment in segments)]

    def _uses(self, segments: Iterable[Segment]) -> dict[int, int]:
        counts: dict[int, int] = {}
        for segment in segments:
            for entry in segment.graph.inputs:
                leaf = self.leaves.get(entry.name)
                if entry.role == "parameter" and leaf is not None:
                    counts[id(leaf)] = counts.get(id(leaf), 0) + 1
        return counts

    def local_batch(self, batch: Given) -> dict[str, torch.Tensor]:
        """This rank's part of a batch (of its first micro-batch). Raises BatchError for tensors that differ from the
        example."""
        self.batches.check(batch)
        return self.batches.taken(0, batch)

    def __call__(self, batch: Given) -> torch.Tensor:
        """Forward, backward and update on the whole batch; the global loss."""
        self._forget_gradients()
        wanted = [v for _, v in (*self.graph.outputs, *self.graph.mutations)]
        results = self._run(self.actions, batch, wanted)
        for target, value in self.graph.mutations:
            if value in results:
                self.leaves[self._named["buffer", target]].copy_(results[value])
        self.rank.step += 1
        return results[self.graph.loss]

    def gradients(self, batch: Given) -> torch.Tensor:
        """The loss and, in ``.grad``, the gradients, without an update; buffers and the step count stay as they are."""
        self._forget_gradients()
        actions = [a for a in self.actions if a.kind != "update"]
        return self._run(actions, batch, [self.graph.loss])[self.graph.loss]

    def _forget_gradients(self) -> None:
        for parameter in (*self.weights.values(), *self.parameters.values()):
            parameter.grad = None
        for sums in self._all_sums:
            sums.begin()

    def _run(self, actions: Sequence[Action], batch: Given, wanted: Sequence[str]) -> dict[str, torch.Tensor]:
        local = self.local_batch(batch)
        if self.fetches is not None:
            self.fetches.begin()
        with self.handle.deferring(), self.parked.away():
            if self.in_time is None:
                return self.executor.run(actions, local, wanted)
            self.in_time.begin(batch)
            try:
                return self.executor.run(actions, {}, wanted)
            finally:
                self.in_time.end()

    def _reduced(self) -> None:
        self.buckets.finish()
        self.sharded.take_gradients()
        if self.pipe is not None:
            self._sum_over_stages(self.pipe)
        if self.hosted is not None:
            self.hosted.take_gradients()

    def _sum_over_stages(self, pipe: Pipeline) -> None:
        """Gradients of weights that stages of several ranks use are added up over these."""
        assert isinstance(self.executor, Pipelined)
        for number, (name, places) in enumerate(pipe.shared(self.weights).items()):
            shard = self.sharded.shards.get(name)
            leaf = self.weights[name] if shard is None else shard.leaf
            mine = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            leaf.grad = pipe.comm.sum_over(mine, places, self.executor.first_free_tag + 2 + number)

    def _update(self) -> None:
        if self.clip_norm is not None:
            clip_by_global_norm(self, self.clip_norm)
        if self.optimizer is not None:
            if self.hosted is not None:
                self.optimizer.step()
                self.hosted.give_back()
            else:
                with self.parked.present():
                    self.optimizer.step()
            self.sharded.gather()

    def bucket_summary(self) -> list[tuple[tuple[str, ...], int, int]]:
        """(axes, number of gradients, bytes) of each gradient reduction."""
        return [(b.axes, len(b.parameters), b.size_bytes) for b in self.buckets.buckets]

    @property
    def last_tag(self) -> int:
        """A tag of messages between stages that nothing else has."""
        assert isinstance(self.executor, Pipelined)
        return self.executor.first_free_tag + 2 + len(self.inputs)

    def named(self, role: str, target: str) -> str:
        """The program's input for a parameter or buffer of the model."""
        return self._named[role, target]

    def layout_of(self, parameter: str) -> TensorLayout:
        """The layout in which this rank updates a parameter: that of `parameters`."""
        return update_layout(self.parts, self.inputs[self._named["parameter", parameter]])


def apart_by_device(optimizer: torch.optim.Optimizer) -> None:
    """Split groups whose parameters lie on several devices, one group for each: torch updates many tensors in one
    kernel only where all of a group are on one device."""
    for group in list(optimizer.param_groups):
        devices = list(dict.fromkeys(p.device for p in group["params"]))
        for device in devices[1:]:
            there = [p for p in group["params"] if p.device == device]
            group["params"] = [p for p in group["params"] if p.device != device]
            optimizer.add_param_group({**group, "params": there})


def clip_by_global_norm(step: LocalStep, limit: float) -> torch.Tensor:
    """Scale gradients so that their global 2-norm is at most `limit`, as `torch.nn.utils.clip_grad_norm_`
    does on one device.

    Each element counts once: squares are added over the axes that split a parameter, and not over those it repeats on.
    Returns the norm before clipping.
    """
    by_axes: dict[tuple[str, ...], list[torch.Tensor]] = {}
    pipe = step.pipe
    for name, parameter in step.parameters.items():
        if parameter.grad is not None and (pipe is None or pipe.owns(step.named("parameter", name))):
            axes = step.mesh.sort(
                {a for d in step.layout_of(name).dims for a in dim_axes(d) if step.mesh.sizes[a] > 1}
            )
            by_axes.setdefault(axes, []).append(parameter.grad)
    total: torch.Tensor | None = None
    for axes, gradients in by_axes.items():
        squares = [torch.linalg.vector_norm(g).to(step.rank.device) ** 2 for g in gradients]
        part = torch.stack(squares).sum()
        part = step.rank.comm.all_reduce(part, axes) if axes else part
        total = part if total is None else total + part
    if pipe is not None:
        mine = torch.zeros((), device=step.rank.device) if total is None else total
        total = pipe.comm.sum_over(mine.double(), range(pipe.comm.places), step.last_tag).to(mine.dtype)
    if total is None:
        return torch.zeros(())
    norm = total.sqrt()
    scale = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for parameter in step.parameters.values():
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.device))
    return norm
