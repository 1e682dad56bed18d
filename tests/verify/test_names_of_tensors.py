"""Parameters, buffers and entries of a batch may be called like an operator, like each other, or like our helpers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from tests.breadth import quick

NAMES = (
    "linear",
    "mean",
    "relu",
    "sub",
    "relu_to",
    "linear_k0",
    "copy0_relu",
    "batch_x",
    "mean_1",
    "view",
    "x",
)


class Inner(nn.Module):
    """Its parameter is ``<name of the module>.<name>``."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.rand(8)))
        self.name = name

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """[batch, 8] → the same."""
        return h * getattr(self, self.name)


class Named(nn.Module):
    """One parameter or buffer of each name, read before and after the operators of that name."""

    def __init__(self) -> None:
        super().__init__()
        for number, name in enumerate(NAMES):
            if number % 3 == 1:
                self.register_buffer(name, torch.rand(8))
            else:
                self.register_parameter(name, nn.Parameter(torch.rand(8)))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.a, self.a_b = Inner("b_c"), Inner("c")  # both are the identifier a_b_c

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 8] → a number."""
        h = x
        for name in NAMES:
            h = h + getattr(self, name)
        h = self.a_b(self.a(torch.relu(self.down(torch.relu(self.up(h.view(-1, 8)))))))
        for number, name in enumerate(NAMES):
            h = h - getattr(self, name) * (number + 1) * h.mean(-1, keepdim=True)
        return h.square().mean()


def built() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Named(), {"x": torch.randn(8, 8)}


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["x"])


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"dp": 2}},
        {"mesh": {"tp": 2}, "mode": "sharding_propagation", "pins": {"up": {"n": "tp"}}},
        {"mesh": {"dp": 2}, "optimizer_parallel": 3, "threshold_kb": 0, "recompute": "full"},
        {"mesh": {"dp": 2}, "interleave": 2, "micro_batches": 2},
        {"mesh": {"dp": 1, "pp": 2}, "pipeline": 2, "micro_batches": 2},
    ],
    ids=["data parallel", "tensor parallel", "level 3", "copies", "pipeline"],
)
@quick(lambda options: "tp" in options["mesh"] or "optimizer_parallel" in options)
def test_names_decide_nothing(options: dict[str, Any]) -> None:
    model, batch = built()
    mw.verify(model, batch, loss=loss, **options).raise_if_different()


def test_a_buffer_that_is_called_like_the_operator_that_updates_it() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
            self.register_buffer("mean", torch.zeros(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.relu(self.up(x))
            with torch.no_grad():
                self.mean.add_(h.mean(0), alpha=0.1)
            return self.down(h - self.mean).square().mean()

    torch.manual_seed(0)
    model, batch = Running(), torch.randn(8, 8)
    mw.verify(model, batch, loss=lambda m, b: m(b), mesh={"dp": 2}).raise_if_different()


def test_a_layer_under_several_names_that_changes_its_buffers() -> None:
    """`nn.ModuleList([layer] * 3)`: each buffer is one tensor under three names."""

    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())
            self.layers, self.last = nn.ModuleList([layer] * 3), nn.Linear(8, 2)
            layer.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                layer.seen.add_(1.0)
                x = x + layer(x)
            return self.last(x).square().mean()

    torch.manual_seed(0)
    model, batch = Repeated().double(), torch.randn(8, 8, dtype=torch.float64)
    mw.verify(model, batch, loss=lambda m, b: m(b), mesh={"dp": 2}).raise_if_different()
    twin = copy.deepcopy(model)
    step = mw.train_step(model, lambda p: torch.optim.SGD(p, lr=0.1), batch, loss=lambda m, b: m(b), mesh=1)
    step(batch)
    twin(batch).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    state = step.full_state()
    assert state.keys() == twin.state_dict().keys()
    assert all(torch.allclose(state[name], x) for name, x in twin.state_dict().items())
