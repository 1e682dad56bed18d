"""More ranks never make the plan of `auto` slower: what works on some of them only is a plan of all of them, too. Where
ranks share cores they may, and the plan says so."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.capture import Captured
from meshwright.compile import captured_of, plan_captured
from meshwright.planning.search_request import request_for
from tests.breadth import first


@functools.cache
def captured() -> Captured:
    with torch.device("meta"):
        layers = [nn.Linear(1024, 1024) for _ in range(3)]
        model = nn.Sequential(*(x for layer in layers for x in (layer, nn.ReLU())), nn.Linear(1024, 10))
        x, y = torch.zeros(512, 1024), torch.zeros(512, dtype=torch.int64)
    return captured_of(model, (x, y), lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]))


@pytest.mark.parametrize(
    ("machine", "most"),
    [
        ("ascend-910b", 2),
        pytest.param("ascend-910b", 4, marks=pytest.mark.full),
        pytest.param("h100", 4, marks=pytest.mark.full),
    ],
)
def test_more_ranks_are_never_slower(machine: str, most: int) -> None:
    steps = []
    for nodes in (1, most):
        request = request_for(mw.Cluster.preset(machine, nodes=nodes))
        plan = plan_captured(captured(), None, "auto", None, request)
        steps.append(plan.claims["step_seconds"])
    assert steps[1] <= steps[0] * (1 + 1e-9), steps
    assert any("repeated" in name for name in plan.claims["candidates"])


@pytest.mark.parametrize("mode", first(1, ["data_parallel", "auto"]))
def test_a_plan_says_that_its_ranks_share_the_cores(mode: str) -> None:
    for ranks in (1, 2):
        request = request_for(mw.Cluster.local(ranks))
        notes = [n for n in plan_captured(captured(), None, mode, None, request).notes if "shared cores" in n]
        assert len(notes) == ranks - 1
        assert all("cores shared by 2 ranks; more ranks compute no more together" in note for note in notes)
