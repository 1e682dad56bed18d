"""Optimizer parallel as layouts: what is split over which ranks, what stays whole and why, and what is refused."""

from __future__ import annotations

import fnmatch
from typing import Any

import pytest

import meshwright as mw
from meshwright.core.layout import TensorLayout
from meshwright.core.layout_text import parse_layout
from meshwright.core.mesh import Mesh
from meshwright.errors import PlanError
from meshwright.examples import mlp
from meshwright.plan.plan import Plan
from meshwright.predict.price import program_price
from meshwright.redistribute.steps import largest_size
from meshwright.redistribute.storage import repeated_axes, run_of, stored
from tests.search.planned import built, cluster, lowered, made, peaks


def planned(mesh: dict[str, int], pins: Any = None, **techniques: Any) -> Plan:
    model, batch, loss = mlp.build(depth=1, batch=12)
    mode = "sharding_propagation" if pins else "data_parallel"
    return mw.plan(model, batch, loss=loss, mesh=mesh, mode=mode, pins=pins, **techniques)


@pytest.mark.parametrize(
    ("use", "axes", "expected"),
    (
        ("[96, 24] grad dp0.dp1.dp2", "dp0.dp1.dp2", "[96/dp0.dp1.dp2, 24]"),
        ("[96/tp, 24] grad dp0.dp1", "dp0.dp1", "[96/tp.dp0.dp1, 24]"),
        ("[90, 24] grad dp0.dp1.dp2", "dp0.dp1.dp2", "[90, 24/dp0.dp1.dp2]"),  # the dim that divides
        ("[90, 21] grad dp0.dp1", "dp0.dp1", "[90/dp0.dp1, 21]"),  # none does: the one that leaves least
        ("[96] grad dp0", "dp0.tp", "[96/tp.dp0]"),  # sliced where the gradient is whole, scattered within
        ("[96, 24] grad dp0.dp1", "dp1", "[96/dp1, 24] grad dp0"),
        ("[(3 8/tp), 24] grad dp0", "dp0", "[(3 8/tp.dp0), 24]"),
        ("[{32/tp | 8/tp}, 5] grad dp0", "dp0", "[{32/tp.dp0 | 8/tp.dp0}, 5]"),
        ("[2, 2, 3] grad dp0.dp1.dp2", "dp0.dp1.dp2", "[2/dp1, 2/dp2, 3/dp0]"),  # several dims share the axes
    ),
)
def test_storage_is_cut_where_it_divides_then_where_least_is_left(use: str, axes: str, expected: str) -> None:
    mesh = Mesh.of(dp=8, tp=2)
    found = stored(parse_layout(use), axes.split("."), mesh)
    if expected == "[2/dp1, 2/dp2, 3/dp0]":
        assert largest_size(found, mesh) == 2 and set(found.split_axes) == set(axes.split("."))
    else:
        assert found == parse_layout(expected)


def test_runs_of_axes_are_innermost_first() -> None:
    mesh = Mesh.of(dp=12, tp=2)  # dp: 3, 2, 2
    axes = tuple(a.name for a in mesh.axes)
    assert run_of(axes, 4, mesh) == ("dp2", "tp")
    assert run_of(axes, 6, mesh) == ("dp0", "dp1")  # the only run of six
    assert run_of(axes, 5, mesh) == ("dp2", "tp")
    assert repeated_axes(TensorLayout.replicated((4,)), mesh) == axes


def test_level_three_stores_split_and_gathers_again() -> None:
    plan = planned({"dp": 4}, optimizer_parallel=3, threshold_kb=0)
    plain = planned({"dp": 4})
    for name, use in plain.inputs.items():
        if use.grad:
            assert plan.hubs[name] == use
            assert plan.inputs[name].split_axes == ("dp0", "dp1") and not plan.inputs[name].grad
            assert name in plan.again
    assert not plan.states


@pytest.mark.parametrize("level", (1, 2))
def test_lower_levels_keep_weights_as_they_are_used(level: int) -> None:
    plan = planned({"dp": 4}, optimizer_parallel=level, threshold_kb=0)
    assert plan.inputs == planned({"dp": 4}).inputs and not plan.hubs
    assert {n for n, use in plan.inputs.items() if use.grad} == set(plan.states)
    assert all(s.split_axes == ("dp0", "dp1") for s in plan.states.values())
    assert Plan.from_json(plan.to_json()) == plan


def test_parameters_cut_by_operators_are_split_further() -> None:
    plan = planned(
        {"dp": 2, "tp": 2}, {"up.*": {"n": "tp"}, "down.*": {"k": "tp"}}, optimizer_parallel=1, threshold_kb=0
    )
    assert str(plan.states["up_0_weight"]) == "[96/tp.dp, 24]"
    assert str(plan.states["down_0_weight"]) == "[24/dp, 96/tp]"


def test_what_stays_whole_is_said_with_the_reason() -> None:
    plan = planned({"dp": 4}, optimizer_parallel=2, threshold_kb=1, keep_whole=("up.*",))
    said = [n for n in plan.notes if n.startswith("optimizer parallel")]
    assert any("up.0.weight" in n and "as asked by keep_whole" in n for n in said)
    assert any("enter.bias" in n and "below 1 KiB" in n for n in said)
    named = {n.replace("_", ".") for n in plan.states} | {"up.0.weight", "up.0.bias"}
    assert {"down.0.weight", "enter.weight", "leave.weight"} <= named
    assert "up_0_weight" not in plan.states and "enter_bias" not in plan.states


def test_shard_size_leaves_the_rest_to_a_sum() -> None:
    plan = planned({"dp": 8}, optimizer_parallel=3, shard_size=2, threshold_kb=0)
    assert plan.inputs["up_0_weight"] == parse_layout("[96/dp2, 24] grad dp0.dp1")


@pytest.mark.parametrize(
    ("techniques", "what", "helped"),
    (
        ({"optimizer_parallel": 1, "shard_size": 3}, "shard_size=3", "sizes that work: 2, 4, 8"),
        ({"optimizer_parallel": 1, "keep_whole": ("up.0.wieght",)}, "up.0.wieght", "up.0.weight"),
        ({"shard_size": 2}, "without optimizer_parallel", "optimizer_parallel=1"),
        ({"keep_whole": ("up.*",)}, "without optimizer_parallel", "optimizer_parallel=1"),
    ),
)
def test_what_cannot_be_is_refused(techniques: dict[str, Any], what: str, helped: str) -> None:
    with pytest.raises(PlanError) as error:
        planned({"dp": 8}, **techniques)
    assert what in str(error.value) and helped in str(error.value)


def test_an_edited_plan_that_updates_more_than_it_holds_is_refused() -> None:
    model, batch, loss = mlp.build(depth=1, batch=12)
    plan = planned({"dp": 4}, optimizer_parallel=1, threshold_kb=0)
    text = plan.to_json().replace('"up_0_weight": "[96/dp0.dp1, 24]"', '"up_0_weight": "[96, 21/dp0]"')
    with pytest.raises(PlanError, match="updates %up_0_weight"):
        mw.verify(model, batch, loss=loss, plan=Plan.from_json(text))


def test_a_search_honours_the_level_and_claims_what_runs() -> None:
    asked = made("mlp", "2x2", "auto", optimizer_parallel=3, threshold_kb=0)
    assert asked.hubs and all(asked.inputs[n].split_axes for n in asked.again)
    program = lowered("mlp", asked)
    assert asked.claims["price_seconds"] == program_price(program, cluster("gpu", "2x2")).total
    assert asked.claims["peak_bytes"] == max(p.bytes for p in peaks("mlp", asked, cluster("gpu", "2x2")))
    assert "gaps" not in asked.claims  # those are of the search's own plan


def test_every_parameter_that_stays_whole_is_named_in_few_words() -> None:
    model, batch, loss = built("gpt")
    plan = mw.plan(
        model,
        batch,
        loss=loss,
        mesh={"dp": 2},
        optimizer_parallel=3,
        threshold_kb=1,
        keep_whole=("blocks.0.*.weight",),
    )
    said = [n for n in plan.notes if n.startswith("optimizer parallel")]
    sizes = {n: 4 * p.numel() for n, p in model.named_parameters()}
    asked = [n for n in sizes if n.startswith("blocks.0.") and n.endswith(".weight")]
    small = [n for n in sizes if sizes[n] < 1024 and n not in asked]
    for note, names in zip(said, (asked, small), strict=True):
        told = note.removeprefix("optimizer parallel: ").partition(" stay replicated, ")[0]
        found: list[str] = []
        for one in told.split(", "):
            pattern, _, count = one.partition(" ×")
            found += [n for n in sizes if fnmatch.fnmatchcase(n, pattern)]
            assert len(fnmatch.filter(sizes, pattern)) == int(count or 1)
        assert sorted(found) == sorted(names)
    assert " ×" in said[1] and len(said[1]) < 400
