"""A larger limit of memory gives no slower plan: what a smaller one leads to is known under a larger one, too."""

from __future__ import annotations

import itertools

import pytest

from meshwright.compile import captured_of, plan_captured
from meshwright.request import request_for
from tests.search.planned import MODELS, cluster

SAME = 1 + 1e-9


@pytest.mark.parametrize(
    ("model", "ranks", "limits"),
    [
        ("mlp", "2x2", (80e3, 90e3, 98e3, 110e3, 200e3)),
        ("mlp", "8", (36e3, 50e3, 56e3)),
        pytest.param("recommender", "2x2", (46314, 49402, 52489, 60e3), marks=pytest.mark.slow),
        pytest.param("recommender", "8", (33964, 37052, 46314, 80e3), marks=pytest.mark.slow),
        pytest.param("gpt", "8", (500e3, 600e3, 1e6), marks=pytest.mark.slow),
    ],
)
def test_a_larger_limit_gives_no_slower_plan(model: str, ranks: str, limits: tuple[float, ...]) -> None:
    captured = captured_of(*MODELS[model]())
    steps: list[float] = []
    for limit in limits:
        plan = plan_captured(captured, None, "auto", None, request_for(cluster("gpu", ranks), limit))
        assert plan.claims["peak_bytes"] <= limit
        steps.append(plan.claims["step_seconds"])
    assert all(later <= SAME * before for before, later in itertools.pairwise(steps)), steps
