"""Sharded updates (optimizer parallel levels 1 and 2: ZeRO-1, ZeRO-2): every rank updates its shard of a weight, then
all gather it.

The optimizer works on leaves of its own. If a rank's shard is contiguous in the weight's memory, the leaf is a view of
it, so the update writes into the weight; else it is a copy. At level 1 the full gradient is reduced and the leaf's
gradient is a slice of it. At level 2 gradients go into buckets of one row for each rank that are reduce-scattered; the
full gradient is freed as soon as it is in its row, and a bucket as soon as the next one starts. In micro-batches full
gradients are accumulated before that, or (`gradient_accumulation_shard`) each rank accumulates its shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from meshwright import heartbeat
from meshwright.core.mesh import Mesh
from meshwright.partition.buckets import Group
from meshwright.partition.sharded_update import Update
from meshwright.redistribute.index_maps import exchange
from meshwright.runtime.communicator import Communicator, Done, Work
from meshwright.runtime.dtypes import TORCH_DTYPES
from meshwright.runtime.index import bring, spread
from meshwright.runtime.reshard import Mover

NO_LEAVES: Mapping[str, torch.nn.Parameter | None] = {}


@dataclass
class Shard:
    """A rank's part of a weight: `leaf` is what the optimizer updates."""

    weight: torch.nn.Parameter
    leaf: torch.nn.Parameter
    update: Update
    part: Mover
    scatter: Mover | None
    gather: Mover

    def take_gradient(self) -> None:
        """Make the leaf's gradient of the weight's, where that is there: a slice of it, or a copy of that if the rest
        is to be freed."""
        whole = self.weight.grad
        if whole is not None:
            mine = self.part.taken.take(whole)
            self.leaf.grad = (
                mine.clone(memory_format=torch.contiguous_format) if self.update.scattered else mine
            )
            if self.update.scattered:
                self.weight.grad = None


def make_shard(
    weight: torch.nn.Parameter,
    update: Update,
    mesh: Mesh,
    rank: int,
    leaf: torch.nn.Parameter | None = None,
) -> Shard:
    """This rank's part of a weight that lies in its use layout. `leaf`: what another program updates of it already."""

    part, gather = Mover(exchange(update.part, mesh, rank)), Mover(exchange(update.gather, mesh, rank))
    scatter = None if update.scatter is None else Mover(exchange(update.scatter, mesh, rank))
    if leaf is None:
        leaf = torch.nn.Parameter(part.taken.take(weight.detach()).contiguous())
    return Shard(weight, leaf, update, part, scatter, gather)


class ScatterBucket:
    """Gradients that are reduced and scattered together. `missing` counts the backward passes still to reach each."""

    def __init__(self, group: Group, shards: Sequence[Shard]) -> None:
        self.axes, self.cut, self.summed = group.axes, group.cut, group.summed
        self.shards = list(shards)
        self.parameters = [s.weight for s in shards]
        self.missing: dict[int, int] = {}
        self.dtype = TORCH_DTYPES[group.wire] if group.wire else self.parameters[0].dtype
        self.widths = [s.scatter.plan.padded if s.scatter else s.leaf.numel() for s in shards]
        self.members = len(shards[0].scatter.plan.group) if shards[0].scatter else 1
        self.even = all(s.scatter is None or s.scatter.plan.even for s in shards)
        self._rows: torch.Tensor | None = None
        self._work: Work | None = None
        self._sum: Work | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the gradients."""
        return sum(p.numel() * p.element_size() for p in self.parameters)

    @property
    def rows_bytes(self) -> int:
        """Bytes of the rows that live now."""
        return 0 if self._rows is None else self._rows.numel() * self._rows.element_size()

    def begin(self) -> None:
        """Forget the last step."""
        self._rows = self._work = self._sum = None
        for shard in self.shards:
            shard.leaf.grad = None

    def add(self, index: int) -> None:
        """Nothing: a gradient that is not scattered yet stays where autograd adds it up."""

    def place(self, index: int) -> None:
        """Copy a gradient into the rows, a rank's part into its row (zeros where there is none), and free it."""
        shard, start = self.shards[index], sum(self.widths[:index])
        if self._rows is None:
            first = self.parameters[0]
            make = first.new_empty if self.even else first.new_zeros
            self._rows = make((self.members, sum(self.widths)), dtype=self.dtype)
        gradient = shard.weight.grad
        if gradient is None:
            self._rows.narrow(1, start, self.widths[index]).zero_()
            return
        rows = self._rows.narrow(1, start, self.widths[index])
        if shard.scatter is not None:
            spread(shard.scatter.parts, gradient, rows)
        else:
            mine = shard.part.taken.take(gradient)
            rows[0].view(mine.shape).copy_(mine)
        shard.weight.grad = None

    def start(self, comm: Communicator) -> None:
        """Start the reduction."""
        assert self._rows is not None
        self._work = comm.reduce_scatter_start(self._rows, self.cut) if self.cut else Done(self._rows[0])

    def settle(self, comm: Communicator) -> None:
        """Wait for the scatter, free the rows, and start the sum over the other axes."""
        if self._work is None:
            return
        mine = self._work.wait()
        self._work = self._rows = None
        heartbeat.of("gradients, over the copies of their parts")
        self._sum = comm.all_reduce_start(mine, self.summed) if self.summed else Done(mine)

    def finish(self, comm: Communicator) -> None:
        """Wait, and hand every leaf its gradient: that of this backward is added to what is there of others."""
        self.settle(comm)
        assert self._sum is not None
        summed = self._sum.wait()
        self._sum = None
        for shard, piece in zip(self.shards, summed.split(self.widths), strict=True):
            leaf = shard.leaf
            mine = piece.narrow(0, 0, leaf.numel()).view(leaf.shape).to(leaf.dtype)
            leaf.grad = mine if leaf.grad is None else leaf.grad.add_(mine)


@dataclass
class GatherBucket:
    """Weights that are gathered together after the update; `alone` for one whose parts come to where they belong."""

    axes: tuple[str, ...]
    shards: list[Shard]
    alone: bool = False
    work: Work | None = field(default=None)

    @property
    def in_place(self) -> bool:
        """True if the weight is gathered in place, without a copy. A user's own weight may have other strides."""
        return self.alone and self.shards[0].weight.is_contiguous()

    def start(self, comm: Communicator) -> None:
        """Send this rank's parts."""
        if self.in_place:
            weight, leaf = self.shards[0].weight.detach(), self.shards[0].leaf.detach()
            rows = weight.view(comm.mesh.count(self.axes), leaf.numel())
            self.work = comm.all_gather_start(leaf.view(-1), self.axes, into=rows)
            return
        mine = [_padded(s.leaf.detach(), s.gather.plan.padded) for s in self.shards]
        self.work = comm.all_gather_start(mine[0] if len(mine) == 1 else torch.cat(mine), self.axes)

    def finish(self) -> None:
        """Put everybody's parts into the weights."""
        assert self.work is not None
        rows = self.work.wait()
        self.work = None
        if self.in_place:
            return
        widths = [s.gather.plan.padded for s in self.shards]
        for shard, block in zip(self.shards, rows.split(widths, dim=1), strict=True):
            bring(shard.gather.places, block, shard.weight.detach())


class ShardedUpdate:
    """The parts of one rank: `shards` by the name of the program's input."""

    def __init__(
        self,
        comm: Communicator,
        updates: Mapping[str, Update],
        weights: Mapping[str, torch.nn.Parameter],
        gathers: Sequence[Group],
        known: Mapping[str, torch.nn.Parameter | None] = NO_LEAVES,
    ) -> None:
        """`gathers`: which weights are gathered together. `known`: what another program updates of some already."""
        self.comm, self.groups = comm, gathers
        self.shards = {
            n: make_shard(weights[n], u, comm.mesh, comm.rank, known.get(n)) for n, u in updates.items()
        }
        self.of = {id(s.weight): s for s in self.shards.values()}
        self.buckets = [
            GatherBucket(g.axes, [self.shards[m.name] for m in g.members], g.alone) for g in gathers
        ]

    def take_gradients(self) -> None:
        """Slice replicated gradients, before the update."""
        for shard in self.shards.values():
            shard.take_gradient()

    def gather(self) -> None:
        """Gather every weight after the update. Two buckets are under way at a time."""
        for number, bucket in enumerate(self.buckets):
            heartbeat.of(f"weights, bucket {number}")
            bucket.start(self.comm)
            if number:
                self.buckets[number - 1].finish()
        if self.buckets:
            self.buckets[-1].finish()


def _padded(x: torch.Tensor, count: int) -> torch.Tensor:
    flat = x.reshape(-1)
    missing = count - flat.numel()
    return flat if missing == 0 else torch.cat([flat, flat.new_zeros(missing)])
