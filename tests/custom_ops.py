"""Operators of the user's that tests bring along."""

from __future__ import annotations

import torch
from torch.library import CustomOpDef


def doubling(name: str) -> CustomOpDef:
    """An operator of that name which doubles a tensor, without a gradient and without a rule."""

    @torch.library.custom_op(name, mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @twice.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    return twice
