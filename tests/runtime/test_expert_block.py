"""The block of experts equals the loop over experts that it stands for, forward and backward."""

from __future__ import annotations

import pytest
import torch

from meshwright.core.mesh import Mesh
from meshwright.runtime.communicator import Alone
from meshwright.runtime.kernels import kernel
from meshwright.runtime.rank import Rank

ROWS, WIDTH, INNER, EXPERTS, CHOICES = 12, 6, 5, 4, 2
F64 = torch.float64


def gated(up: torch.Tensor, gate: str) -> torch.Tensor:
    if gate == "interleaved":
        first, second = up[..., ::2].clamp(max=0.9), up[..., 1::2].clamp(-0.9, 0.9)
        return (second + 1) * first * torch.sigmoid(first * 1.7)
    first, second = up.chunk(2, -1)
    return torch.nn.functional.silu(first) * second


@pytest.mark.parametrize("held", [(0, 4), (0, 2), (2, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("gate", ["silu_gated", "interleaved"])
def test_it_equals_a_loop_over_the_experts_that_are_here(
    gate: str, biased: bool, held: tuple[int, int]
) -> None:
    """Expert 3 gets no row; a rank that holds it alone adds zeros."""
    torch.manual_seed(0)
    start, count = held

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=F64, requires_grad=True)

    x, up, down = leaf(ROWS, WIDTH), leaf(count, WIDTH, 2 * INNER), leaf(count, INNER, WIDTH)
    up_bias, down_bias = (leaf(count, 2 * INNER), leaf(count, WIDTH)) if biased else (None, None)
    chosen = torch.stack([torch.randperm(EXPERTS - 1)[:CHOICES] for _ in range(ROWS)]).reshape(-1)
    weights = leaf(ROWS * CHOICES)
    rank = Rank(Alone(Mesh.of()), torch.device("cpu"))
    constants = (1.7, 0.9) if gate == "interleaved" else ()
    made = kernel("meshwright.experts")(
        rank, x, up, up_bias, down, down_bias, chosen, weights, gate, constants, start, EXPERTS
    )
    expected = [torch.zeros(WIDTH, dtype=F64) + 0 * x[row] for row in range(ROWS)]
    for pair, expert in enumerate((chosen - start).tolist()):
        if 0 <= expert < count:
            inner = x[pair // CHOICES] @ up[expert] + (up_bias[expert] if up_bias is not None else 0)
            outer = gated(inner, gate) @ down[expert] + (down_bias[expert] if down_bias is not None else 0)
            expected[pair // CHOICES] = expected[pair // CHOICES] + weights[pair] * outer
    reference = torch.stack(expected)
    torch.testing.assert_close(made, reference, rtol=1e-12, atol=1e-13)
    leaves = [v for v in (x, up, up_bias, down, down_bias, weights) if v is not None]
    incoming = torch.randn_like(made)
    found = torch.autograd.grad(made, leaves, incoming)
    wanted = torch.autograd.grad(reference, leaves, incoming, allow_unused=True)
    for mine, theirs in zip(found, wanted, strict=True):
        theirs = torch.zeros_like(mine) if theirs is None else theirs
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)
