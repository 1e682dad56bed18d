"""Attention with dropout in plain steps, so that its mask is ours. b batch, h heads, q queries, k keys."""

from __future__ import annotations

import math

import torch

from meshwright.runtime.kernels.random import Dropout, keep_mask
from meshwright.runtime.rank import Rank


def probabilities(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Softmax of the scores, ``[..., h, q, k]``."""
    if enable_gqa and k.size(-3) != q.size(-3):
        k = k.repeat_interleave(q.size(-3) // max(k.size(-3), 1), -3)
    scores_bhqk = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.size(-1)) if scale is None else scale)
    if is_causal:
        rows, columns = (torch.arange(n, device=q.device) for n in scores_bhqk.shape[-2:])
        mask = rows[:, None] >= columns
    if mask is not None:
        scores_bhqk = (
            scores_bhqk.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores_bhqk + mask
        )
    return torch.softmax(scores_bhqk, -1)


def values_of(p_bhqk: torch.Tensor, v: torch.Tensor, enable_gqa: bool) -> torch.Tensor:
    """Probabilities times values, heads repeated in groups."""
    if enable_gqa and v.size(-3) != p_bhqk.size(-3):
        v = v.repeat_interleave(p_bhqk.size(-3) // max(v.size(-3), 1), -3)
    return p_bhqk @ v


def attention_dropout(
    rank: Rank,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    p: float,
    is_causal: bool,
    slot: int,
    layout_text: str,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention whose probabilities (of the given layout) lose elements."""
    p_bhqk = probabilities(q, k, mask, is_causal, scale, enable_gqa)
    kept = keep_mask(rank, p, slot, layout_text, q.device)
    return values_of(Dropout.apply(p_bhqk, kept, p), v, enable_gqa)
