"""Losses of `torch.nn.functional` that torch composes inside one operator, as the same composition.

Export keeps each as an operator without a rule, which every rank would compute in full, and micro-batches not at all.
Source: the pages of these losses in https://docs.pytorch.org/docs/stable/nn.html#loss-functions.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from meshwright.capture.autocast import is_cast

REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "mean": torch.mean,
    "sum": torch.sum,
}
LEGACY = ("size_average", "reduce")


def composed_loss(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return what is called in place of a loss; None for others, and for one with arguments of old versions."""
    found = LOSSES.get(func)
    if found is None:
        return None
    try:
        given = inspect.signature(func).bind(*args, **kwargs).arguments
    except TypeError:  # which the loss itself says
        return None
    if any(given.pop(name, None) is not None for name in LEGACY):
        return None
    if given.get("reduction", "mean") not in REDUCTIONS:
        return None
    made = found(**{name: _wide(x) for name, x in given.items()})
    return None if made is None else lambda *_, **__: made


def _wide(x: Any) -> Any:
    """Cast a tensor as an autocast casts what losses read."""
    return x.float() if is_cast(x) else x


def _triplet(
    anchor: torch.Tensor,
    positive: torch.Tensor,
    negative: torch.Tensor,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: str = "mean",
) -> torch.Tensor | None:
    if margin <= 0:
        return None
    near, far = F.pairwise_distance(anchor, positive, p, eps), F.pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = torch.minimum(far, F.pairwise_distance(positive, negative, p, eps))
    return REDUCTIONS[reduction]((margin + near - far).clamp(min=0))


def _cosine_embedding(
    input1: torch.Tensor,
    input2: torch.Tensor,
    target: torch.Tensor,
    margin: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor | None:
    if not input1.dim() == input2.dim() == target.dim() + 1 <= 2:
        return None
    lengths = ((input1 * input1).sum(-1) + 1e-12) * ((input2 * input2).sum(-1) + 1e-12)
    cosine = (input1 * input2).sum(-1) / lengths.sqrt()
    zero = torch.zeros_like(cosine)
    alike = torch.where(target == 1, 1 - cosine, zero)
    return REDUCTIONS[reduction](alike + torch.where(target == -1, (cosine - margin).clamp(min=0), zero))


def _margin_ranking(
    input1: torch.Tensor,
    input2: torch.Tensor,
    target: torch.Tensor,
    margin: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor | None:
    if not input1.dim() == input2.dim() == target.dim():
        return None
    return REDUCTIONS[reduction]((-target * (input1 - input2) + margin).clamp(min=0))


def _hinge_embedding(
    input: torch.Tensor, target: torch.Tensor, margin: float = 1.0, reduction: str = "mean"
) -> torch.Tensor:
    zero = torch.zeros_like(input)
    apart = torch.where(target != 1, (margin - input).clamp(min=0), zero)
    return REDUCTIONS[reduction](apart + torch.where(target != -1, input, zero))


def _poisson_nll(
    input: torch.Tensor,
    target: torch.Tensor,
    log_input: bool = True,
    full: bool = False,
    eps: float = 1e-8,
    reduction: str = "mean",
) -> torch.Tensor:
    loss = input.exp() - target * input if log_input else input - target * (input + eps).log()
    if full:
        known = target * target.log() - target + 0.5 * (2 * math.pi * target).log()
        loss = loss + known.masked_fill(target <= 1, 0)
    return REDUCTIONS[reduction](loss)


def _gaussian_nll(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor | None:
    """A variance below zero, which torch looks for, gives NaN. Where it is below `eps`, its gradient is as if not."""
    if not isinstance(var, torch.Tensor):
        if var < 0:
            return None
        var = input.new_full((), var).expand_as(input)
    if var.shape != input.shape:
        if input.shape[:-1] == var.shape:
            var = var.unsqueeze(-1)
        elif input.shape[:-1] != var.shape[:-1] or var.shape[-1] != 1:
            return None
    kept = var + (var.clamp(min=eps) - var).detach()
    loss = 0.5 * (kept.log() + (input - target) ** 2 / kept)
    loss = loss.masked_fill(var < 0, math.nan)
    return REDUCTIONS[reduction](loss + 0.5 * math.log(2 * math.pi) if full else loss)


LOSSES: dict[Any, Callable[..., torch.Tensor | None]] = {
    F.triplet_margin_loss: _triplet,
    F.cosine_embedding_loss: _cosine_embedding,
    F.margin_ranking_loss: _margin_ranking,
    F.hinge_embedding_loss: _hinge_embedding,
    F.poisson_nll_loss: _poisson_nll,
    F.gaussian_nll_loss: _gaussian_nll,
}


__all__ = ["composed_loss"]
