"""A name of any layer finds its plan in a file, which lists two of many equal layers."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

import meshwright as mw
from meshwright.compile import captured_of
from meshwright.core.layout import TensorLayout
from meshwright.errors import PlanError
from meshwright.examples import gpt, mlp
from meshwright.examples.zoo import hugging_face
from meshwright.plan.plan import Plan
from meshwright.report.explain_node import choices, folded, matching
from meshwright.report.layers_of_file import modules_of, narrowed
from tests.breadth import quick

MODELS = {
    "mlp": lambda: mlp.build(depth=5),
    "gpt": lambda: gpt.build(gpt.GPTConfig(48, 48, 4, 6, 16), batch=4),
    "t5": lambda: hugging_face("t5", layers=5),  # two stretches of layers, each named with two numbers
    "llama": lambda: hugging_face("llama", layers=4),
}


@functools.cache
def planned(name: str, **given: Any) -> Plan:
    model, batch, loss = MODELS[name]()
    captured = captured_of(model, batch, loss)
    folds = [(b.start, b.length, b.repeats) for b in captured.folding.blocks]
    plan = mw.plan(model, batch, loss=loss, mesh={"dp": 2, "tp": 2}, mode="sharding_propagation", **given)
    return plan.without_model().folded(captured.graph, folds)


@pytest.mark.parametrize("name", MODELS)
@quick(lambda name: name in ("mlp", "gpt"))
def test_a_node_of_a_file_has_the_modules_of_all_that_it_stands_for(name):
    plan = planned(name)
    read = Plan.from_json(plan.to_json())
    assert read.times and len(read.strategies) < len(plan.strategies)
    found = modules_of(read)
    for node, (_, module) in read.about.items():
        later = [n for n, stands in plan.stand_ins.items() if stands == node and n in plan.about]
        assert found[node] == tuple(dict.fromkeys((module, *(plan.about[n][1] for n in later))))


def test_a_layer_that_differs_stands_for_itself():
    plan = planned("mlp")
    odd = replace(plan, inputs={**plan.inputs, "up_3_weight": TensorLayout.replicated((96, 24))})
    other = {n: s for n, s in plan.strategies.items() if plan.about[n][1] != "up.3"}
    odd = replace(odd, reasons={**odd.reasons, next(n for n in plan.strategies if n not in other): "odd"})
    read = Plan.from_json(odd.to_json())
    found = [m for each in modules_of(read).values() for m in each if m.startswith("up.")]
    assert sorted(found) == [f"up.{n}" for n in range(5)]


@pytest.mark.parametrize(
    ("pattern", "modules"),
    [
        ("up.0", {"up.0": 1}),
        ("up.1", {"up.1": 1}),
        ("up.3", {"up.3": 1}),
        ("up.2-4", {"up.*": 3}),
        ("up", {"up.*": 5}),
        ("*.4", {"up.4": 1, "down.4": 1}),
    ],
)
def test_a_pattern_of_layers_means_the_same_in_a_file(pattern, modules):
    plan = planned("mlp")
    read = Plan.from_json(plan.to_json())
    here, _ = narrowed(read, pattern)
    rows = folded(choices(here, matching(read, pattern), None))
    assert {module: count for module, count, _ in rows} == modules
    full = [plan.about[n][1] for n in matching(plan, pattern)]
    assert len(full) == sum(modules.values())


def test_what_stands_for_a_layer_is_said():
    read = Plan.from_json(planned("mlp").to_json())
    _, told = narrowed(read, "up.3")
    assert told == ("the file lists up.1 for up.3: equal layers have the same plan",)
    _, told = narrowed(read, "up.2-4")
    assert told == ("the file lists up.1 for up.2-4: equal layers have the same plan",)
    for listed in ("up.1", "up.*", "%linear"):
        assert narrowed(read, listed)[1] == ()
    with pytest.raises(PlanError, match="did you mean"):
        matching(read, "up.5")


@pytest.mark.full  # the test before has layers that are all alike
def test_equal_stretches_may_begin_within_a_layer():
    """As in T5, whose first layer has one operator more: the file lists parts of two layers for each."""
    read = Plan.from_json(planned("t5").to_json())
    _, told = narrowed(read, "encoder.block.3")
    assert told == ("the file lists encoder.block.1-2 for encoder.block.3: equal layers have the same plan",)
