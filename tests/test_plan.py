"""Plans as files: what is saved is what is loaded, a person can read and compare it, and it belongs to one program."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwright as mw
from meshwright.compile import captured_of
from meshwright.errors import PlanError, StrategyError
from meshwright.examples import gpt, llama, mlp, recommender
from meshwright.layout import Cat, SubDim, TensorLayout
from meshwright.mesh import Mesh
from meshwright.ops.strategy import Strategy
from meshwright.plan import Plan, fingerprint

BUILDS = {
    "mlp": (functools.partial(mlp.build, depth=1), {"up.*": {"n": "tp"}}),
    "gpt": (
        functools.partial(gpt.build, gpt.GPTConfig(48, 24, 1, 4, 8)),
        {"*.qkv": {"n": "tp"}, "head": {"n": "tp"}},
    ),
    "llama": (
        functools.partial(llama.build, llama.LlamaConfig(48, 24, 48, 1, 4, 2, 8)),
        {"*.attention.q": {"n": "tp"}, "*.up": {"n": "tp"}},
    ),
    "recommender": (recommender.build, {"deep_tables.*": {"v": ("dp", "tp")}}),
}


@functools.cache
def built(name: str) -> Any:
    return BUILDS[name][0]()


def plan_of(name: str, mesh: Any, mode: str) -> Plan:
    model, batch, loss = built(name)
    return mw.plan(
        model,
        batch,
        loss=loss,
        mesh=mesh,
        mode=mode,
        pins=None if mode == "data_parallel" else BUILDS[name][1],
    )


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("mode", ("data_parallel", "semi_auto", "sharding_propagation"))
@pytest.mark.parametrize("name", BUILDS)
def test_what_is_saved_is_what_is_loaded(name: str, mode: str, tmp_path: Any) -> None:
    for mesh in (
        {"dp": 2, "tp": 2},
        Mesh.of({"dp": 3, "tp": 1}),
        Mesh.of({"dp": 2, "tp": 2}, order=(0, 2, 1, 3)),
    ):
        plan = plan_of(name, mesh, mode)
        plan.save(tmp_path / "plan.json")
        loaded = Plan.load(tmp_path / "plan.json")
        assert loaded == plan
        assert loaded.to_json() == plan.to_json()


AXES = ("a", "b0", "b1", "c")
words = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)


@st.composite
def dims(draw: st.DrawFn, axes: tuple[str, ...], depth: int = 1) -> tuple[Any, ...]:
    items: list[Any] = []
    for _ in range(draw(st.integers(0, 2))):
        if depth and draw(st.booleans()):
            items.append(Cat(tuple(draw(st.lists(dims((), depth - 1), min_size=1, max_size=3)))))
        else:
            mine = tuple(a for a in axes if draw(st.booleans()))
            axes = tuple(a for a in axes if a not in mine)
            items.append(SubDim(draw(st.integers(16 if mine else 2, 64)), mine))
    return tuple(items)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    mesh = Mesh.of({"a": 2, "b": 4, "c": 1}, order=tuple(draw(st.permutations(range(8)))))
    names = draw(
        st.lists(st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True), min_size=1, max_size=6, unique=True)
    )
    strategies, inputs, reasons, about = {}, {}, {}, {}
    for name in names:
        split = draw(st.sampled_from([(), AXES[:1], AXES[1:3]]))
        rest = [a for a in AXES if a not in split]
        letters = draw(st.lists(st.sampled_from("bmnk"), max_size=2, unique=True))
        cuts = tuple((x, draw(dims(split if i == 0 else ()))) for i, x in enumerate(letters))
        through = ((rest[0], (0, 1)),) if draw(st.booleans()) else ()
        strategies[name] = Strategy(cuts, through, tuple(rest[1:2]) if draw(st.booleans()) else ())
        inputs[name] = TensorLayout(tuple(d for _, d in cuts), (), tuple(rest[:1]))
        reasons[name] = draw(st.sampled_from(["annotated", 'why "not" äöü']))
        about[name] = ("aten.mm.default", draw(words))
    pins = {draw(words): {"n": draw(st.sampled_from(["a", ("a", "b")]))}}
    return Plan(mesh, "semi_auto", "0" * 16, strategies, inputs, reasons, (draw(words),), about, pins)


@settings(max_examples=60, deadline=None)
@given(plans())
def test_any_plan_is_read_back_as_it_was_written(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan


def test_the_file_has_one_node_a_line_and_is_plain_json() -> None:
    plan = plan_of("gpt", {"dp": 2, "tp": 2}, "sharding_propagation")
    text = plan.to_json()
    data = json.loads(text)
    assert list(data) == ["meshwright plan", "mode", "graph", "mesh", "notes", "pins", "inputs", "nodes"]
    lines = text.split("\n")
    for name, entry in data["nodes"].items():
        (line,) = [x for x in lines if x.startswith(f"    {json.dumps(name)}: {{")]
        assert json.loads(line.strip().rstrip(",").partition(": ")[2]) == entry
    assert data["nodes"]["linear"]["cuts"]["n"] == "(3 4/tp 6)"
    assert data["nodes"]["linear"]["module"] == "blocks.0.attention.qkv"


def test_plans_of_two_cuts_differ_in_the_lines_of_what_is_cut_otherwise() -> None:
    one = plan_of("mlp", {"dp": 2, "tp": 2}, "sharding_propagation")
    other = one.pin("leave", n="tp")
    pairs = list(zip(one.to_json().split("\n"), other.to_json().split("\n"), strict=True))
    changed = {a.strip().partition(":")[0].strip('"') for a, b in pairs if a != b}
    assert {"pins", "linear_3", "leave_weight", "leave_bias"} <= changed
    assert not changed & {"linear", "linear_1", "linear_2", "mesh", "graph", "up_0_weight"}


def test_a_plan_from_a_file_is_the_plan_that_runs() -> None:
    model, batch, loss = built("gpt")
    plan = Plan.from_json(plan_of("gpt", {"dp": 2, "tp": 2}, "sharding_propagation").to_json())
    assert mw.verify(model, batch, loss=loss, plan=plan).raise_if_different().ok


# ---------------------------------------------------------------- explain and pin


def test_explain_names_modules_cuts_parameters_and_collectives() -> None:
    text = plan_of("gpt", {"dp": 2, "tp": 2}, "sharding_propagation").explain()
    (qkv,) = [x for x in text.split("\n") if "attention.qkv" in x]
    assert "batch=dp n=tp" in qkv and "(3 24/tp)" in qkv
    (out,) = [x for x in text.split("\n") if "attention.out" in x]
    assert "all_reduce(tp)" in out
    assert "gradients over dp" in text


def test_explain_says_every_note_once() -> None:
    plan = plan_of("mlp", {"dp": 2, "tp": 2}, "sharding_propagation")
    assert plan.notes == ("2 ranks (tp) compute the same in enter, leave: no factor is cut there",)
    assert plan.explain().count(plan.notes[0]) == 1
    assert Plan.from_json(plan.to_json()).explain().count(plan.notes[0]) == 1


def test_a_loaded_plan_still_lists_its_strategies() -> None:
    text = Plan.from_json(plan_of("mlp", {"dp": 2, "tp": 2}, "sharding_propagation").to_json()).explain()
    (line,) = [x for x in text.split("\n") if x.strip().startswith("up.0")]
    assert "aten.linear.default" in line and "n=96/tp" in line and "(annotated)" in line


def test_a_pin_makes_the_plan_again() -> None:
    model, batch, loss = built("mlp")
    plan = mw.plan(model, batch, loss=loss, mesh={"dp": 2, "tp": 2}, mode="sharding_propagation")
    pinned = plan.pin("up.*", n="tp").pin("leave", k="tp")
    assert pinned.pins == {"up.*": {"n": "tp"}, "leave": {"k": "tp"}} and plan.pins == {}
    assert "n=96/tp" in str(pinned.strategies["linear_1"]) and "k=24/tp" in str(pinned.strategies["linear_3"])
    assert pinned == mw.plan(
        model, batch, loss=loss, mesh={"dp": 2, "tp": 2}, mode=plan.mode, pins=pinned.pins
    )
    mw.verify(model, batch, loss=loss, plan=pinned).raise_if_different()
    with pytest.raises(StrategyError, match="no module of the model matches 'down'"):
        plan.pin("down", k="tp")
    with pytest.raises(PlanError, match="takes no pins"):
        plan_of("mlp", 2, "data_parallel").pin("up.*", n="ranks")
    with pytest.raises(PlanError, match="cannot be made again") as caught:
        Plan.from_json(plan.to_json()).pin("up.*", n="tp")
    assert "pins=" in caught.value.hint


def test_a_pin_of_one_node() -> None:
    plan = plan_of("mlp", {"dp": 2, "tp": 2}, "sharding_propagation").pin("%relu", d1="tp")
    assert "d1=96/tp" in str(plan.strategies["relu"])


# ---------------------------------------------------------------- the fingerprint


def test_the_fingerprint_looks_at_the_program_and_not_at_its_lines() -> None:
    model, batch, loss = built("mlp")
    graph = captured_of(model, batch, loss).graph
    moved = replace(
        graph, nodes=tuple(replace(n, source="elsewhere.py:1  x", module="m") for n in graph.nodes)
    )
    assert fingerprint(moved) == fingerprint(graph)
    other = replace(
        graph, nodes=tuple(replace(n, op="aten.gelu.default") if n.name == "relu" else n for n in graph.nodes)
    )
    assert fingerprint(other) != fingerprint(graph)
    assert plan_of("mlp", 2, "data_parallel").fingerprint == fingerprint(graph)


def test_annotations_on_other_lines_leave_the_fingerprint() -> None:
    import torch

    class Net(torch.nn.Module):
        def __init__(self, call: Any) -> None:
            super().__init__()
            self.call, self.w = call, torch.nn.Parameter(torch.ones(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.call(x, self.w).mean()

    one = Net(lambda x, w: mw.shard(torch.matmul, ((2, 1), (1, 1)))(x, w))
    two = Net(lambda x, w: mw.shard(torch.matmul, ((2, 1), (1, 1)))(x, w))
    made = [
        mw.plan(m, {"x": torch.ones(8, 8)}, loss=lambda m, b: m(b["x"]), mesh=2, mode="semi_auto")
        for m in (one, two)
    ]
    assert made[0].fingerprint == made[1].fingerprint
