"""What a user gets wrong, and what they are told: the operator, the line, the numbers and a way out, before any rank
talks to another."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.errors import (
    BatchError,
    CaptureError,
    LayoutError,
    MeshError,
    MeshwrightError,
    PlanError,
    RuleError,
    RunError,
    StrategyError,
)
from meshwright.examples import mlp

LAYOUT = mw.Layout((2, 2, 2), ("dp", "sp", "mp"))
HERE = "test_bad_input.py"


class Net(nn.Module):
    """`body(modules, x)`, squared and averaged."""

    def __init__(self, body: Callable[..., torch.Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.body, self.parts = body, nn.ModuleList(parts)
        self.w = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x).square().mean()


def net(body: Callable[..., torch.Tensor], *parts: nn.Module, x: Any = None, **how: Any) -> mw.Plan:
    x = torch.ones(8, 8) if x is None else x
    return mw.plan(Net(body, *parts), {"x": x}, loss=lambda m, b: m(b["x"]), **how)


def matmul(*ins: Any, out: Any = None, mesh: Any = 8, x: Any = None) -> mw.Plan:
    return net(lambda m, x: mw.shard(torch.matmul, ins, out)(x, m.w), x=x, mesh=mesh, mode="semi_auto")


@functools.cache
def built() -> Any:
    """One perceptron for all, so that it is captured once."""
    return mlp.build(depth=1)


def perceptron(pins: Any = None, mesh: Any = None, mode: Any = "sharding_propagation") -> mw.Plan:
    model, batch, loss = built()
    return mw.plan(model, batch, loss=loss, mesh=mesh or {"dp": 2, "tp": 2}, mode=mode, pins=pins)


@dataclass(frozen=True)
class Case:
    make: Callable[[], Any]
    error: type[MeshwrightError]
    what: str
    why: str
    hint: str
    where: str = ""


CASES = {
    # ---- numbers of blocks
    "zero": Case(
        lambda: mw.shard(torch.matmul, ((0, 4), (4, 1))), StrategyError,
        "in_strategy of matmul has 0", "at least one block", "1 keeps a dim whole", HERE,
    ),
    "negative": Case(
        lambda: mw.shard(torch.matmul, ((2, -4), (4, 1))), StrategyError,
        "in_strategy of matmul has -4", "at least one block", "1 keeps", HERE,
    ),
    "negative in the output": Case(
        lambda: mw.shard(torch.matmul, ((2, 4), (4, 1)), ((-2, 1),)), StrategyError,
        "out_strategy of matmul has -2", "at least one block", "1 keeps", HERE,
    ),
    "not whole": Case(
        lambda: mw.shard(torch.matmul, ((2.0, 4), (4, 1))), StrategyError,
        "has 2.0, which is not a whole number", "counts the blocks", "1, 2, 3", HERE,
    ),
    "a bool": Case(
        lambda: mw.reshard(torch.ones(2), (True,)), StrategyError,
        "mw.reshard has True", "counts the blocks", "1, 2, 3", HERE,
    ),
    "no tuple": Case(
        lambda: mw.shard(torch.matmul, "24"), StrategyError,
        "must be a tuple with one entry for each tensor", "got '24'", "((2, 4), (4, 1))", HERE,
    ),
    "a product over the ranks": Case(
        lambda: matmul((4, 4), (4, 1)), StrategyError,
        "in_strategy of matmul needs 16 ranks, there are 8", "4 · 4 = 16 blocks of %batch_x: f32[8, 8]", "fewer cuts",
        "mw.shard(torch.matmul",
    ),
    "an output over the ranks": Case(
        lambda: matmul((1, 1), (1, 1), out=((4, 4),)), StrategyError,
        "out_strategy of matmul needs 16 ranks", "4 · 4 = 16", "fewer cuts", "mw.shard(torch.matmul",
    ),
    "operands together over the ranks": Case(
        lambda: matmul((2, 4), (4, 2)), StrategyError,
        "cuts dim 1 of %w: f32[8, 8] into 2 blocks, which 8 ranks cannot do", "other dims use 8", "one of 1",
        "mw.shard(torch.matmul",
    ),
    "no axes multiply to it": Case(
        lambda: matmul((4, 1), (1, 1), mesh=6), StrategyError,
        "into 4 blocks, which 6 ranks cannot do", "ranks=6 is 3 × 2, and no part of that is 4", "one of 1, 2, 3, 6",
        "mw.shard(torch.matmul",
    ),
    "more blocks than elements": Case(
        lambda: matmul((8, 1), (1, 1), x=torch.ones(4, 8)), StrategyError,
        "in_strategy of matmul cuts dim 0 of %batch_x into 8 blocks", "f32[4, 8]: the dim has 4 elements", "at most 4",
        "mw.shard(torch.matmul",
    ),
    "groups of a convolution": Case(
        lambda: net(
            lambda m, x: m.parts[0](x), nn.Conv2d(6, 6, 3, groups=3), x=torch.ones(4, 6, 8, 8),
            mesh={"tp": 4}, mode="sharding_propagation", pins={"parts.0": {"g": "tp"}},
        ),
        StrategyError, "cannot cut g of aten.conv2d.default over tp", "g is 3 and would need 4 blocks",
        "at most 3 ranks on that axis", "in parts.0",
    ),
    "a fused dim": Case(
        lambda: net(
            lambda m, x: sum(t.view(8, 3, 8).transpose(0, 1).sum(0) for t in m.parts[0](x).split(24, 1)),
            nn.Linear(8, 72), mesh={"tp": 9}, mode="sharding_propagation", pins={"parts.0": {"n": "tp"}},
        ),
        StrategyError, "cannot cut n of aten.linear.default over tp", "n is (3 3 8) and would need 9 blocks",
        "at most 8 ranks", "in parts.0",
    ),
    # ---- entries
    "an entry too few": Case(
        lambda: matmul((2,), (1, 1)), StrategyError,
        "has 1 entry for a tensor of 2 dims", "%batch_x: f32[8, 8]", "one entry for each dim", "mw.shard",
    ),
    "an entry too many": Case(
        lambda: matmul((2, 1, 1), (1, 1)), StrategyError,
        "has 3 entries for a tensor of 2 dims", "%batch_x: f32[8, 8]", "one entry for each dim", "mw.shard",
    ),
    "a layout with too few dims": Case(
        lambda: matmul(LAYOUT("dp"), LAYOUT("mp", None), mesh=None), StrategyError,
        "has 1 entry for a tensor of 2 dims", "f32[8, 8]", "one entry for each dim", "mw.shard",
    ),
    "a tensor too many": Case(
        lambda: matmul((2, 1), (1, 1), (1, 1)), StrategyError,
        "in_strategy of matmul has 3 entries for 2 tensors", "(2, 1), (1, 1), (1, 1)", "one entry for each tensor",
        "mw.shard",
    ),
    "operands that disagree": Case(
        lambda: matmul((2, 4), (2, 1)), StrategyError,
        "matmul cut one factor in two ways", "dim 0 of %w into 2, dim 1 of %batch_x into 4", "((a, b), (b, c))",
        "mw.shard",
    ),
    # ---- layouts
    "an axis twice in a tensor": Case(
        lambda: LAYOUT("mp", ("mp", "dp")), StrategyError,
        "axis 'mp' is used twice, for dims 0 and 1", "one dim", "another axis", HERE,
    ),
    "an unknown axis": Case(
        lambda: LAYOUT("mpp"), StrategyError, "no dim named 'mpp'", "('dp', 'sp', 'mp')", "'mp'", HERE,
    ),
    "tuples and layouts": Case(
        lambda: mw.shard(torch.matmul, ((2, 4), LAYOUT("mp", "dp"))), StrategyError,
        "matmul mix tuples and layouts", "layouts name them", "all with one mw.Layout", HERE,
    ),
    "a device matrix of another size": Case(
        lambda: matmul(LAYOUT("dp", "sp"), LAYOUT("sp", None), mesh=4), StrategyError,
        "(2, 2, 2) of matmul does not fit the mesh ranks=4", "8 ranks, the mesh has 4",
        "mesh=mw.Mesh.of(dp=2, sp=2, mp=2)", "mw.shard",
    ),
    "a device matrix of another shape": Case(
        lambda: net(
            lambda m, x: mw.reshard(x, mw.Layout((2, 3), ("a", "b"))("a", None)), mesh=6, mode="semi_auto"
        ),
        StrategyError, "(2, 3) of mw.reshard does not fit the mesh ranks=6", "3 × 2", "mw.Mesh.of(a=2, b=3)",
        "mw.reshard",
    ),
    "a device order of its own": Case(
        lambda: net(
            lambda m, x: mw.reshard(x, mw.Layout((2, 2), ("a", "b"), (3, 2, 1, 0))("a", None)),
            mesh=4, mode="semi_auto",
        ),
        StrategyError, "does not fit the mesh", "[3, 2, 1, 0]", "order=[3, 2, 1, 0]", "mw.reshard",
    ),
    "two device matrices": Case(
        lambda: net(
            lambda m, x: mw.reshard(
                mw.reshard(x, LAYOUT("dp", None)), mw.Layout((3, 2), ("a", "b"))("a", None)
            ),
            mode="semi_auto",
        ),
        StrategyError, "describe 2 meshes", "(3, 2)", "prime factors", "mw.reshard",
    ),
    "a device matrix without names": Case(
        lambda: mw.Layout((2, 2), ("dp",)), StrategyError, "2 dims has 1 names", "(2, 2)", "one name for each", HERE,
    ),
    "a name twice": Case(
        lambda: mw.Layout((2, 2), ("dp", "dp")), StrategyError,
        "must be different words", "by their names", 'Layout((2, 4), ("dp", "tp"))', HERE,
    ),
    "a device order that misses a rank": Case(
        lambda: mw.Layout((2, 2), ("dp", "tp"), (0, 1, 2, 2)), StrategyError,
        "each of the 4 ranks once", "(0, 1, 2, 2)", "permutation of 0 … 3", HERE,
    ),
    # ---- what must stay whole
    "the dim of a softmax": Case(
        lambda: net(lambda m, x: mw.shard(F.softmax, ((1, 2),))(x @ m.w, dim=-1), mesh=2, mode="semi_auto"),
        StrategyError, "in_strategy of softmax cuts dim 1 of f32[8, 8] into 2 blocks", "all of its elements",
        "1 for that dim", "mw.shard(F.softmax",
    ),
    "the width of a norm": Case(
        lambda: net(
            lambda m, x: m.parts[0](x), mw.shard(nn.LayerNorm(8), ((1, 2),)), mesh=2, mode="semi_auto"
        ),
        StrategyError, "in_strategy of LayerNorm cuts dim 1", "all of its elements", "1 for that dim", "in parts.0",
    ),
    "the width of a norm, pinned": Case(
        lambda: net(
            lambda m, x: m.parts[0](x), nn.LayerNorm(8),
            mesh=2, mode="sharding_propagation", pins={"parts.0": {"h0": "ranks"}},
        ),
        StrategyError, "h0 of aten.layer_norm.default must stay whole", "all of its elements",
        "it can be cut by a0", "in parts.0",
    ),
    # ---- pins
    "a module that is not there": Case(
        lambda: perceptron({"upp.*": {"n": "tp"}}), StrategyError,
        "no module of the model matches 'upp.*'", "4 modules", "did you mean 'up.0'",
    ),
    "a factor that is not there": Case(
        lambda: perceptron({"up.*": {"z": "tp"}}), StrategyError,
        "no operator of 'up.*' has a factor 'z'", "aten.linear.default has d0=12, k=24, n=96", "known: d0, k, n",
        "mlp.py",
    ),
    "an axis that is not there": Case(
        lambda: perceptron({"up.*": {"n": "tpp"}}), MeshError,
        "the mesh has no axis 'tpp'", "dp=2 × tp=2", "did you mean 'tp'",
    ),
    "an axis for two factors": Case(
        lambda: perceptron({"up.*": {"n": "tp", "k": "tp"}}), StrategyError,
        "axis 'tp' is used twice in aten.linear.default, for n and for k", "one factor", "another axis", "in up.0",
    ),
    "an axis twice for a factor": Case(
        lambda: perceptron({"up.*": {"n": ("tp", "tp")}}), StrategyError,
        "uses an axis twice for n", "tp, tp", "each axis once", "in up.0",
    ),
    "more ranks than elements": Case(
        lambda: perceptron({"leave": {"n": "tp"}}, {"tp": 16}), StrategyError,
        "cannot cut n of aten.linear.default over tp", "n is 12 and would need 16 blocks", "at most 12", "in leave",
    ),
    "a number for an axis": Case(
        lambda: perceptron({"up.*": {"n": 2}}), StrategyError,
        "cuts n over 2", "by its name", '{"n": ("dp", "tp")}',
    ),
    "an axis for a module": Case(
        lambda: perceptron({"up.*": "tp"}), StrategyError,
        "the pin of 'up.*' is 'tp'", "which factor", '{"n": "tp"}',
    ),
    "pins in a list": Case(
        lambda: perceptron([("up.*", "tp")]), StrategyError, "is a list", "pattern", "pins={",
    ),
    "pins in data parallel": Case(
        lambda: perceptron({"up.*": {"n": "tp"}}, mode="data_parallel"), PlanError,
        'mode="data_parallel" takes no pins', "all 4 ranks", "sharding_propagation",
    ),
    # ---- modes, meshes, models
    "no such mode": Case(
        lambda: perceptron(mode="data_paralel"), PlanError,
        "no mode 'data_paralel'", "semi_auto", "did you mean 'data_parallel'?",
    ),
    "no mode": Case(lambda: perceptron(mode=""), PlanError, "no mode ''", "semi_auto", "known: auto"),
    "a search without a cluster": Case(
        lambda: perceptron(mode="dynamic_programming"), PlanError,
        "mode='dynamic_programming' needs a cluster", "seconds and bytes", "cluster=mw.Cluster.local(4)",
    ),
    "manual": Case(
        lambda: perceptron(mode="manual"), PlanError, "has no plan", "its own collectives", "mw.manual_step",
    ),
    "alone on two": Case(
        lambda: perceptron(mesh=2, mode="stand_alone"), PlanError,
        "one rank, the mesh has 2", "ranks=2", 'mode="data_parallel"',
    ),
    "an axis without ranks": Case(
        lambda: perceptron(mesh={"dp": 0}), MeshError, "axis 'dp' has size 0", "at least 1", "the number of ranks",
    ),
    "a fraction of ranks": Case(
        lambda: perceptron(mesh={"dp": 2.5}), MeshError, "axis 'dp' has size 2.5", "whole number", "number of ranks",
    ),
    "a text for a mesh": Case(
        lambda: perceptron(mesh="4"), MeshError, "mesh='4' is not a mesh", "a str", 'mesh={"dp": 2, "tp": 2}',
    ),
    "a yes for a mesh": Case(
        lambda: perceptron(mesh=True), MeshError, "mesh=True is not a mesh", "a bool", "mesh=4",
    ),
    "a name that a layout cannot hold": Case(
        lambda: perceptron(mesh={"a.b": 2}), MeshError, "'a.b' cannot name an axis", "32/dp.tp", "letters, digits",
    ),
    "an order that misses a rank": Case(
        lambda: mw.Mesh.of({"dp": 2}, order=(0, 0)), MeshError, "each rank once", "[0, 0]", "permutation of 0 … 1",
    ),
    "a batch smaller than the ranks": Case(
        lambda: perceptron(mesh=16, mode="data_parallel"), StrategyError,
        "a batch of 12 cannot be cut over 16 ranks", "x is f32[12, 16] and ranks has 16 ranks", "at most 12 ranks",
    ),
    "a batch without tensors": Case(
        lambda: mw.plan(nn.Linear(8, 8), {}, loss=lambda m, b: m(torch.ones(8, 8)).mean(), mesh=2), StrategyError,
        "no dim of the batch is known to count examples", "no tensors", "first dim",
    ),
    "a function for a model": Case(
        lambda: mw.plan(torch.relu, torch.ones(2), mesh=2), CaptureError,
        "not a torch.nn.Module", "parameters", "loss=lambda model, batch",
    ),
    "a loss that is no number": Case(
        lambda: mw.plan(nn.Linear(8, 8), torch.ones(8, 8), mesh=2), CaptureError,
        "the loss is not a scalar", "shape [8, 8]", ".mean()",
    ),
    "a branch on a value": Case(
        lambda: net(lambda m, x: x * 2 if x.sum() > 0 else x, mesh=2), CaptureError,
        "decides by the values of a tensor", "data-dependent", "data parallel: mw.manual_step",
        "x * 2 if x.sum() > 0 else x",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_told_with_the_reason_the_place_and_a_way_out(name: str) -> None:
    case = CASES[name]
    with pytest.raises(case.error) as caught:
        case.make()
    error = caught.value
    assert case.what in error.what
    assert case.why in error.why and error.why
    assert case.hint in error.hint and error.hint
    assert case.where in error.where
    assert str(error).splitlines()[1].startswith("  why:   ")
    assert not dist.is_initialized()


# ---------------------------------------------------------------- steps


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_an_optimizer_instead_of_a_function_is_refused() -> None:
    model, batch, loss = built()
    with pytest.raises(RunError, match=r"optimizer is a SGD, not a function") as caught:
        mw.train_step(model, sgd(model.parameters()), batch, loss=loss, mesh=1)  # type: ignore[arg-type]
    assert "the parts of the parameters" in caught.value.why and "lambda parameters" in caught.value.hint


def test_a_plan_for_more_ranks_than_were_launched_is_refused_before_anything_starts() -> None:
    model, batch, loss = built()
    plan = mw.plan(model, batch, loss=loss, mesh={"dp": 2, "tp": 2})
    with pytest.raises(RunError, match=r"4 ranks \(dp=2 × tp=2\), 1 was launched") as caught:
        mw.train_step(model, sgd, batch, loss=loss, plan=plan)
    assert "--nproc 4" in caught.value.hint and not dist.is_initialized()


def test_a_plan_for_fewer_ranks_than_were_launched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    model, batch, loss = built()
    with pytest.raises(RunError, match=r"4 ranks .*, 8 were launched"):
        mw.train_step(model, sgd, batch, loss=loss, mesh=4)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            lambda b: {"x": b["x"][:5], "y": b["y"]},
            r"'x' is f32\[5, 16\], the step was built for f32\[12, 16\]",
        ),
        (lambda b: {"x": b["x"].double(), "y": b["y"]}, r"'x' is f64\[12, 16\], .* for f32\[12, 16\]"),
        (lambda b: {"x": b["x"], "z": b["y"]}, "the batch has no 'y'"),
        (lambda b: None, "the batch has no 'x'"),
    ],
)
def test_a_batch_unlike_the_example_is_refused(change: Callable[[Any], Any], what: str) -> None:
    model, batch, loss = built()
    step = mw.train_step(model, sgd, batch, loss=loss, mesh=1)
    before = {n: p.clone() for n, p in step.parameters.items()}
    with pytest.raises(BatchError, match=what) as caught:
        step(change(batch))
    assert caught.value.why and caught.value.hint
    assert all(torch.equal(before[n], p) for n, p in step.parameters.items())


# ---------------------------------------------------------------- plan files


def replaced(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new, 1)

    return change


FILES = {
    "cut short": (lambda t: t[: len(t) // 2], "was cut short", "Unterminated|Expecting", ":2[0-9]"),
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
    with pytest.raises(PlanError, match=r"the mode 'sharding_propagatoin', by which no plan") as caught:
        mw.Plan.from_json(text, "plan.json")
    assert caught.value.where == "plan.json:3" and "did you mean 'sharding_propagation'" in caught.value.hint


EDITS = {
    "a cut of another size": (replaced('"n": "96/tp"', '"n": "95/tp"'), "n=95/tp of %linear_1", "n=96"),
    "a letter the operator does not have": (replaced('"n": "96/tp"', '"q": "96/tp"'), "q=96/tp", "n=96"),
    "an input of another shape": (replaced('"[96/tp, 24]', '"[96/tp]'), "%up_0_weight as [96/tp]", "[96, 24]"),
    "an input that is a term of a sum": (
        replaced('"[96/tp, 24] grad dp', '"[96, 24] pending tp'), "%up_0_weight", "terms of a sum",
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
    assert "shapes or wiring differ" in caught.value.why


def test_a_missing_plan_file_is_told(tmp_path: Any) -> None:
    with pytest.raises(PlanError, match=r"none.json' cannot be read") as caught:
        mw.Plan.load(tmp_path / "none.json")
    assert "No such file" in caught.value.why


# ---------------------------------------------------------------- operators without a rule

_lib = torch.library.Library("bad_input", "FRAGMENT")
_lib.define("bend(Tensor x) -> Tensor")
_lib.impl("bend", lambda x: x.sin() * 2, "CompositeExplicitAutograd")
torch.library.register_fake("bad_input::bend", lambda x: torch.empty_like(x), lib=_lib)
torch.library.register_autograd(
    "bad_input::bend",
    lambda ctx, g: g * ctx.saved_tensors[0].cos() * 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    lib=_lib,
)


def test_an_operator_without_a_rule_stays_whole_says_so_and_is_cut_once_it_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import meshwright.ops.table as table

    monkeypatch.setattr(table, "_USER", {})
    model = Net(lambda m, x: torch.ops.bad_input.bend(m.parts[0](x)), nn.Linear(8, 6))
    batch = {"x": torch.randn(8, 8)}
    how: dict[str, Any] = {"loss": lambda m, b: m(b["x"]), "mesh": 4}
    plan = mw.plan(model, batch, **how)
    (note,) = plan.notes
    assert "no rule is known for bad_input.bend.default, so it stays whole: all 4 ranks repeat it" in note
    assert "192 B of its inputs are brought whole to each" in note  # 8 × 6 × 4 bytes
    assert HERE in note and "mw.rule('bad_input.bend'" in note
    assert " ".join(note.split()) in " ".join(plan.explain().split())
    assert str(plan.strategies["bend"]) == "whole"
    mw.verify(model, batch, plan=plan, loss=how["loss"]).raise_if_different()
    mw.rule("bad_input::bend", "... ~> ...")
    plan = mw.plan(model, batch, **how)
    assert plan.notes == () and str(plan.strategies["bend"]) == "d0=8/ranks0.ranks1"
    mw.verify(model, batch, plan=plan, loss=how["loss"]).raise_if_different()


@pytest.mark.parametrize(
    ("text", "message"),
    [("a b", "has no arrow"), ("a $ -> a", "stray '\\$'"), ("a -> ...", "'...' only in an output")],
)
def test_a_rule_that_does_not_parse_is_refused(text: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        mw.rule("bad_input::bend", text)


def test_a_rule_that_does_not_fit_its_operator_names_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    import meshwright.ops.table as table

    monkeypatch.setattr(table, "_USER", {})
    mw.rule("bad_input::bend", "a b c -> a b c")
    with pytest.raises(RuleError, match=r"'a b c -> a b c' does not fit") as caught:
        net(lambda m, x: torch.ops.bad_input.bend(x), mesh=2)
    assert "3 dims" in caught.value.why and HERE in caught.value.where


def test_an_annotation_that_a_mode_does_not_read_is_noted() -> None:
    plan = net(lambda m, x: mw.shard(torch.matmul, ((2, 1), (1, 1)))(x, m.w), mesh=2)
    assert any('mode="data_parallel" does not look at annotations: matmul' in n for n in plan.notes)


def test_layouts_that_disagree_are_moved_and_noted() -> None:
    """One axis cannot cut a batch and a contracted dim at once: the matmul takes one of them, and the plan says so."""
    plan = net(
        lambda m, x: mw.shard(torch.matmul, (LAYOUT("dp", "sp"), LAYOUT("sp", "dp")))(x, m.w),
        mode="semi_auto",
    )
    (note,) = [n for n in plan.notes if "annotated" in n]
    assert "in_strategy of matmul" in note and "so it is moved" in note and HERE in note


def test_a_law_of_layouts_that_breaks_is_a_layout_error() -> None:
    from meshwright.layout import parse_layout, verify

    with pytest.raises(LayoutError, match="uses axis 'tp' twice, in dims 0 and 1"):
        verify(parse_layout("[8/tp, 8/tp]"), mw.Mesh.of(tp=2))
