"""Halo exchange: windows over a sharded image read elements of neighbouring shards, whose gradients are sent back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from meshwright.runtime.rank import Rank

Runs = Sequence[tuple[int, int]]


class Halo(torch.autograd.Function):
    """This rank's part of an image with what its windows need around it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        dim: int,
        send: Runs,
        receive: Sequence[int],
        me: int,
        pad: tuple[int, int],
        fill: float,
        axes: Sequence[str],
        rank: Rank,
    ) -> torch.Tensor:
        """Elements of members before this one, its own, those of members after it; `fill` at the image's edges."""
        ctx.shape, ctx.dim, ctx.send, ctx.receive, ctx.me = x.shape, dim, send, receive, me
        ctx.pad, ctx.axes, ctx.rank = pad, axes, rank
        parts = [x.narrow(dim, start, n) for start, n in send]
        got = _exchanged(rank, parts, [_shape(x.shape, dim, n) for n in receive], axes)
        edges = [x.new_full(_shape(x.shape, dim, n), fill) for n in pad]
        pieces = [edges[0], *got[:me], x, *got[me:], edges[1]]
        return torch.cat([p for p in pieces if p.shape[dim]] or [x], dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient of what was received goes back to its owner, who adds it to that of its own."""
        grad, dim = grads[0], ctx.dim
        before, own = ctx.pad[0] + sum(ctx.receive[: ctx.me]), ctx.shape[dim]
        place, parts = ctx.pad[0], []
        for member, n in enumerate(ctx.receive):
            place += own if member == ctx.me else 0
            parts.append(grad.narrow(dim, place, n))
            place += n
        shapes = [_shape(ctx.shape, dim, n) for _, n in ctx.send]
        back = _exchanged(ctx.rank, parts, shapes, ctx.axes)
        mine = grad.narrow(dim, before, own).clone(memory_format=torch.contiguous_format)
        for (start, n), term in zip(ctx.send, back, strict=True):
            if n:
                mine.narrow(dim, start, n).add_(term)
        return (mine, *([None] * 8))


def _exchanged(
    rank: Rank, parts: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]], axes: Sequence[str]
) -> list[torch.Tensor]:
    """A part to each member of the group, and one of each shape from it."""
    if not axes:
        return [part.new_empty(shape) for part, shape in zip(parts, shapes, strict=True)]
    sizes = [torch.Size(s).numel() for s in shapes]
    flat = torch.cat([p.reshape(-1) for p in parts])
    got = rank.comm.all_to_all(flat, [p.numel() for p in parts], sizes, axes)
    return [piece.view(shape) for piece, shape in zip(got.split(sizes), shapes, strict=True)]


def _shape(shape: Sequence[int], dim: int, n: int) -> tuple[int, ...]:
    return (*shape[:dim], n, *shape[dim + 1 :])


def halo(
    rank: Rank,
    x: torch.Tensor,
    dim: int,
    send: Runs,
    receive: Sequence[int],
    me: int,
    pad: tuple[int, int],
    fill: float,
    axes: Sequence[str],
) -> torch.Tensor:
    """An image's part with what windows reach beyond it along `dim`. `send`: start and length for each member of the
    group over `axes`, `receive`: lengths from each, `me`: this rank's place in it, `pad`: how much lies outside the
    image, before and after."""
    return Halo.apply(x, dim, send, receive, me, tuple(pad), fill, tuple(axes), rank)
