"""Cross entropy with sharded classes, and the counts of losses with sharded examples. n examples, c classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from meshwright.runtime.rank import Rank


def all_reduce(rank: Rank, x: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
    """The sum over a group, without a gradient (counts)."""
    return rank.comm.all_reduce(x, axes)


def target_weight(rank: Rank, target: torch.Tensor, weight: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """The sum of the class weights of the targets that count."""
    valid = target != ignore_index
    return (weight.detach()[torch.where(valid, target, 0)] * valid).sum()


class SplitCrossEntropy(torch.autograd.Function):
    """A maximum and a log-sum-exp over the ranks; the gradient, softmax minus one-hot, is local."""

    @staticmethod
    def forward(
        ctx: Any,
        x_nc: torch.Tensor,
        here_n: torch.Tensor,
        valid_n: torch.Tensor,
        classes: int,
        smoothing: float,
        rank: Rank,
        axes: Sequence[str],
    ) -> torch.Tensor:
        """Loss of each example. `here_n` is its class's local column, or -1; ignored examples have a loss of 0."""
        wide = x_nc if x_nc.dtype == torch.float64 else x_nc.float()
        peak_n = wide.amax(1) if wide.size(1) else wide.new_full((wide.size(0),), -torch.inf)
        peak_n = rank.comm.all_reduce(peak_n, axes, "max")
        hit_n = (here_n >= 0) & valid_n
        column_n = torch.where(hit_n, here_n, 0)
        mine_n = wide.gather(1, column_n[:, None])[:, 0] if wide.size(1) else peak_n
        parts = [torch.exp(wide - peak_n[:, None]).sum(1), torch.where(hit_n, mine_n, 0)]
        parts += [wide.sum(1)] if smoothing else []
        total, picked, *spread = rank.comm.all_reduce(torch.stack(parts), axes)
        log_n = peak_n + torch.log(total)
        loss_n = log_n - picked
        if smoothing:
            loss_n = (1 - smoothing) * loss_n + smoothing * (log_n - spread[0] / classes)
        ctx.save_for_backward(x_nc, log_n, hit_n, column_n, valid_n)
        ctx.classes, ctx.smoothing = classes, smoothing
        return torch.where(valid_n, loss_n, 0).to(x_nc.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient of this rank's columns."""
        x_nc, log_n, hit_n, column_n, valid_n = ctx.saved_tensors
        grad_n = torch.where(valid_n, grads[0], 0).to(log_n.dtype)
        grad_nc = torch.exp(x_nc.to(log_n.dtype) - log_n[:, None])
        if ctx.smoothing:
            grad_nc -= ctx.smoothing / ctx.classes
        if grad_nc.size(1):
            grad_nc.scatter_add_(1, column_n[:, None], hit_n[:, None].to(grad_nc.dtype) * (ctx.smoothing - 1))
        grad_nc *= grad_n[:, None]
        return grad_nc.to(x_nc.dtype), None, None, None, None, None, None


def cross_entropy_split(
    rank: Rank,
    x: torch.Tensor,
    target: torch.Tensor,
    places: torch.Tensor,
    start: int,
    classes: int,
    reduction: int,
    ignore_index: int,
    smoothing: float,
    axes: Sequence[str],
) -> torch.Tensor:
    """Cross entropy of logits ``[n, c/axes, ...]``; `places - start` are the targets' local columns.

    `reduction` is torch's number: 0 none, 1 mean, 2 sum.
    """
    single = x.dim() == 1
    x_nc = x[None] if single else x.movedim(1, -1).reshape(-1, x.size(1))
    valid_n = (target != ignore_index).reshape(-1)
    astray_n = valid_n & ((target < 0) | (target >= classes)).reshape(-1)
    if target.device.type == "cpu" and bool(astray_n.any()):
        raise IndexError(f"Target {target.reshape(-1)[astray_n][0].item()} is out of bounds.")
    here_n = (places - start).reshape(-1)
    here_n = torch.where((here_n >= 0) & (here_n < x_nc.size(1)), here_n, -1)
    # Elsewhere the lookup of the column finds it: an answer is not waited for.
    here_n = torch.where(astray_n, x_nc.size(1), here_n)
    loss_n = SplitCrossEntropy.apply(x_nc, here_n, valid_n, classes, smoothing, rank, tuple(axes))
    match reduction:
        case 0:
            return loss_n.reshape(target.shape)
        case 1:
            return loss_n.sum() / valid_n.sum()
        case _:
            return loss_n.sum()
