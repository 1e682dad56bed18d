"""Programs whose meaning is in memory: results that are an argument, buffers that are written, strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.capture import capture

X = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A linear, buffers of several dtypes, and what is done with them."""

    def __init__(self, body: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.scale = nn.Linear(8, 8), nn.Parameter(torch.rand(8))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(8, 8, dtype=torch.bool))
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) * torch.arange(8)).square().mean()


def proved(body: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    mw.verify(Net(body), X, loss=loss, mesh={"dp": 2}).raise_if_different()


IDLE = {
    "eval": lambda y: F.dropout(y, 0.5, training=False),
    "eval by name": lambda y: F.dropout(input=y, p=0.5, training=False),
    "p = 0": lambda y: nn.Dropout(0.0)(y),
    "alpha": lambda y: F.alpha_dropout(y, 0.5),
    "channels": lambda y: F.dropout2d(y.view(8, 2, 2, 2), 0.0).view(8, 8),
    "of torch": lambda y: torch.dropout(y, 0.5, False),
}


@pytest.mark.parametrize("how", IDLE)
def test_dropout_that_drops_nothing_returns_its_argument(how: str) -> None:
    def body(model: Net, x: torch.Tensor) -> torch.Tensor:
        before = model.up(x)
        after = IDLE[how](before)
        after *= 2
        return before + after

    proved(body)


def test_dropout_that_drops_nothing_keeps_a_gradient_under_no_grad() -> None:
    def body(model: Net, x: torch.Tensor) -> torch.Tensor:
        y = model.up(x)
        with torch.no_grad():
            return F.dropout(y, 0.5, training=False)

    proved(body)


def test_what_is_copied_into_a_whole_buffer_gets_its_dtype_and_shape() -> None:
    def body(model: Net, x: torch.Tensor) -> torch.Tensor:
        y = model.up(x)
        with torch.no_grad():
            model.count.copy_(10 * x.abs().mean())
            model.seen.copy_(y.round())
        model.mean[:] = x.mean()
        return y * model.mean + model.count * model.seen * y

    proved(body)


def fill(y: torch.Tensor) -> torch.Tensor:
    scores = y @ y.T
    scores.fill_diagonal_(-3.0)
    return scores.softmax(-1) @ y


def part(y: torch.Tensor) -> torch.Tensor:
    y.as_strided((8,), (9,)).add_(1.0)
    return y


STRIDED = {
    "fill_diagonal_": fill,
    "a written part": part,
    "windows": lambda y: y.as_strided((3, 8, 8), (8, 0, 1), 4).sum(0),
    "a copy": lambda y: y.t().contiguous().as_strided((8, 8), (1, 0), 3),
    "one element": lambda y: y.as_strided((), (), 5) * y,
}


@pytest.mark.parametrize("what", STRIDED)
def test_views_by_strides_are_reads_and_writes_by_row_number(what: str) -> None:
    proved(lambda model, x: STRIDED[what](model.up(x)))


@pytest.mark.parametrize("view", (torch.t, lambda y: y[1:]))
def test_strides_of_what_is_a_view_are_refused(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    net = Net(lambda model, x: view(model.up(x)).as_strided((8,), (8,)))
    with pytest.raises(mw.CaptureError, match="as_strided") as raised:
        capture(net, X, loss)
    assert "contiguous()" in raised.value.hint and "test_memory.py" in raised.value.where


@pytest.mark.parametrize("training", (True, False))
def test_an_instance_norm_moves_its_statistics(training: bool) -> None:
    torch.manual_seed(0)
    norm = nn.InstanceNorm2d(2, affine=True, track_running_stats=True, momentum=0.3).train(training)
    net = Net(lambda model, x: model.norm(model.up(x).view(8, 2, 2, 2)).view(8, 8) * model.scale)
    net.norm = norm
    captured = capture(net, X, loss)
    assert len(captured.graph.mutations) == (2 if training else 0)
    mw.verify(net, X, loss=loss, mesh={"dp": 2}).raise_if_different()
