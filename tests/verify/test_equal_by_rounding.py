"""Proofs of models whose gradients are nothing but rounding, of complex numbers, and of random numbers in forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.compile import captured_of, lower
from meshwright.errors import RuleError
from meshwright.verify import Report, verify_partition
from tests.breadth import quick

PLANS: dict[str, dict[str, Any]] = {
    "dp": {"mesh": {"dp": 2}},
    "tp": {"mesh": {"tp": 2}, "mode": "sharding_propagation", "pins": {"up": {"n": "tp"}}},
    "zero3": {"mesh": {"dp": 2}, "optimizer_parallel": 3, "threshold_kb": 0},
}


def proved(model: nn.Module, x: torch.Tensor, plan: str) -> Report:
    return mw.verify(model, x, loss=lambda m, b: m(b), **PLANS[plan]).raise_if_different()


class Normed(nn.Module):
    """What a batch norm gives has a sum of squares that nothing changes: its gradients are 0."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.up(x)).square().sum()


@pytest.mark.parametrize("plan", PLANS)
@quick(lambda plan: plan == "tp")
def test_a_gradient_that_is_all_rounding_is_no_difference(plan: str) -> None:
    torch.manual_seed(0)
    proved(Normed(), torch.randn(8, 8), plan)


def test_no_more_than_rounding_is_let_pass() -> None:
    """A difference of a billionth of a weight's gradient, in one that cancels to the last digits."""
    torch.manual_seed(0)
    model, x = Normed(), torch.randn(8, 8)

    def loss(m: nn.Module, b: torch.Tensor) -> torch.Tensor:
        return m(b) + 1e-3 * m.up.weight.sum()

    def other(m: nn.Module, b: torch.Tensor) -> torch.Tensor:
        return m(b) + 1e-3 * (1 + 1e-7) * m.up.weight.sum()

    captured = captured_of(model.double(), x.double(), other)
    parts = lower(captured, mw.plan(model, x.double(), loss=other, mesh=2))
    assert verify_partition(model, x.double(), other, captured, parts).ok
    report = verify_partition(model, x.double(), loss, captured, parts)
    assert not report.ok and any(
        d.what == "gradient of up.weight" and d.error > report.tolerance for d in report.differences
    )


class Complex(nn.Module):
    """Rotary embeddings by complex numbers, with a complex weight beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.register_buffer("turn", torch.polar(torch.ones(4), torch.arange(4.0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = torch.view_as_complex(self.up(x).float().reshape(-1, 4, 2))
        return torch.view_as_real(q * self.turn * self.weight).flatten(1).square().mean()


@pytest.mark.parametrize("plan", PLANS)
def test_complex_numbers_are_widened_and_compared(plan: str) -> None:
    torch.manual_seed(0)
    proved(Complex(), torch.randn(6, 8), plan)


class Drawing(nn.Module):
    """A small variational autoencoder: what it draws is added to the code."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.draw = nn.Linear(8, 4), nn.Linear(4, 8), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = self.up(x)
        return F.mse_loss(self.down(mean + torch.exp(0.5 * mean) * self.draw(mean)), x)


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "randn_like": torch.randn_like,
    "rand": lambda m: torch.rand(m.shape[0], 1),
    "normal_": lambda m: torch.empty_like(m).normal_(0.5, std=2.0),
    "bernoulli": lambda m: torch.bernoulli(torch.sigmoid(m).detach()),
    "bernoulli_": lambda m: torch.empty_like(m).bernoulli_(0.3),
    "randint": lambda m: torch.randint_like(m, 1, 4) + torch.randint(3, m.shape),
    "normal": lambda m: torch.normal(m, 1.0 + m.exp()) + torch.normal(0.5, 2.0, m.shape) + torch.normal(m),
    "beside dropout": lambda m: F.dropout(torch.rand_like(m), 0.3)[torch.randperm(m.shape[0])],
}


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(name, plan, marks=() if plan == "tp" and not name.endswith("_") else pytest.mark.full)
        for name in DRAWS
        for plan in PLANS
    ],
)
def test_random_numbers_are_those_of_one_device(name: str, plan: str) -> None:
    torch.manual_seed(0)
    assert not proved(Drawing(DRAWS[name]), torch.randn(8, 8), plan).captured


@pytest.mark.parametrize("draw", [F.gumbel_softmax, lambda m: (torch.rand(3), torch.rand_like(m))[1]])
def test_what_torch_draws_out_of_sight_is_that_of_the_captured_program(draw: Any) -> None:
    torch.manual_seed(0)
    report = proved(Drawing(draw), torch.randn(8, 8), "tp")
    assert report.captured and "with the captured program on one device" in str(report)


class Recurrent(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers, self.up = nn.LSTM(8, 8, 2, dropout=dropout), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rrelu(self.up(self.layers(x)[0]), training=self.layers.dropout == 0.5).square().mean()


def test_what_ranks_would_draw_apart_is_refused() -> None:
    """Dropout between recurrent layers, and `rrelu`: they drew from the generator of each rank."""
    torch.manual_seed(0)
    x = torch.randn(4, 2, 8)
    proved(Recurrent(0.3).eval(), x, "dp")
    proved(Recurrent(0.0), x, "tp")
    with pytest.raises(RuleError, match=r"lstm\.input draws random numbers that would differ between ranks"):
        mw.verify(Recurrent(0.3), x, loss=lambda m, b: m(b), mesh=2)
    with pytest.raises(RuleError, match=r"rrelu\.default draws random numbers") as caught:
        mw.verify(Recurrent(0.5).eval(), x, loss=lambda m, b: m(b), mesh=2)
    assert caught.value.hint == "F.leaky_relu" and caught.value.why
    with pytest.raises(RuleError, match=r"multinomial\.default draws random numbers") as caught:
        mw.verify(
            Recurrent(0.0), x, loss=lambda m, b: (m.up(b)[0].softmax(-1).multinomial(1) * m(b)).mean(), mesh=2
        )
    assert "F.gumbel_softmax" in caught.value.hint
