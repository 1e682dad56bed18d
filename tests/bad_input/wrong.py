"""Small models to make mistakes with, and what every error must tell."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.examples import mlp

LAYOUT = mw.Layout((2, 2, 2), ("dp", "sp", "mp"))


class Net(nn.Module):
    """`body(modules, x)`, squared and averaged."""

    def __init__(self, body: Callable[..., torch.Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.body, self.parts = body, nn.ModuleList(parts)
        self.w = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x).square().mean()


def net(body: Callable[..., torch.Tensor], *parts: nn.Module, x: Any = None, **how: Any) -> mw.Plan:
    x = torch.ones(8, 8) if x is None else x
    return mw.plan(Net(body, *parts), {"x": x}, loss=lambda m, b: m(b["x"]), **how)


def matmul(*ins: Any, out: Any = None, mesh: Any = 8, x: Any = None) -> mw.Plan:
    return net(lambda m, x: mw.shard(torch.matmul, ins, out)(x, m.w), x=x, mesh=mesh, mode="semi_auto")


@functools.cache
def built() -> Any:
    """One perceptron for all, so that it is captured once."""
    return fresh()


def fresh() -> Any:
    """One for each step, which takes its values."""
    return mlp.build(depth=1)


def perceptron(pins: Any = None, mesh: Any = None, mode: Any = "sharding_propagation") -> mw.Plan:
    model, batch, loss = built()
    return mw.plan(model, batch, loss=loss, mesh=mesh or {"dp": 2, "tp": 2}, mode=mode, pins=pins)


@dataclass(frozen=True)
class Case:
    make: Callable[[], Any]
    error: type[MeshwrightError]
    what: str
    why: str
    hint: str
    where: str = ""


def check_told(case: Case) -> None:
    """The error of a case, with the reason, the place and a way out, before a process group is touched."""
    with pytest.raises(case.error) as caught:
        case.make()
    error = caught.value
    assert case.what in error.what
    assert case.why in error.why and error.why
    assert case.hint in error.hint and error.hint
    assert case.where in error.where
    assert str(error).splitlines()[1].startswith("  why:   ")
    assert not dist.is_initialized()
