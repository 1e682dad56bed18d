"""`meshwright diff`: layers as one line, nothing hidden, exit codes for scripts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import meshwright as mw
from meshwright.core.layout import TensorLayout
from meshwright.examples import mlp
from meshwright.report.diff import difference


@pytest.fixture(scope="module")
def plans():
    model, batch, loss = mlp.build(depth=3)

    def plan(**how):
        return mw.plan(model, batch, loss=loss, mesh={"dp": 2, "tp": 2}, **how)

    return plan(), plan(mode="sharding_propagation", pins={"up.*": {"n": "tp"}})


@pytest.fixture
def files(plans, tmp_path):
    for name, plan in zip("ab", plans, strict=True):
        plan.save(tmp_path / f"{name}.json")
    return tmp_path / "a.json", tmp_path / "b.json"


def test_equal_plans_are_equal(files, meshwright):
    done = meshwright("diff", files[0], files[0])
    assert (done.code, done.out) == (0, "the plans are equal\n")


def test_every_node_and_input_that_differs_is_counted_once(plans):
    a, b = plans
    found = difference(a, b)
    assert sum(c.count for c in found.nodes) == sum(a.strategies[n] != b.strategies[n] for n in a.strategies)
    shown = {(c.what, c.count, c.before, c.after) for c in found.inputs}
    assert ("up_*_weight", 3, "replicated", "[96/tp, 24]") in shown
    assert ("down_*_weight", 3, "replicated", "[24, 96/tp]") in shown
    cut = {n for n in a.inputs if a.inputs[n].forward != b.inputs[n].forward}
    assert sum(c.count for c in found.inputs) == len(cut)


def test_differences_are_shown_with_layers_folded(files, meshwright):
    done = meshwright("diff", *files)
    assert done.code == 1
    up = next(line.split() for line in done.out.splitlines() if line.startswith("up.*"))
    assert up[1:3] == ["×3", "linear"] and up[-2:] == ["d0=dp", "n=tp"]
    assert "data_parallel" in done.out and "sharding_propagation" in done.out
    assert "relu" not in done.out and "relu" in meshwright("diff", *files, "--all").out


@pytest.mark.parametrize(
    "changed",
    [
        {"about": {"linear": ("aten.other.default", "up.0")}},
        {"folds": ((0, 4, 3),)},
        {"times": {"linear": 7}},
        {"reasons": {"linear": "because"}},
        {"nexts": {"linear": "n=tp costs 3 ms more"}},
        {"notes": ("a remark",)},
        {"claims": {"gaps": {"sum": 0.1}}},
        {"claims": {"chosen": "recursion"}},
        {"prices": "other"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_whatever_a_file_holds_is_compared(plans, changed):
    a = plans[0]
    name, value = next(iter(changed.items()))
    b = replace(a, **{name: {**getattr(a, name), **value} if isinstance(value, dict) else value})
    assert a.strategies == b.strategies and "linear" in a.strategies
    assert difference(a, a).equal and not difference(a, b).equal and not difference(b, a).equal


def test_how_long_a_search_took_is_no_difference(plans):
    a, b = (replace(plans[0], claims={"search_seconds": seconds}) for seconds in (1.0, 2.0))
    assert difference(a, b).equal


def test_differences_as_json(files, meshwright):
    data = json.loads(meshwright("diff", *files, "--json").out)
    assert data["equal"] is False
    assert {"what": "mode", "before": "data_parallel", "after": "sharding_propagation"}.items() <= data[
        "facts"
    ][0].items()


def test_hubs_gathering_and_another_mesh_count_as_differences(plans):
    a, _ = plans
    kept = replace(a, hubs={"up_0_weight": TensorLayout.replicated((4,))}, again=frozenset({"enter_weight"}))
    assert [(c.what, c.after) for c in difference(a, kept).hubs] == [
        ("up_0_weight", "replicated"),
        ("enter_weight", "gathered again"),
    ]
    linked = replace(a, mesh=a.mesh.linked({"dp": "node"}))
    assert [c.what for c in difference(a, linked).facts] == ["links"]


def test_techniques_are_differences(plans, files, tmp_path, meshwright):
    model, batch, loss = mlp.build(depth=3)
    asked = {"optimizer_parallel": 2, "micro_batches": 2, "offload": ("optimizer", "activations")}
    mw.plan(model, batch, loss=loss, mesh={"dp": 2, "tp": 2}, **asked).save(tmp_path / "c.json")
    done = meshwright("diff", files[0], tmp_path / "c.json")
    assert done.code == 1
    lines = {" ".join(line.split()) for line in done.out.splitlines()}
    assert {"optimizer_parallel – 2", "micro_batches – 2", "offload – optimizer+activations"} <= lines
    copies = difference(plans[0], replace(plans[0], turns="backward"))
    assert [(c.what, c.after) for c in copies.facts] == [("turns of copies", "backward")]
    kept = difference(plans[0], replace(plans[0], keeps={"linear": "again"}))
    assert [(c.before, c.after) for c in kept.keeps] == [("as autograd does", "computed again")]


def test_stages_are_differences(tmp_path):
    model, batch, loss = mlp.build(depth=3)
    asked = {"mesh": {"dp": 2}, "micro_batches": 2}
    plain = mw.plan(model, batch, loss=loss, **asked)
    two = mw.plan(model, batch, loss=loss, pipeline=2, **asked)
    found = difference(plain, two)
    assert [(c.what, c.before, c.after) for c in found.facts] == [
        ("mesh", "dp=2", "pp=2 × dp=2"),
        ("pipeline", "–", "2"),
    ]
    moved = next(name for name, stage in two.stages.items() if stage == 0)
    found = difference(two, replace(two, stages={**two.stages, moved: 1}))
    assert [(c.before, c.after, c.count) for c in found.stages] == [("stage 0", "stage 1", 1)]
    assert not found.equal and not found.facts


def test_a_file_that_is_no_plan_is_a_message_and_code_2(files, tmp_path, meshwright):
    damaged = tmp_path / "c.json"
    damaged.write_text(files[0].read_text()[:200])
    done = meshwright("diff", files[0], damaged)
    assert done.code == 2 and "is not JSON, or it is truncated" in done.err
    done = meshwright("diff", files[0], tmp_path / "none.json")
    assert done.code == 2 and "cannot be read" in done.err
