"""A larger limit of memory gives no slower plan: what a smaller one leads to is known under a larger one, too."""

from __future__ import annotations

import itertools

import pytest
import torch

from meshwright.compile import Captured, captured_of, plan_captured
from meshwright.cost.cluster import Cluster
from meshwright.examples import gpt
from meshwright.planning.search_request import request_for
from meshwright.search.budget import TECHNIQUES
from tests.search.planned import MODELS, cluster

SAME = 1 + 1e-9


def steps_within(captured: Captured, where: Cluster, limits: tuple[float, ...]) -> list[float]:
    """Seconds of the plan under each limit."""
    steps: list[float] = []
    for limit in limits:
        plan = plan_captured(captured, None, "auto", None, request_for(where, limit))
        assert plan.claims["peak_bytes"] <= limit
        steps.append(plan.claims["step_seconds"])
    return steps


@pytest.mark.full  # test_lighter.py compares with no limit
@pytest.mark.parametrize(
    ("model", "ranks", "limits"),
    [
        pytest.param("mlp", "2x2", (80e3, 90e3, 98e3, 110e3, 200e3), marks=pytest.mark.full),
        ("mlp", "8", (36e3, 50e3, 56e3)),
        pytest.param("recommender", "2x2", (46314, 49402, 52489, 60e3), marks=pytest.mark.full),
        pytest.param("recommender", "8", (33964, 37052, 46314, 80e3), marks=pytest.mark.full),
        pytest.param("gpt", "8", (500e3, 600e3, 1e6), marks=pytest.mark.full),
    ],
)
def test_a_larger_limit_gives_no_slower_plan(model: str, ranks: str, limits: tuple[float, ...]) -> None:
    steps = steps_within(captured_of(*MODELS[model]()), cluster("gpu", ranks), limits)
    assert all(later <= SAME * before for before, later in itertools.pairwise(steps)), steps


@pytest.mark.full
def test_a_larger_limit_gives_no_slower_plan_where_moments_are_on_the_host() -> None:
    """The choices that techniques are tried with are the same under each. Those that save less than 1 % are not
    simulated, and which these are depends on the limit."""
    with torch.device("meta"):
        captured = captured_of(*gpt.build(gpt.GPTConfig(width=512, layers=4), batch=4))
    where = Cluster.preset("h100", nodes=1, ranks_per_node=2)
    steps = steps_within(captured, where, (48e6, 56e6, 64e6, 70e6, 90e6))
    assert all((1 - TECHNIQUES.worth) * later <= before for before, later in itertools.pairwise(steps)), steps


@pytest.mark.full
def test_limits_at_which_moments_leave_the_device_give_as_quick_plans() -> None:
    """Weights, gradients and moments, with their copies at the update, take 128 MB. Below that no simulation is spent
    on what keeps moments on the device, and what the host's update takes is known before one is simulated. Choices that
    save less than 1 % are not simulated, and which these are depends on the limit."""
    with torch.device("meta"):
        model, batch, loss = gpt.build(gpt.GPTConfig(width=512, layers=4), batch=4)
    captured = captured_of(model, batch, loss)
    where = Cluster.preset("h100", nodes=1, ranks_per_node=2)
    first, *others = steps_within(captured, where, (90e6, 110e6, 120e6))
    assert all((1 - TECHNIQUES.worth) * first <= other <= SAME * first for other in others)
