"""In a space of many operators `auto` gives up optima that are over the memory limit and no quicker than the best."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import meshwright as mw
from meshwright.examples import gpt
from meshwright.search import auto
from meshwright.search.budget import AUTO
from tests.search.planned import cluster


@pytest.mark.parametrize("large", [False, True])
def test_optima_are_given_up_in_large_spaces_alone(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 0 if large else 10**9
    monkeypatch.setattr(auto, "AUTO", replace(AUTO, lighter_size=size))
    asked: list[float] = []
    limited, optima = auto.limited, auto._optima
    in_optima = False

    def spied(planner: Any, space: Any, alpha: float | None, **more: Any) -> Any:
        if in_optima:
            asked.append(more["below"])
        elif "below" in more:  # a recipe: no other step is known
            assert more["below"] == float("inf")
        return limited(planner, space, alpha, **more)

    def of_optima(*args: Any) -> None:
        nonlocal in_optima
        in_optima = True
        optima(*args)
        in_optima = False

    monkeypatch.setattr(auto, "limited", spied)
    monkeypatch.setattr(auto, "_optima", of_optima)
    config = gpt.GPTConfig(vocabulary=64, width=32, layers=2, heads=4, sequence=16)
    model, batch, loss = gpt.build(config, batch=8)
    plan = mw.plan(model, batch, loss=loss, cluster=cluster("gpu", "2x2"), mode="auto", memory=600e3)
    assert asked and all((below < float("inf")) == large for below in asked)
    assert min(asked) >= plan.claims["step_seconds"] and plan.claims["peak_bytes"] <= 600e3
