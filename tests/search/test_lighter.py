"""A limit of memory makes no plan quicker, and none is refused that what needs least for a moment fits into."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.errors import DoesNotFit
from meshwright.plan.plan import Plan

H100 = mw.Cluster.preset("h100", nodes=1, ranks_per_node=4)
SAME = 1 + 1e-9


def convolutions(channels: int, strides: tuple[int, int], padding: int) -> Any:
    """Two of them, each with a batch norm, before a linear."""
    first, second = strides
    net = nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=padding, stride=first),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=padding, stride=second),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(100),
    )
    batch = (torch.randn(32, 3, 64, 64), torch.randint(0, 100, (32,)))
    net(batch[0])
    return net, batch, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1])


@pytest.mark.parametrize(
    ("strides", "padding", "limit"),
    [
        ((2, 2), 1, 15.9e6),
        pytest.param((2, 1), 0, 18.6e6, marks=pytest.mark.slow),
        pytest.param((2, 2), 0, 14.5e6, marks=pytest.mark.slow),
    ],
)
def test_without_a_limit_no_plan_is_slower_than_with_one(
    strides: tuple[int, int], padding: int, limit: float
) -> None:
    net, batch, loss = convolutions(16, strides, padding)

    def step_seconds(memory: float | None) -> float:
        plan = mw.plan(net, batch, loss=loss, cluster=H100, mode="auto", memory=memory)
        return plan.claims["step_seconds"]

    assert step_seconds(None) <= SAME * step_seconds(limit)


@pytest.mark.full  # test_too_large.py plans with what refusals name
def test_a_refusal_knows_the_choice_whose_operators_need_least_for_a_moment() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 64 * 64, 10),
    )
    batch = (torch.randn(32, 3, 64, 64), torch.randint(0, 10, (32,)))

    def planned(memory: float) -> Plan:
        how = {"cluster": H100, "mode": "dynamic_programming", "memory": memory}
        return mw.plan(net, batch, loss=lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), **how)

    with pytest.raises(DoesNotFit) as caught:
        planned(20e6)
    named = re.search(r"([\d.]+) MB per rank$", caught.value.hint)
    assert named
    least = 1e6 * float(named[1])
    assert least <= 46.3e6  # `auto` finds one that fits there
    assert planned(least).claims["peak_bytes"] <= least
