"""Executing a reshard: one autograd function that *is* the pair, over collectives that are plain tensor functions."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from meshwright import heartbeat
from meshwright.core.collectives import NOTHING
from meshwright.core.graph import Node
from meshwright.core.mesh import Mesh
from meshwright.partition.insert_reshards import StepText, parse_steps
from meshwright.redistribute.index_maps import Exchange, exchange
from meshwright.runtime import collectives
from meshwright.runtime.accumulation import Accumulation
from meshwright.runtime.collectives import Handle
from meshwright.runtime.dtypes import TORCH_DTYPES
from meshwright.runtime.index import Picker, bring, spread
from meshwright.runtime.recompute import Again

StepTexts = Sequence[StepText]


class Mover:
    """One step on one rank, ready to run on tensors."""

    def __init__(self, plan: Exchange) -> None:
        self.plan = plan
        self.kind, self.axes = plan.kind, plan.axes
        self.collective = kind = plan.collective
        self.run = getattr(collectives, kind.name) if kind is not NOTHING else None
        self.parts = plan.parts if kind.splits else ()
        self.places = () if kind.adds else plan.places
        own = kind.chunks == "own"  # then of what is sent, and of what arrives, by member
        self.sizes = [[s.numel for s in chunks] for chunks in (plan.send, plan.place)] if own else []

    @functools.cached_property
    def taken(self) -> Picker:
        """The selection of a slice."""
        return Picker(self.plan.send[0])

    def __call__(self, x: torch.Tensor, comm: Handle) -> torch.Tensor:
        """Run the step. Never writes to `x`."""
        match self.kind:
            case "slice":
                return self.taken.take(x)
            case "mask":
                return x if self.plan.keeps else torch.zeros_like(x, memory_format=torch.contiguous_format)
            case "pad":
                y = x.new_zeros(self.plan.shape_after)
                Picker(self.plan.place[0]).put(y, x)
                return y
        assert self.run is not None
        if self.collective.chunks == "all":
            return self.run(x, comm, self.axes)
        return self.opened(self.run(self.message(x), *self.sizes, comm, self.axes))

    def message(self, x: torch.Tensor) -> torch.Tensor:
        """Return the buffer that the collective sends: (n,), for a reduce-scatter (members, n)."""
        plan, kind = self.plan, self.collective
        if not kind.splits:
            return _padded(x, plan.padded) if kind.chunks == "padded" else x.reshape(-1)
        if kind.chunks == "padded":
            make = x.new_empty if plan.even else x.new_zeros
            sent = make((len(plan.group), plan.padded))
        else:
            sent = x.new_empty(sum(self.sizes[0]))
        spread(self.parts, x, sent)
        return sent

    def opened(self, received: torch.Tensor) -> torch.Tensor:
        """The tensor after the step, from what the collective gave: (n,), for an all-gather (members, n)."""
        if self.collective.adds:
            return _unpadded(received, self.plan.shape_after)
        y = received.new_empty(self.plan.shape_after)
        bring(self.places, received, y)
        return y


def _padded(x: torch.Tensor, count: int) -> torch.Tensor:
    flat = x.reshape(-1)
    missing = count - flat.numel()
    return flat.contiguous() if missing == 0 else torch.cat([flat, flat.new_zeros(missing)])


def _unpadded(flat: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return flat.narrow(0, 0, math.prod(shape)).view(tuple(shape))


class Pair(torch.nn.Module):
    """The two halves of a reshard on one rank (its `number` on the mesh). `late`: no operator reads the result, so
    backward need not wait. `again`: where to say that backward makes the result again. `sums`: where its gradients are
    added up before they are sent."""

    def __init__(
        self,
        node: Node,
        mesh: Mesh,
        number: int,
        comm: Handle,
        *,
        late: bool = False,
        again: Again | None = None,
        sums: Accumulation | None = None,
    ) -> None:
        super().__init__()
        self.comm, self.again, self.sums, self.name = comm, again, sums, node.name
        self.onward = [Mover(exchange(s, mesh, number)) for s in parse_steps(node.args[1])]
        self.back = [Mover(exchange(s, mesh, number)) for s in parse_steps(node.args[2])]
        wire = node.kwarg("wire")
        self.wire = TORCH_DTYPES[str(wire)] if wire else None
        self.late = late and [m.kind for m in self.onward] == ["all_reduce"]
        self.told = tuple(collective_name(node, way) for way in ("forward", "backward"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The value in its new layout; its gradient comes back through the other half."""
        y = _Reshard.apply(x, self)
        if self.again is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.again.watch(y, x, self.run)
        return y

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """The steps forward, without autograd."""
        return _run(x, self.onward, self.comm, self.told[0])


class _Reshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, pair: Pair) -> torch.Tensor:
        ctx.pair, ctx.leaf = pair, x.is_leaf
        if pair.late:
            say(pair.told[0])
            return collectives.all_reduce_late(x, pair.comm, pair.onward[0].axes)
        y = pair.run(x)
        # A result that is the argument itself must be marked as a view of it for autograd.
        return x.view_as(x) if y is x else y

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]  one result, one gradient
        pair = ctx.pair
        if pair.sums is not None:
            gradient = pair.sums.added(pair.name, gradient)
            if gradient is None:
                return None, None
        sent = gradient if pair.wire is None else gradient.to(pair.wire)
        mine = _run(sent, pair.back, pair.comm, pair.told[1])
        if pair.wire is not None:
            mine = mine.to(gradient.dtype)
        # A leaf keeps its gradient into the next step, and a view would keep all of it.
        lone = ctx.leaf and [step.kind for step in pair.back] == ["slice"]
        return _copied(mine) if lone else mine, None


def collective_name(node: Node, way: str) -> str:
    """Name the collectives of a node for the heartbeat record."""
    return f"%{node.name} {way} ({node.where})" if node.where else f"%{node.name} {way}"


def say(told: str) -> None:
    """Say what the next collective is of; a compiled program says nothing."""
    if not torch.compiler.is_compiling():
        heartbeat.of(told)


def _run(x: torch.Tensor, steps: Sequence[Mover], comm: Handle, told: str) -> torch.Tensor:
    """The steps one after the other. A part of what an earlier step made is copied, so that the rest can go."""
    for number, step in enumerate(steps):
        say(told)
        x = step(x, comm)
        if number and step.kind == "slice":
            x = _copied(x)
    return x


def _copied(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)
