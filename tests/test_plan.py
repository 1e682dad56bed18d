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
from meshwright.core.layout import Cat, SubDim, TensorLayout
from meshwright.core.mesh import Mesh
from meshwright.errors import PlanError, StrategyError
from meshwright.examples import gpt, llama, mlp, recommender
from meshwright.ops.strategy import Strategy
from meshwright.plan.plan import Plan, fingerprint
from meshwright.redistribute import TWO_CORE_GLOO, Prices

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
    hubs = {n: replace(x, grad=x.grad[:1]) for n, x in inputs.items() if draw(st.booleans())}
    again = frozenset(n for n in hubs if draw(st.booleans()))
    number = st.floats(0, 1e9, allow_nan=False)
    claims = {"price_seconds": draw(number), "gaps": {"sum": draw(number)}, "space": draw(words)}
    return Plan(
        mesh,
        "semi_auto",
        "0" * 16,
        strategies,
        inputs,
        reasons,
        (draw(words),),
        about,
        pins,
        hubs=hubs,
        again=again,
        prices=draw(st.sampled_from([None, TWO_CORE_GLOO, Prices.ring(draw(number), draw(number))])),
        claims=claims if draw(st.booleans()) else {},
        nexts={n: draw(words) + "!" for n in names if draw(st.booleans())},
    )


@settings(max_examples=60, deadline=None)
@given(plans())
def test_any_plan_is_read_back_as_it_was_written(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan


def test_the_file_has_one_node_a_line_and_is_plain_json() -> None:
    plan = plan_of("gpt", {"dp": 2, "tp": 2}, "sharding_propagation")
    text = plan.to_json()
    data = json.loads(text)
    keys = ["meshwright plan", "mode", "graph", "mesh", "notes", "pins", "inputs", "hubs", "again", "nodes"]
    assert list(data) == keys
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


def test_a_plan_is_shown_in_a_line() -> None:
    model, batch, loss = gpt.build(batch=8)
    plan = mw.plan(model, batch, loss=loss, mesh={"dp": 2}, pipeline=2, micro_batches=2)
    shown = repr(plan)
    assert shown.startswith("<plan by ") and "2 stages" in shown and "\n" not in shown and len(shown) < 120


def test_a_plan_from_a_file_is_the_plan_that_runs() -> None:
    model, batch, loss = built("gpt")
    plan = Plan.from_json(plan_of("gpt", {"dp": 2, "tp": 2}, "sharding_propagation").to_json())
    assert mw.verify(model, batch, loss=loss, plan=plan).raise_if_different().ok


# ---------------------------------------------------------------- hubs, made again, claims


def with_hubs(plan: Plan) -> Plan:
    """Every weight of the linears stored by rows over dp and gathered for its use, the first two again in backward."""
    hubs, inputs = {}, dict(plan.inputs)
    for name, use in plan.inputs.items():
        if name.endswith("weight") and "dp" in use.grad:
            hubs[name] = use
            (rows,) = use.dims[0]
            assert isinstance(rows, SubDim)
            stored = (SubDim(rows.size, (*rows.axes, "dp")),)
            inputs[name] = TensorLayout((stored, *use.dims[1:]), (), tuple(a for a in use.grad if a != "dp"))
    claims = {"price_seconds": 0.0125, "peak_bytes": 3 << 20, "gaps": {"sum": 0.004}, "space": "a"}
    nexts = {"linear": "k=16/tp, 1.2 ms more"}
    return replace(
        plan, hubs=hubs, inputs=inputs, again=frozenset(sorted(hubs)[:2]), claims=claims, nexts=nexts
    )


def hubs_of_mlp() -> Plan:
    return with_hubs(plan_of("mlp", {"dp": 2, "tp": 2}, "sharding_propagation"))


def test_a_plan_with_hubs_is_saved_explained_and_run(tmp_path: Any) -> None:
    plan = hubs_of_mlp()
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["hubs"]["up_0_weight"] == "[96/tp, 24] grad dp"
    assert data["inputs"]["up_0_weight"] == "[96/tp.dp, 24]"
    assert data["nodes"]["linear"]["next"] == plan.nexts["linear"]
    head = "the search says: price 0.0125 s, gaps sum 0.4 %, peak 3.1 MB, space a"
    assert loaded.explain().split("\n")[1] == head and plan.explain().startswith(head)
    assert "next best: k=16/tp, 1.2 ms more" in loaded.explain()
    assert "without its model" in loaded.explain() and "without its model" not in plan.explain()
    model, batch, loss = built("mlp")
    mw.verify(model, batch, loss=loss, plan=loaded).raise_if_different()


def changed(old: str, new: str) -> Any:
    return lambda text: text.replace(old, new, 1)


WRONG = {
    "a hub that does not parse": (
        changed('"up_0_weight": "[96/tp, 24] grad', '"up_0_weight": "[96/tp; 24] grad'),
        "'up_0_weight' does not parse", "unexpected '; 24]", "[96/tp; 24]",
    ),
    "a hub partial both ways": (
        changed('"up_0_weight": "[96/tp, 24] grad dp', '"up_0_weight": "[96/tp, 24] partial dp grad dp'),
        "'up_0_weight' does not parse", "partial on ['dp'] forward and backward", "partial dp grad dp",
    ),
    "a hub over no axis": (
        changed('"leave_weight": "[12, 24] grad dp', '"leave_weight": "[12, 24] grad pp'),
        "'leave_weight' does not parse", "'pp', which the mesh does not have", "grad pp",
    ),
    "made again without a hub": (
        changed('"again": [', '"again": [\n    "up_0_bias",'),
        "'again' does not parse", "%up_0_bias has no hub", '"again"',
    ),
    "made again as a word": (
        changed('"again": [', '"again": "x", "b": ['), "'again'", "$.again: expected list, got str", '"again"',
    ),
    "claims as a list": (
        changed('"claims": {', '"claims": [1], "b": {'), "'claims'", "$.claims: expected mapping, got list", '"claims"',
    ),
    "seconds in words": (
        changed('"price_seconds": 0.0125', '"price_seconds": "fast"'), "'claims'",
        "$.claims.price_seconds: expected float", '"claims"',
    ),
    "a negative gap": (
        changed('"sum": 0.004', '"sum": -0.004'),
        "'claims'", "$.claims.gaps.sum: expected float >= 0.0, got -0.004", '"claims"',
    ),
    "a layer that stands nowhere": (
        changed('"claims": {', '"times": {"linear": 0}, "claims": {'),
        "'times'", "$.times.linear: expected int >= 1, got 0", '"times"',
    ),
    "folds that overlap": (
        changed('"claims": {', '"folds": [[1, 2, 3], [4, 2, 3]], "claims": {'),
        "'folds'", "begins within the one before, which ends at 7", '"folds"',
    ),
    "folds of two": (
        changed('"claims": {', '"folds": [[1, 2, 2]], "claims": {'), "'folds'", "is no stretch", '"folds"',
    ),
    "prices without rates": (
        changed('"claims": {', '"prices": {"growth": "ring", "rows": [["all_reduce", "*"]]}, "claims": {'),
        "'prices'", "$.prices.rows[0]: expected list of length 4, got 2", '"prices"',
    ),
    "version 1": (changed('plan": 2', 'plan": 1'), "has version 1", "reads version 2", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_entry_is_told_with_its_name_and_line(name: str) -> None:
    change, what, why, line = WRONG[name]
    text = change(hubs_of_mlp().to_json())
    with pytest.raises(PlanError) as caught:
        Plan.from_json(text, "plan.json")
    assert what in caught.value.what and why in caught.value.why
    if line:
        number = int(caught.value.where.removeprefix("plan.json:"))
        assert line in text.split("\n")[number - 1]


@pytest.mark.parametrize(
    ("change", "what", "why"),
    (
        (
            lambda p: {"hubs": {**p.hubs, "nowhere": p.hubs["up_0_weight"]}},
            "hub of %nowhere",
            "no value of this name",
        ),
        (
            lambda p: {"hubs": {**p.hubs, "linear": p.hubs["up_0_weight"]}},
            "hub of %linear as [96/tp, 24] grad dp",
            "its shape is [12, 24]",
        ),
        (lambda p: {"again": frozenset({"up_0_bias"})}, "recomputes %up_0_bias", "no hub"),
        (lambda p: {"folds": ((0, 9, 9),)}, "folds equal layers", "nodes 0 to 80, of"),
    ),
)
def test_hubs_that_do_not_fit_the_model_are_refused(change: Any, what: str, why: str) -> None:
    plan = hubs_of_mlp()
    model, batch, loss = built("mlp")
    with pytest.raises(PlanError) as caught:
        mw.verify(model, batch, loss=loss, plan=replace(plan, **change(plan)))
    assert what in caught.value.what and why in caught.value.why


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
    assert plan.notes == ("2 ranks (tp) compute the same in enter, leave: no factor is split there",)
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
    with pytest.raises(PlanError, match="cannot be planned again") as caught:
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
