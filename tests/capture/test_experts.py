"""The routing of a mixture of experts: what is raised means the same, and what sees the order is left alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from meshwright.capture import Captured
from meshwright.compile import captured_of
from meshwright.core.mesh import Mesh
from meshwright.runtime.communicator import Alone
from meshwright.runtime.kernels import kernel
from meshwright.runtime.rank import Rank
from tests.capture.run_graph import bind, interpret

ROWS, WIDTH, EXPERTS, CHOICES = 12, 16, 4, 2


def halves(rows: torch.Tensor) -> torch.Tensor:
    first, second = rows.chunk(2, -1)
    return torch.nn.functional.silu(first) * second


def interleaved(rows: torch.Tensor, low: float = -1.0, alpha: float = 1.7) -> torch.Tensor:
    """As GPT-OSS gates: even columns by odd ones."""
    gate, up = rows[..., ::2].clamp(max=1.0), rows[..., 1::2].clamp(low, 1.0)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


GATES = {
    "halves": halves,
    "biased": halves,
    "read": halves,
    "interleaved": interleaved,
    "squared": lambda rows: torch.relu(rows).square(),
    "gelu": lambda rows: torch.nn.functional.gelu(rows, approximate="tanh"),
    # not gates of the operator
    "other clamp": lambda rows: interleaved(rows, -2.0),
    "later half": lambda rows: halves(rows.flip(-1)),
    "tanh": torch.tanh,
}


class Routed(torch.nn.Module):
    """Experts as transformers writes them: sorted, multiplied, put back."""

    def __init__(self, twist: str = "") -> None:
        super().__init__()
        self.gate = torch.nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = torch.nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4)
        self.bias = torch.nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH))
        self.down = torch.nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 4)
        self.twist = twist

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from transformers.integrations import moe  # registers the grouped product

        del moe
        product = torch.ops.transformers.grouped_mm_fallback
        weight, chosen = torch.topk(torch.softmax(self.gate(x), -1), CHOICES, dim=-1)
        experts = chosen.reshape(-1)
        ordered, order = torch.sort(experts, descending=self.twist == "descending")
        counts = torch.histc(ordered.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        rows = product(x[order // CHOICES], self.up, ends) + self.bias[ordered]
        rows = GATES.get(self.twist, torch.relu)(rows)
        if self.twist == "places":  # what comes first depends on all rows
            rows = rows * torch.arange(len(order)).unsqueeze(-1)
        if self.twist == "cumulated":
            rows = rows.cumsum(0)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        if self.twist == "other rows":
            back = back.flip(0)
        made = product(rows, self.down[:, : rows.shape[1]], ends)
        if self.twist == "biased":
            made = made + self.bias[ordered, :WIDTH]
        made = (made * weight.reshape(-1)[order].unsqueeze(-1))[back].view(len(x), CHOICES, -1)
        if self.twist == "read":
            return made.sum(1) + made[:, 0]
        return made.sum(1) * (1 + order[0]) if self.twist == "seen" else made.sum(1)


def square(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["x"]).square().mean()


def captured(twist: str = "") -> tuple[Captured, torch.nn.Module, dict[str, Any]]:
    pytest.importorskip("transformers.integrations.moe")
    torch.manual_seed(0)
    model, batch = Routed(twist).double(), {"x": torch.randn(ROWS, WIDTH, dtype=torch.float64)}
    return captured_of(model, batch, square), model, batch


BLOCKS = ["", "halves", "biased", "interleaved", "squared", "gelu"]
PRODUCTS = ["read", "other clamp", "later half", "tanh"]
SORTED = ["descending", "places", "cumulated", "other rows", "seen"]


@pytest.mark.parametrize("twist", [*BLOCKS, *PRODUCTS, *SORTED])
def test_a_capture_means_what_the_model_says(twist: str) -> None:
    """The block of experts is one operator, or two products where something else is between, or what was traced."""
    found, model, batch = captured(twist)
    ops = Counter(n.op for n in found.graph.nodes)
    assert ops["meshwright.experts"] == (twist in BLOCKS)
    assert ops["meshwright.expert_linear"] == 2 * (twist in PRODUCTS)
    assert bool(ops["aten.sort.default"] + ops["aten.sort.stable"]) == (twist in SORTED)
    loss = interpret(found.graph, bind(found.graph, found.constants, model, batch))["loss"]
    grads = torch.autograd.grad(loss, list(model.parameters()))
    expected = square(model, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for mine, theirs in zip(grads, torch.autograd.grad(expected, list(model.parameters())), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("choices", [1, 2])
def test_the_kernel_multiplies_each_row_by_the_matrices_of_its_experts(choices: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(EXPERTS, 6, 5, dtype=torch.float64, requires_grad=True)
    experts = torch.randint(EXPERTS - 1, (ROWS * choices,))  # the last expert gets no row
    rank = Rank(Alone(Mesh.of()), torch.device("cpu"))
    made = kernel("meshwright.expert_linear")(rank, x, weight, experts)
    expected = torch.stack([x[p // choices] @ weight[e] for p, e in enumerate(experts.tolist())])
    torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-14)
    incoming = torch.randn_like(made)
    for mine, theirs in zip(
        torch.autograd.grad(made, (x, weight), incoming),
        torch.autograd.grad(expected, (x, weight), incoming),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
