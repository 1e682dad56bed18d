"""Our own operators: those that communicate, or count by global positions.

Called as ``kernel(rank, *args, **kwargs)``, they take plain tensors and literals and are differentiable by autograd.
Those that communicate define their own backward; the rank travels in `ctx`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshwright.errors import RuleError, did_you_mean
from meshwright.runtime.kernels import attention, expert_block, experts, halo, losses, random, rows
from meshwright.runtime.kernels.random import exact_dropout_mask
from meshwright.runtime.kernels.reference import reference_dropout

KERNELS: dict[str, Callable[..., Any]] = {
    "meshwright.dropout": random.dropout,
    "meshwright.dropout_mask": random.dropout_mask,
    "meshwright.random": random.random,
    "meshwright.bernoulli": random.bernoulli,
    "meshwright.attention_dropout": attention.attention_dropout,
    "meshwright.embedding_rows": rows.embedding_rows,
    "meshwright.embedding_bag": rows.embedding_bag,
    "meshwright.column_rows": rows.column_rows,
    "meshwright.experts": expert_block.experts,
    "meshwright.expert_linear": experts.expert_linear,
    "meshwright.nothing": rows.nothing,
    "meshwright.take_iota": rows.take_iota,
    "meshwright.local_places": rows.local_places,
    "meshwright.batch_norm_sync": rows.batch_norm_sync,
    "meshwright.batch_norm_fixed": rows.batch_norm_fixed,
    "meshwright.halo": halo.halo,
    "meshwright.all_reduce": losses.all_reduce,
    "meshwright.target_weight": losses.target_weight,
    "meshwright.cross_entropy_split": losses.cross_entropy_split,
}


def kernel(name: str) -> Callable[..., Any]:
    """A kernel by its operator name. Raises RuleError for an unknown one."""
    if name not in KERNELS:
        raise RuleError(f"there is no kernel {name!r}", hint=did_you_mean(name, KERNELS))
    return KERNELS[name]


__all__ = ["KERNELS", "exact_dropout_mask", "kernel", "reference_dropout"]
