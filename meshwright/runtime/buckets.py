"""Reduces partial gradients in buckets, asynchronously, while backward still runs.

A bucket is one flat buffer for gradients that are partial on the same axes and have one dtype. When autograd has
computed a parameter's gradient, a hook copies it into its slot and makes ``.grad`` a view of it; a bucket whose slots
are all filled is reduced at once. If backward runs several times (micro-batches), the first gradient is copied into its
slot, the others are added there, and the bucket is reduced in the last backward. A large gradient that nothing else can
reference is a bucket of its own, reduced in place: that saves the copy and the buffer. Buckets start in one order on
all ranks, as collectives must. `partition/buckets.py` decides which gradients share a bucket. Gradients of parameters
whose update is sharded go into buckets that reduce-scatter (`runtime/sharded_update.py`), one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from meshwright import heartbeat
from meshwright.partition.buckets import BUCKET_BYTES, BucketBytes, Gradient, Group, fill
from meshwright.runtime.communicator import Communicator, Work
from meshwright.runtime.dtypes import TORCH_DTYPES
from meshwright.runtime.sharded_update import ScatterBucket, Shard

Pending = tuple[torch.nn.Parameter, tuple[str, ...]]  # a parameter and the axes of its gradient


@dataclass
class Bucket:
    """One flat buffer and the parameters whose gradients it holds; none for one that is reduced where it lies.

    `missing` counts the backward passes still to reach each.
    """

    axes: tuple[str, ...]
    parameters: list[torch.nn.Parameter]
    buffer: torch.Tensor | None = None
    views: list[torch.Tensor] = field(default_factory=list)
    missing: dict[int, int] = field(default_factory=dict)
    filled: set[int] = field(default_factory=set)  # places with a gradient of this step
    work: Work | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the gradients."""
        return sum(p.numel() * p.element_size() for p in self.parameters)

    def begin(self) -> None:
        """Forget the last step."""
        self.work = None
        self.filled.clear()

    def add(self, index: int) -> None:
        """Bring a gradient to where it is reduced. Autograd adds the next one to it there."""
        parameter = self.parameters[index]
        gradient = parameter.grad
        if self.buffer is None or gradient is None:
            return
        view = self.views[index]
        if gradient is view:
            return
        view.add_(gradient) if index in self.filled else view.copy_(gradient)
        self.filled.add(index)
        parameter.grad = view if view.dtype == parameter.dtype else None

    def place(self, index: int) -> None:
        """Have a gradient where it is reduced; zeros where there is none."""
        parameter = self.parameters[index]
        if self.buffer is None:
            parameter.grad = (
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
            )
            return
        self.add(index)
        if index not in self.filled:
            view = self.views[index].zero_()
            parameter.grad = view if view.dtype == parameter.dtype else None

    def start(self, comm: Communicator) -> None:
        """Start the reduction."""
        reduced = self.parameters[0].grad if self.buffer is None else self.buffer
        assert reduced is not None
        self.work = comm.all_reduce_start(reduced, self.axes)

    def settle(self, comm: Communicator) -> None:
        """Nothing: a sum needs no room to be made."""

    def finish(self, comm: Communicator) -> None:
        """Wait for the sums."""
        assert self.work is not None
        self.work.wait()
        self.work = None
        for parameter, view in zip(self.parameters, self.views, strict=False):
            if view.dtype != parameter.dtype:  # added up in another dtype
                parameter.grad = view.to(parameter.dtype)


class GradientBuckets:
    """The buckets of a step: `begin`, then for each turn `enter`, backward and `finish`. There is nothing to enter
    where a step is one turn. Between turns gradients arrive and stay where they are: what the next one reduces, it
    reduces with its own."""

    def __init__(
        self,
        comm: Communicator,
        pending: Sequence[Pending],
        uses: Sequence[Mapping[int, int]] = ({},),
        bucket_bytes: BucketBytes = BUCKET_BYTES,
        described: Sequence[Gradient] | None = None,
        shards: Mapping[int, Shard] | None = None,
        each_time: bool = False,
    ) -> None:
        """Create the buckets of a step.

        `pending`: parameters with the axes of their gradients, in forward order. `uses`: for each turn, id of a
        parameter → the number of backward passes that reach it, 1 if it is not named. `each_time`: buckets that scatter
        do so in every turn, not only in the last. `described`: one for each
        parameter, with the sizes by which all ranks fill their buckets; by default this rank's own. `shards`: id of a
        parameter → its shard, if its update is sharded.
        """
        self.comm, self.uses, self.each_time = comm, uses, each_time
        self.programs = 1  # that have these buckets
        made = list(_buckets(pending, bucket_bytes, described, shards or {}))
        self.groups = [group for group, _ in made]
        self.buckets = [bucket for _, bucket in made]
        self._told = {id(b): f"gradients, bucket {n}" for n, b in enumerate(self.buckets)}
        self._place = {id(p): (b, i) for b in self.buckets for i, p in enumerate(b.parameters)}
        self._next = 0
        self._active = self.buckets  # those that this backward reduces, in their order
        self._reduced_now = {id(b) for b in self.buckets}
        self.heard: dict[int, torch.Tensor] | None = None  # id of a parameter → the norm of its gradient here
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._arrived) for b in self.buckets for p in b.parameters
        ]

    def same_as(self, other: GradientBuckets) -> bool:
        """True if both reduce the same gradients in the same buckets."""
        mine, theirs = ([id(p) for b in x.buckets for p in b.parameters] for x in (self, other))
        return self.comm is other.comm and mine == theirs and self.groups == other.groups

    def serve(self, uses: Sequence[Mapping[int, int]], each_time: bool) -> None:
        """Before a step of one of the programs that share them."""
        self.uses, self.each_time = uses, each_time

    def begin(self) -> None:
        """Before the first backward of a step: forget the gradients of the last one."""
        for bucket in self.buckets:
            bucket.begin()
            bucket.missing = {}
            for parameter in bucket.parameters:
                parameter.grad = None
        if len(self.uses) == 1 and not self.each_time:
            self.enter(0)

    def rest(self) -> None:
        """Before a backward that is reduced nowhere: gradients stay where autograd puts them."""
        for bucket in self.buckets:
            bucket.missing = {}

    def enter(self, turn: int, last: bool | None = None) -> None:
        """Before the backward of a turn. `last`: of the step; by default the last of all turns is."""
        last = turn == len(self.uses) - 1 if last is None else last
        uses = self.uses[turn]
        scattered = [
            b
            for b in self.buckets
            if isinstance(b, ScatterBucket) and self.each_time and any(id(p) in uses for p in b.parameters)
        ]
        self._next, self._active = 0, self.buckets if last else scattered
        self._reduced_now = {id(b) for b in self._active}
        for bucket in self.buckets:
            bucket.missing = {i: uses.get(id(p), 1) for i, p in enumerate(bucket.parameters)}

    def _arrived(self, parameter: torch.Tensor) -> None:
        bucket, index = self._place[id(parameter)]
        if index not in bucket.missing:
            return
        bucket.missing[index] -= 1
        if bucket.missing[index]:
            bucket.add(index)
        else:
            del bucket.missing[index]
            if id(bucket) in self._reduced_now:
                if self.heard is not None:
                    self._hear(bucket, index)
                bucket.place(index)
                self._start_ready()
            else:
                bucket.add(index)

    def _hear(self, bucket: Bucket | ScatterBucket, index: int) -> None:
        """Note the norm of what this rank has of a gradient before it is added up with the others'."""
        assert self.heard is not None
        bucket.add(index)
        parameter = bucket.parameters[index]
        mine = parameter.grad
        if isinstance(bucket, Bucket) and bucket.buffer is not None:
            mine = bucket.views[index]
        if mine is not None:
            self.heard[id(parameter)] = norm_of(mine)

    def _start_ready(self) -> None:
        while self._next < len(self._active) and not self._active[self._next].missing:
            if self._next:
                self._active[self._next - 1].settle(self.comm)
            heartbeat.of(self._told[id(self._active[self._next])])
            self._active[self._next].start(self.comm)
            self._next += 1

    def finish(self) -> None:
        """Start what no gradient has reached (as zeros, so that all ranks agree) and wait for everything that this
        backward reduces."""
        for bucket in self._active:
            for index in bucket.missing:
                bucket.place(index)
            bucket.missing = {}
        self._start_ready()
        for bucket in self._active:
            bucket.finish(self.comm)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()


def norm_of(gradient: torch.Tensor) -> torch.Tensor:
    """Its 2-norm, in float32 at least."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return torch.linalg.vector_norm(gradient.detach(), dtype=wide)


def _buckets(
    pending: Sequence[Pending],
    bucket_bytes: BucketBytes,
    described: Sequence[Gradient] | None,
    shards: Mapping[int, Shard],
) -> Iterator[tuple[Group, Bucket | ScatterBucket]]:
    """The buckets of the shared rule (`partition/buckets.py`), with their memory."""
    if not pending:
        return
    if described is None:
        described = [
            Gradient(str(n), axes, str(p.dtype), p.numel() * p.element_size())
            for n, (p, axes) in enumerate(pending)
        ]
    of = {g.name: p for g, (p, _) in zip(described, pending, strict=True)}
    device = next((p.device.type for p, _ in pending if p.device.type != "cpu"), "cpu")
    for group in fill(described, device, bucket_bytes):
        parameters = [of[g.name] for g in group.members]
        if group.parted:
            yield group, ScatterBucket(group, [shards[id(p)] for p in parameters])
        else:
            yield group, _bucket(group, parameters)


def _bucket(group: Group, parameters: list[torch.nn.Parameter]) -> Bucket:
    if group.alone:
        return Bucket(group.axes, parameters)
    first = parameters[0]
    dtype = TORCH_DTYPES[group.wire] if group.wire else first.dtype
    buffer = torch.empty(sum(p.numel() for p in parameters), dtype=dtype, device=first.device)
    views = buffer.split([p.numel() for p in parameters])
    shaped = [v.view(p.shape) for v, p in zip(views, parameters, strict=True)]
    return Bucket(group.axes, parameters, buffer, shaped)
