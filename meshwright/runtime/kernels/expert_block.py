"""The block of experts: up, gate, down, times the weight of each choice, summed over the choices of a row.

t rows, s choices of a row, p = t · s pairs, r pairs of this rank's experts in their order, g experts here, k, h, n, m
widths (h = 2 n where a gate has two halves).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshwright.errors import RuleError, did_you_mean
from meshwright.runtime.kernels.experts import _products, _sorted, _weights
from meshwright.runtime.rank import Rank

Gate = Callable[..., torch.Tensor]


def _halves(activation: Gate) -> Gate:
    def gate(up_rh: torch.Tensor) -> torch.Tensor:
        first, second = up_rh.chunk(2, dim=-1)
        return activation(first) * second

    return gate


def _interleaved(up_rh: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """GPT-OSS: even columns are the gate, odd ones the values."""
    gate = up_rh[..., ::2].clamp(max=limit)
    up = up_rh[..., 1::2].clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def _relu_squared(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x).square()


PLAIN: dict[str, Gate] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": torch.relu,
    "relu_squared": _relu_squared,
}
GATES: dict[str, Gate] = {
    **PLAIN,
    **{f"{name}_gated": _halves(activation) for name, activation in PLAIN.items()},
    "interleaved": _interleaved,
}


def experts(
    rank: Rank,
    x_tk: torch.Tensor,
    up_gkh: torch.Tensor,
    up_bias_gh: torch.Tensor | None,
    down_gnm: torch.Tensor,
    down_bias_gm: torch.Tensor | None,
    experts_p: torch.Tensor,
    weights_p: torch.Tensor,
    gate: str,
    constants: tuple[float, ...] = (),
    start: int = 0,
    total: int = 0,
) -> torch.Tensor:
    """Return what the experts from `start` on add to each row: all of `total` experts, or one rank's summand."""
    if gate not in GATES:
        raise RuleError(f"there is no gate {gate!r}", hint=did_you_mean(gate, GATES))
    every = total in (0, len(up_gkh))
    return Experts.apply(
        x_tk, up_gkh, up_bias_gh, down_gnm, down_bias_gm, experts_p, weights_p, gate, constants, start, every
    )


class Experts(torch.autograd.Function):
    """Saves what goes in, and of this rank's pairs their order and the result of the first product."""

    @staticmethod
    def forward(
        ctx: Any,
        x_tk: torch.Tensor,
        up_gkh: torch.Tensor,
        up_bias_gh: torch.Tensor | None,
        down_gnm: torch.Tensor,
        down_bias_gm: torch.Tensor | None,
        experts_p: torch.Tensor,
        weights_p: torch.Tensor,
        gate: str,
        constants: tuple[float, ...],
        start: int,
        every: bool,
    ) -> torch.Tensor:
        """The weighted sum over choices, rounded as the model rounds it where all experts are here."""
        pairs_r, ends_g = _here(experts_p, start, len(up_gkh), every)
        experts_r = _of_bias(experts_p, pairs_r, start, up_bias_gh, down_bias_gm)
        choices = len(experts_p) // max(len(x_tk), 1)
        up_rh = _products(x_tk[pairs_r // choices], up_gkh, ends_g)
        if up_bias_gh is not None:
            up_rh += up_bias_gh[experts_r]
        ctx.save_for_backward(
            x_tk, up_gkh, up_bias_gh, down_gnm, down_bias_gm, weights_p, up_rh, pairs_r, experts_r, ends_g
        )
        ctx.gate, ctx.constants, ctx.choices = gate, constants, choices
        down_rm = _products(GATES[gate](up_rh, *constants), down_gnm, ends_g)
        if down_bias_gm is not None:
            down_rm += down_bias_gm[experts_r]
        down_rm = down_rm * weights_p[pairs_r, None]
        return _summed(down_rm, pairs_r, len(x_tk), choices)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of rows and weights are terms of a sum over ranks where experts are sharded.

        The gradient of a weight is the product of its result and that result's gradient, which is also that of what
        goes into the second product and *its* gradient: so the second product is not computed again.
        """
        x_tk, up_gkh, up_bias_gh, down_gnm, down_bias_gm, weights_p, up_rh, *order = ctx.saved_tensors
        pairs_r, experts_r, ends_g = order
        rows_r, scale_r1 = pairs_r // ctx.choices, weights_p[pairs_r, None]
        made: list[torch.Tensor | None] = [None] * 11
        wanted = ctx.needs_input_grad
        with torch.enable_grad():
            leaf_rh = up_rh.detach().requires_grad_()
            gated_rn = GATES[ctx.gate](leaf_rh, *ctx.constants)
        grad_rm = grads[0].to(down_gnm.dtype)[rows_r]
        inner_rn = _products(grad_rm, down_gnm.transpose(1, 2), ends_g)
        if wanted[6]:
            found_r = (inner_rn * gated_rn.detach()).sum(-1, dtype=weights_p.dtype)
            if down_bias_gm is not None:
                found_r += (grad_rm * down_bias_gm[experts_r]).sum(-1, dtype=weights_p.dtype)
            made[6] = torch.zeros_like(weights_p).index_copy_(0, pairs_r, found_r)
        if wanted[3]:
            made[3] = _weights((gated_rn.detach() * scale_r1).to(gated_rn.dtype), grad_rm, ends_g)
        if down_bias_gm is not None and wanted[4]:
            weighted_rm = (grad_rm * scale_r1).to(grad_rm.dtype)
            made[4] = torch.zeros_like(down_bias_gm).index_add_(0, experts_r, weighted_rm)
        del grad_rm
        if any(wanted[:3]):
            (grad_rh,) = torch.autograd.grad(gated_rn, leaf_rh, (inner_rn * scale_r1).to(inner_rn.dtype))
            del inner_rn, gated_rn
            if wanted[1]:
                made[1] = _weights(x_tk[rows_r], grad_rh, ends_g)
            if up_bias_gh is not None and wanted[2]:
                made[2] = torch.zeros_like(up_bias_gh).index_add_(0, experts_r, grad_rh)
            if wanted[0]:
                found_rk = _products(grad_rh, up_gkh.transpose(1, 2), ends_g)
                made[0] = _summed(found_rk, pairs_r, len(x_tk), ctx.choices)
        return tuple(made)


def _here(experts_p: torch.Tensor, start: int, count: int, every: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs of the experts from `start` on in the order of experts, and their ends."""
    if every:
        return _sorted(experts_p, count)
    local_p = experts_p - start
    pairs_r = ((local_p >= 0) & (local_p < count)).nonzero()[:, 0]
    order_r, ends_g = _sorted(local_p[pairs_r], count)
    return pairs_r[order_r], ends_g


def _of_bias(
    experts_p: torch.Tensor, pairs_r: torch.Tensor, start: int, *biases: torch.Tensor | None
) -> torch.Tensor | None:
    """The local expert of each pair, where one of them has a bias."""
    return None if all(bias is None for bias in biases) else experts_p[pairs_r] - start


def _summed(rows_rm: torch.Tensor, pairs_r: torch.Tensor, count: int, choices: int) -> torch.Tensor:
    """The sum of each row's choices, in their order: the same bits every time, unlike an atomic addition."""
    if len(pairs_r) == count * choices:
        placed_pm = torch.empty_like(rows_rm).index_copy_(0, pairs_r, rows_rm)
        return placed_pm.view(count, choices, rows_rm.size(1)).sum(1)
    wide = torch.float64 if rows_rm.dtype == torch.float64 else torch.float32
    result_tm = rows_rm.new_zeros((count, rows_rm.size(1)), dtype=wide)
    for choice in range(choices):  # a row has each choice once, so no two are added to one place at a time
        mine = (pairs_r % choices == choice).nonzero()[:, 0]
        result_tm.index_add_(0, pairs_r[mine] // choices, rows_rm[mine].to(wide))
    return result_tm.to(rows_rm.dtype)
