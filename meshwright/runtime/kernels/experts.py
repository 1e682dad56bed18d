"""Rows times the matrix of the expert that each was given to, in the order of the rows. t rows, s choices of a row,
p = t · s pairs, g experts, k and n widths."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import grouped_mm

from meshwright.runtime.rank import Rank

ALIGNED_BYTES = 16  # what torch's grouped product wants rows to be a multiple of
FAST = (torch.bfloat16, torch.float16)  # dtypes that it has one kernel for


def expert_linear(
    rank: Rank, x_tk: torch.Tensor, weight_gkn: torch.Tensor, experts_p: torch.Tensor
) -> torch.Tensor:
    """``x[p // s] @ weight[experts[p]]`` for every pair p. `experts_p` holds numbers below g."""
    return ExpertLinear.apply(x_tk, weight_gkn, experts_p)


class ExpertLinear(torch.autograd.Function):
    """Rows are sorted by their expert for the products, and put back: once more in backward, so that only what goes in
    and the order are kept."""

    @staticmethod
    def forward(
        ctx: Any, x_tk: torch.Tensor, weight_gkn: torch.Tensor, experts_p: torch.Tensor
    ) -> torch.Tensor:
        """The products, pair by pair."""
        order_p, ends_g = _sorted(experts_p, len(weight_gkn))
        ctx.save_for_backward(x_tk, weight_gkn, order_p, ends_g)
        return _back(_products(_rows(x_tk, order_p), weight_gkn, ends_g), order_p)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient of a row is the sum over its choices."""
        x_tk, weight_gkn, order_p, ends_g = ctx.saved_tensors
        grad_pn = grads[0][order_p]
        x_grad = weight_grad = None
        if ctx.needs_input_grad[1]:
            weight_grad = _weights(_rows(x_tk, order_p), grad_pn, ends_g)
        if ctx.needs_input_grad[0]:
            found_pk = _back(_products(grad_pn, weight_gkn.transpose(1, 2), ends_g), order_p)
            x_grad = found_pk if found_pk.shape == x_tk.shape else _sum_of_choices(found_pk, x_tk)
        return x_grad, weight_grad, None


def _sorted(experts_p: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs in the order of their experts, and where those of each end. A GPU sorts short numbers sooner."""
    kind = torch.int16 if count <= torch.iinfo(torch.int16).max else experts_p.dtype
    ordered_p, order_p = torch.sort(experts_p.to(kind), stable=True)
    numbers_g = torch.arange(count, device=experts_p.device, dtype=kind)
    return order_p, torch.searchsorted(ordered_p, numbers_g, right=True, out_int32=True)


def _rows(x_tk: torch.Tensor, order_p: torch.Tensor) -> torch.Tensor:
    choices = len(order_p) // max(len(x_tk), 1)
    return x_tk[order_p // choices if choices > 1 else order_p]


def _back(sorted_pn: torch.Tensor, order_p: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(sorted_pn).index_copy_(0, order_p, sorted_pn)


def _sum_of_choices(found_pk: torch.Tensor, x_tk: torch.Tensor) -> torch.Tensor:
    return found_pk.view(len(x_tk), -1, x_tk.size(1)).sum(1)


def _is_fast(*sides: torch.Tensor) -> bool:
    """True if one kernel takes all groups: its rows must be aligned in memory."""
    aligned = all(side.size(-1) * side.itemsize % ALIGNED_BYTES == 0 and side.numel() for side in sides)
    return aligned and sides[0].is_cuda and sides[0].dtype in FAST


def _products(rows_pk: torch.Tensor, weight_gkn: torch.Tensor, ends_g: torch.Tensor) -> torch.Tensor:
    """Sorted rows times the matrix of each one's expert."""
    if _is_fast(rows_pk, weight_gkn, weight_gkn.transpose(1, 2)):
        return grouped_mm(rows_pk, weight_gkn, offs=ends_g)
    result_pn, start = rows_pk.new_empty(len(rows_pk), weight_gkn.size(2)), 0
    for weight_kn, end in zip(weight_gkn, ends_g.tolist(), strict=True):
        torch.mm(rows_pk[start:end], weight_kn, out=result_pn[start:end])
        start = end
    return result_pn


def _weights(rows_pk: torch.Tensor, grad_pn: torch.Tensor, ends_g: torch.Tensor) -> torch.Tensor:
    """The gradient of each expert's matrix, zeros where it had no rows."""
    if _is_fast(rows_pk, grad_pn):
        return grouped_mm(rows_pk.t(), grad_pn, offs=ends_g)
    result_gkn, start = rows_pk.new_empty(len(ends_g), rows_pk.size(1), grad_pn.size(1)), 0
    for matrix_kn, end in zip(result_gkn, ends_g.tolist(), strict=True):
        torch.mm(rows_pk[start:end].t(), grad_pn[start:end], out=matrix_kn)
        start = end
    return result_gkn
