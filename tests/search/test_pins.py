"""Pins of several patterns that meet on one operator."""

from __future__ import annotations

import functools

import pytest
import torch

import meshwright as mw
from meshwright.errors import StrategyError
from meshwright.examples import mlp


@functools.cache
def built():
    return mlp.build(depth=3)


def planned(pins, mode="sharding_propagation"):
    model, batch, loss = built()
    return mw.plan(model, batch, loss=loss, mesh={"dp": 2, "tp": 2}, mode=mode, pins=pins)


def overlaps(plan):
    return [n for n in plan.notes if "both hold" in n]


@pytest.mark.parametrize("mode", ["sharding_propagation", "semi_auto"])
@pytest.mark.parametrize(
    "pins",
    [
        {"up.*": {"n": "tp"}, "up.1": {"n": "dp"}},
        {"up.*": {"n": ("dp", "tp")}, "*.1": {"n": "tp"}},
        {"up.*": {"n": "tp"}, "%linear_3": {"n": "dp"}},
    ],
)
def test_two_pins_that_cut_one_factor_differently_are_refused(pins, mode):
    with pytest.raises(
        StrategyError, match=r"two pins split n of aten.linear.default in up.1 differently"
    ) as caught:
        planned(pins, mode)
    one, two = pins
    assert f"{one!r} splits n over" in caught.value.why and f"{two!r} splits n over" in caught.value.why
    assert "in up.1" in caught.value.where and caught.value.hint


def test_pins_that_say_the_same_are_as_one():
    twice, once = planned({"up.*": {"n": "tp"}, "up.1": {"n": "tp"}}), planned({"up.*": {"n": "tp"}})
    assert twice.strategies == once.strategies
    assert not overlaps(twice)


def test_pins_of_different_factors_add_up_and_that_is_noted():
    plan = planned({"up.*": {"n": "tp"}, "up.1": {"d0": "dp"}})
    assert overlaps(plan) == ["the pins of 'up.*' and 'up.1' both hold for up.1: n over tp and d0 over dp"]
    assert str(plan.strategies["linear_3"]).split() == ["d0=12/dp", "n=96/tp"]


def test_two_factors_of_one_pattern_need_no_note():
    assert not overlaps(planned({"up.*": {"n": "tp", "d0": "dp"}}))


@pytest.mark.parametrize("mode", ["sharding_propagation", "semi_auto"])
def test_examples_are_pinned_by_the_name_that_plans_show(mode):
    """Each operator calls the letter its own; a table of plans says ``batch``."""
    named, lettered = (planned({"up.*": {what: "dp", "n": "tp"}}, mode) for what in ("batch", "d0"))
    assert named.strategies == lettered.strategies
    assert "batch=dp n=tp" in named.explain()


def test_a_pin_of_a_module_under_autocast_is_for_the_operator_that_reads_the_cast_weight() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch).float().square().mean()

    found = mw.plan(
        model,
        torch.ones(4, 8),
        loss=loss,
        mesh={"tp": 2},
        mode="sharding_propagation",
        pins={"0": {"n": "tp"}},
    )
    assert str(found.strategies["linear"]) == "n=16/tp"
