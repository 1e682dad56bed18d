"""What-ifs of a plan that was read from a file, where two copies stand for all equal layers."""

from __future__ import annotations

import pytest

from meshwright.compile import captured_of, plan
from meshwright.errors import PlanError
from meshwright.examples import gpt
from meshwright.ops.analysis import factors_of
from meshwright.plan.plan import Plan
from meshwright.report.what_if import changed, transferred

CONFIG = gpt.GPTConfig(vocabulary=96, width=48, layers=4, heads=4, sequence=24)


def test_a_file_of_folded_layers_moves_to_another_batch():
    made = {}
    for rows in (4, 8):
        model, batch, loss = gpt.build(CONFIG, batch=rows)
        made[rows] = (
            plan(model, batch, loss=loss, mesh={"dp": 2}, mode="data_parallel"),
            captured_of(model, batch, loss).graph,
        )
    loaded = Plan.from_json(made[4][0].to_json())
    wanted, graph = made[8]
    assert len(loaded.strategies) < len(wanted.strategies)  # two layers stand for four
    moved = transferred(loaded, graph, factors_of(graph), "batch=8")
    assert moved.check(graph).strategies == wanted.strategies
    assert dict(moved.inputs) == dict(wanted.inputs)


def test_a_file_of_folded_layers_takes_another_storage():
    model, batch, loss = gpt.build(CONFIG, batch=4)
    made = plan(model, batch, loss=loss, mesh={"dp": 2}, mode="data_parallel")
    graph = captured_of(model, batch, loss).graph
    loaded = Plan.from_json(made.to_json())
    asked = {"optimizer_parallel": 3, "threshold_kb": 0}
    cut, _ = changed(loaded, graph, factors_of(graph), asked)
    named = [i for i in graph.input_of("parameter") if i.target.endswith("up.weight")]
    assert len(named) == 4
    assert all(i.name in cut.again and str(cut.inputs[i.name]) == "[192/dp, 48]" for i in named)


def test_a_technique_taken_away_takes_along_what_only_says_how():
    model, batch, loss = gpt.build(CONFIG, batch=4)
    asked = {"optimizer_parallel": 3, "threshold_kb": 0, "keep_whole": ("*.norm*",)}
    made = plan(model, batch, loss=loss, mesh={"dp": 2}, mode="data_parallel", **asked)
    graph = captured_of(model, batch, loss).graph
    without, _ = changed(made, graph, factors_of(graph), {"optimizer_parallel": 0})
    assert without.techniques.non_defaults() == {} and not without.again
    plain = plan(model, batch, loss=loss, mesh={"dp": 2}, mode="data_parallel")
    assert dict(without.inputs) == dict(plain.inputs)
    with pytest.raises(PlanError, match="threshold_kb"):  # asked for anew, it is no rest
        changed(made, graph, factors_of(graph), {"optimizer_parallel": 0, "threshold_kb": 8})
