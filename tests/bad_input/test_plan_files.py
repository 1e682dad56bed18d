"""Plan files that are damaged, edited, or of another model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.errors import PlanError
from meshwright.examples import mlp
from tests.bad_input.wrong import built, perceptron

HERE = Path(__file__).name


def replaced(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new, 1)

    return change


FILES = {
    "truncated": (lambda t: t[: len(t) // 2], "it is truncated", "Unterminated|Expecting", ":2[0-9]"),
    "no JSON": (lambda t: "hello", "is not JSON", "Expecting value", ":1"),
    "another JSON": (lambda t: '{"a": 1}', "is not a plan file", "meshwright plan", ""),
    "a list": (lambda t: "[1]", "is not a plan file", "meshwright plan", ""),
    "a later version": (replaced('plan": 2', 'plan": 9'), "has version 9", "reads version 2", ""),
    "a layout that does not parse": (
        replaced('"[96/tp, 24]', '"[96/tp; 24]'), "'up_0_weight' does not parse", "unexpected '; 24]", ":11",
    ),
    "a cut over no axis": (
        replaced('"n": "96/tp"', '"n": "96/tq"'), "'linear_1' does not parse", "axis 'tq'", ":24",
    ),
    "an axis used twice": (
        replaced('"[96/tp, 24]', '"[96/tp, 24/tp]'), "'up_0_weight' does not parse", "axis 'tp' twice", ":11",
    ),
    "a mesh without ranks": (replaced('["tp", 2', '["tp", 0'), "'mesh' does not parse", "size 0", ":5"),
    "no nodes": (replaced('"nodes"', '"knots"'), "'nodes' does not parse", "no 'nodes' there", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_plan_file_is_told_with_its_line(name: str, tmp_path: Any) -> None:
    change, what, why, where = FILES[name]
    path = tmp_path / "plan.json"
    path.write_text(change(perceptron({"up.*": {"n": "tp"}}).to_json()), encoding="utf-8")
    with pytest.raises(PlanError) as caught:
        mw.Plan.load(path)
    error = caught.value
    assert what in error.what and "plan.json" in error.what
    assert re.search(why, error.why), error.why
    assert re.search(f"plan.json{where}" if where else "", error.where), error.where
    assert "mw.plan" in error.hint


def test_a_mode_by_which_no_plan_is_made_is_told_with_its_line_and_what_was_meant() -> None:
    text = replaced('"mode": "sharding_propagation"', '"mode": "sharding_propagatoin"')(
        perceptron().to_json()
    )
    with pytest.raises(PlanError, match=r"the mode 'sharding_propagatoin', which no plan has") as caught:
        mw.Plan.from_json(text, "plan.json")
    assert caught.value.where == "plan.json:3" and "did you mean 'sharding_propagation'" in caught.value.hint


EDITS = {
    "a cut of another size": (replaced('"n": "96/tp"', '"n": "95/tp"'), "n=95/tp of %linear_1", "n=96"),
    "a letter the operator does not have": (replaced('"n": "96/tp"', '"q": "96/tp"'), "q=96/tp", "n=96"),
    "an input of another shape": (replaced('"[96/tp, 24]', '"[96/tp]'), "%up_0_weight as [96/tp]", "[96, 24]"),
    "an input that is a term of a sum": (
        replaced('"[96/tp, 24] grad dp', '"[96, 24] partial tp'), "%up_0_weight", "terms of a sum",
    ),
    "a node left out": (
        lambda t: "\n".join(x for x in t.split("\n") if '"relu"' not in x), "another model", "%relu",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_plan_file_that_does_not_fit_its_model_is_refused(name: str) -> None:
    change, what, why = EDITS[name]
    model, batch, loss = built()
    plan = mw.Plan.from_json(change(perceptron({"up.*": {"n": "tp"}}).to_json()))
    with pytest.raises(PlanError) as caught:
        mw.verify(model, batch, loss=loss, plan=plan)
    assert what in caught.value.what and why in caught.value.why and "mw.plan" in caught.value.hint


def test_a_plan_of_another_model_is_refused() -> None:
    plan = perceptron()
    model, batch, loss = mlp.build(depth=2)
    with pytest.raises(PlanError, match="another model") as caught:
        mw.verify(model, batch, loss=loss, plan=plan)
    assert "does not know %relu_1" in caught.value.why
    model, batch, loss = mlp.build(depth=1, batch=16)
    with pytest.raises(PlanError, match="another model") as caught:
        mw.verify(model, batch, loss=loss, plan=plan)
    assert caught.value.why == "the plan is for x [12, 16], not [16, 16], y [12], not [16]"


def test_a_missing_plan_file_is_told(tmp_path: Any) -> None:
    with pytest.raises(PlanError, match=r"none.json' cannot be read") as caught:
        mw.Plan.load(tmp_path / "none.json")
    assert "No such file" in caught.value.why
