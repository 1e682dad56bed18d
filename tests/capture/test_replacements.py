"""What a capture refuses, and what stands for it in `docs/how-to/replace-what-cannot-be-captured.md`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributions as D
from torch import nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.errors import MeshwrightError

Loss = Callable[[Any, Any], torch.Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.gru = nn.Linear(8, 8), nn.Linear(8, 3), nn.GRU(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "x": torch.randn(16, 8), "y": torch.randint(0, 3, (16,)), "mask": torch.rand(16) > 0.4,
        "rows": torch.randn(4, 6, 8), "lengths": torch.tensor([6, 5, 3, 2]), "counts": torch.tensor([1, 2, 1, 1] * 4),
    }  # fmt: skip


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return -0.5 * grads[0]


def each(m: Any, b: Any) -> torch.Tensor:
    return F.cross_entropy(m(b["x"]), b["y"], reduction="none")


def by_class(m: Any, b: Any) -> torch.Tensor:
    found, at = b["y"].unique(return_inverse=True)
    sums = torch.zeros(len(found), 3).index_add(0, at, m(b["x"]))
    return (sums / at.bincount()[:, None]).square().sum()


def by_one_hot(m: Any, b: Any) -> torch.Tensor:
    hot = F.one_hot(b["y"], 3).float()
    return ((hot.T @ m(b["x"])) / hot.sum(0).clamp(min=1)[:, None]).square().sum()


def packed(m: Any, b: Any) -> torch.Tensor:
    rows = nn.utils.rnn.pack_padded_sequence(b["rows"], b["lengths"], batch_first=True)
    return m.gru(rows)[1].square().mean()


def padded(m: Any, b: Any) -> torch.Tensor:
    out = m.gru(b["rows"])[0]
    return out.gather(1, (b["lengths"] - 1)[:, None, None].expand(-1, 1, 8)).square().mean()


def often(m: Any, b: Any) -> torch.Tensor:
    h = b["x"]
    for _ in range(int(b["y"].max())):
        h = torch.tanh(m.a(h))
    return m.b(h).square().mean()


def at_most(m: Any, b: Any) -> torch.Tensor:
    h = b["x"]
    for i in range(4):
        h = torch.where(b["y"].max() > i, torch.tanh(m.a(h)), h)
    return m.b(h).square().mean()


def until(m: Any, b: Any) -> torch.Tensor:
    h = b["x"]
    while h.norm() > 5:
        h = torch.tanh(m.a(h))
    return m.b(h).square().mean()


def at_most_until(m: Any, b: Any) -> torch.Tensor:
    h, go = b["x"], torch.ones((), dtype=torch.bool)
    for _ in range(8):
        go = go & (h.norm() > 5)
        h = torch.where(go, torch.tanh(m.a(h)), h)
    return m.b(h).square().mean()


def hooked(m: Any, b: Any) -> torch.Tensor:
    h = m.a(b["x"])
    h.register_hook(lambda g: g * 2)
    return m.b(h).square().mean()


def doubled(m: Any, b: Any) -> torch.Tensor:
    h = m.a(b["x"])
    return m.b(2 * h - h.detach()).square().mean()


def clamped(m: Any, b: Any) -> torch.Tensor:
    h = m(b["x"])
    h.data = h.data.clamp(-0.2, 0.2)
    return F.cross_entropy(h, b["y"])


def straight_through(m: Any, b: Any) -> torch.Tensor:
    h = m(b["x"])
    return F.cross_entropy(h + (h.clamp(-0.2, 0.2) - h).detach(), b["y"])


def reversed_(m: Any, b: Any, back: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    h = m.a(b["x"])
    return m.b(h).square().mean() + back(h).square().mean()


def slope(m: Any, b: Any) -> torch.Tensor:
    x = b["x"].clone().requires_grad_()
    (found,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
    return found.square().mean()


def slope_by_hand(m: Any, b: Any) -> torch.Tensor:
    h = torch.tanh(m.a(b["x"]))
    return (((1 - h.square()) * m.b.weight.sum(0)) @ m.a.weight).square().mean()


def normal(**how: Any) -> Loss:
    return lambda m, b: -D.Normal(m(b["x"]), 1.0 + m(b["x"]).exp(), **how).log_prob(b["x"][:, :3]).mean()


PAIRS: dict[str, tuple[Loss, Loss]] = {
    "rows of a mask": (
        lambda m, b: F.cross_entropy(m(b["x"])[b["mask"]], b["y"][b["mask"]]),
        lambda m, b: (each(m, b) * b["mask"]).sum() / b["mask"].sum(),
    ),
    "labels of a mask": (
        lambda m, b: F.cross_entropy(m(b["x"])[b["mask"]], b["y"][b["mask"]]),
        lambda m, b: F.cross_entropy(m(b["x"]), b["y"].masked_fill(~b["mask"], -100)),
    ),
    "nonzero": (
        lambda m, b: m(b["x"])[b["mask"].nonzero().squeeze(1)].sum(),
        lambda m, b: (m(b["x"]) * b["mask"][:, None]).sum(),
    ),
    "unique": (by_class, by_one_hot),
    "one_hot": (
        lambda m, b: (m(b["x"]) * F.one_hot(b["y"])).sum(), lambda m, b: (m(b["x"]) * F.one_hot(b["y"], 3)).sum(),
    ),
    "bincount": (
        lambda m, b: (m(b["x"]) * torch.bincount(b["y"], minlength=3)).mean(),
        lambda m, b: (m(b["x"]) * F.one_hot(b["y"], 3).sum(0)).mean(),
    ),
    "repeat_interleave": (
        lambda m, b: m(torch.repeat_interleave(b["x"], b["counts"], dim=0)).square().mean(),
        lambda m, b: m(torch.repeat_interleave(b["x"], b["counts"], dim=0, output_size=20)).square().mean(),
    ),
    "packed": (packed, padded),
    "a branch": (
        lambda m, b: each(m, b).mean() * (2 if each(m, b).mean() > 1 else 1),
        lambda m, b: torch.where(each(m, b).mean() > 1, 2 * each(m, b).mean(), each(m, b).mean()),
    ),
    "item": (
        lambda m, b: (m(b["x"]) / m(b["x"]).abs().max().item()).square().mean(),
        lambda m, b: (m(b["x"]) / m(b["x"]).abs().max().detach()).square().mean(),
    ),
    "range": (often, at_most),
    "while": (until, at_most_until),
    "reversal": (
        lambda m, b: reversed_(m, b, Reverse.apply), lambda m, b: reversed_(m, b, lambda x: 1.5 * x.detach() - 0.5 * x),
    ),
    "hook": (hooked, doubled),
    "data": (clamped, straight_through),
    "autograd.grad": (slope, slope_by_hand),
    "distribution": (normal(validate_args=True), normal(validate_args=False)),
    "numpy": (
        lambda m, b: each(m, b).mean() * float(np.exp(b["x"].numpy()).mean()),
        lambda m, b: each(m, b).mean() * b["x"].exp().mean(),
    ),
}  # fmt: skip


def trained(loss: Loss) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """The loss and the gradients of plain PyTorch."""
    model = Net()
    value = loss(model, batch())
    value.backward()
    return value.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", PAIRS)
def test_the_replacement_computes_the_same_and_is_captured(name: str) -> None:
    original, replacement = PAIRS[name]
    with pytest.raises(MeshwrightError):
        mw.plan(Net(), batch(), loss=original, mesh=2)
    torch.testing.assert_close(trained(replacement), trained(original))
    mw.verify(Net(), batch(), loss=replacement, mesh=2).raise_if_different()


@pytest.mark.parametrize("name", PAIRS)
def test_the_original_trains_as_it_is(name: str) -> None:
    loss, twin = PAIRS[name][0], Net()
    step = mw.manual_step(copy.deepcopy(twin), lambda p: torch.optim.SGD(p, lr=0.1), loss=loss, mesh=1)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        expected = loss(twin, batch())
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(step(batch()), expected.detach())
    mw.shutdown()


def test_draws_have_the_distribution_of_those_they_replace() -> None:
    torch.manual_seed(0)
    x = torch.tensor([0.1, 0.6, 0.3]).log().expand(20_000, 3)
    drawn = (x - torch.empty_like(x).exponential_().log()).argmax(-1)
    assert torch.allclose(drawn.bincount() / 20_000, x[0].exp(), atol=0.015)


DRAWS: dict[str, Loss] = {
    "numbers of classes": lambda m, b: (
        lambda x: x.log_softmax(-1).gather(-1, (x - torch.empty_like(x).exponential_().log()).argmax(-1)[:, None])
    )(m(b["x"])).mean(),
    "one-hot rows": lambda m, b: (F.gumbel_softmax(m(b["x"]), hard=True) * m(b["x"])).mean(),
    "rsample": lambda m, b: D.Normal(m(b["x"]), 1.0, validate_args=False).rsample().square().mean(),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("pieces", [1, 2])
def test_what_draws_is_proved(name: str, pieces: int) -> None:
    mw.verify(Net(), batch(), loss=DRAWS[name], mesh=2, micro_batches=pieces).raise_if_different()
