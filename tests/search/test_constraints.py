"""Searched plans keep what the user cut, say when it cannot be, and give what they have when they are stopped."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.compile import captured_of
from meshwright.core.layout import dim_axes
from meshwright.core.mesh import Mesh
from meshwright.errors import StrategyError
from meshwright.examples import zoo
from meshwright.ops.analysis import factors_of
from meshwright.ops.strategy import Strategy
from meshwright.plan.plan import Plan
from meshwright.search import deadline
from meshwright.search.evaluate import Evaluator
from meshwright.search.planner import Evaluation
from meshwright.search.space.codes import values_of
from meshwright.search.space.codes_shared import all_codes
from meshwright.search.space.constraints import honouring, option_on
from meshwright.search.space.families import named
from meshwright.search.space.variables import Choice
from meshwright.search.space.wiring import Ties
from tests.breadth import quick
from tests.search.planned import MESHES, SEARCHES, built, cluster, free, made, press_ctrl_c, tight


def cuts_of(plan: Plan, module: str) -> list[dict[str, tuple[str, ...]]]:
    """Letter → axes, of the linear layers of a module."""
    return [
        {letter: plan.mesh.sort(dim_axes(dim)) for letter, dim in plan.strategies[name].splits}
        for name, (op, inside) in plan.about.items()
        if inside == module and "linear" in op
    ]


@pytest.mark.parametrize("mode", SEARCHES)
@pytest.mark.parametrize("kind", ("gpu", "gloo"))
def test_pins_are_kept_whatever_they_cost(mode: str, kind: str) -> None:
    plan = made("mlp", "2x2", mode, kind, pins={"up.*": {"n": "tp"}})
    found = [cuts for name in ("up.0", "up.1") for cuts in cuts_of(plan, name)]
    assert found and all(cuts["n"][-1:] == ("tp",) for cuts in found)
    # A wish can only cost: the free plan is as good by what the mode minimises.
    if mode == "dynamic_programming":
        assert plan.claims["price_seconds"] >= free("mlp", "2x2", mode, kind).claims["price_seconds"] - 1e-12


@pytest.mark.parametrize("mode", SEARCHES)
@quick(lambda mode: mode != "auto")
def test_a_plan_is_made_again_with_one_more_pin(mode: str) -> None:
    plan = free("mlp", "2x2", mode).pin("enter", n="dp").pin("leave", k="tp")
    assert all(cuts["n"] == ("dp",) or "dp" in cuts["n"] for cuts in cuts_of(plan, "enter"))
    assert all("tp" in cuts["k"] for cuts in cuts_of(plan, "leave"))
    net, batch, loss = built("mlp")
    mw.verify(net, batch, loss=loss, plan=plan).raise_if_different()


@pytest.mark.parametrize("mode", SEARCHES)
@quick(lambda mode: mode != "auto")
def test_pins_are_kept_within_memory_too(mode: str) -> None:
    limit = 0.9 * free("wide mlp", "2x2", "dynamic_programming", "gloo").claims["peak_bytes"]
    plan = made("wide mlp", "2x2", mode, "gloo", pins={"layers.1": {"n": "tp"}}, memory=limit)
    assert all("tp" in cuts["n"] for cuts in cuts_of(plan, "layers.1"))
    assert plan.claims["peak_bytes"] <= limit


@pytest.mark.parametrize("mode", SEARCHES)
@pytest.mark.parametrize(
    ("pins", "what"),
    [
        ({"up.*": {"z": "tp"}}, "no operator of 'up.*' has a factor 'z'"),
        ({"upp.*": {"n": "tp"}}, "no module of the model matches 'upp.*'"),
        ({"leave": {"n": "tp"}, "up.0": {"n": ("tp", "tp")}}, "uses an axis twice"),
    ],
)
def test_a_pin_that_cannot_be_is_refused(mode: str, pins: Any, what: str) -> None:
    with pytest.raises(StrategyError) as caught:
        made("mlp", "2x2", mode, pins=pins)
    assert what in caught.value.what


@pytest.mark.parametrize("mode", SEARCHES)
def test_a_pin_with_more_ranks_than_elements_is_refused(mode: str) -> None:
    """ResNet's first convolution reads three channels."""
    with pytest.raises(StrategyError, match="cannot split") as caught:
        made("resnet", "8", mode, pins={"*embedder.embedder.convolution": {"i": "tp"}})
    assert "8 blocks" in caught.value.why


class Marked(nn.Module):
    """A product whose layouts stand in the code, between two layers that are free."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave = nn.Linear(16, 24), nn.Linear(24, 8)
        self.w = nn.Parameter(torch.randn(24, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layout = mw.Layout((2, 2), ("dp", "tp"))
        cut = mw.shard(torch.matmul, (layout("None", "tp"), layout("tp", "None")))
        return self.leave(torch.tanh(cut(self.enter(x), self.w))).square().mean()


@pytest.mark.parametrize("mode", SEARCHES)
def test_layouts_in_the_code_are_kept(mode: str) -> None:
    torch.manual_seed(0)
    model, batch, loss = Marked(), {"x": torch.randn(8, 16)}, lambda m, b: m(b["x"])
    plan = mw.plan(model, batch, loss=loss, cluster=cluster("gloo", "2x2"), mesh=MESHES["2x2"], mode=mode)
    (product,) = [plan.strategies[n] for n, (op, _) in plan.about.items() if "matmul" in op or "mm" in op]
    assert "tp" in [a for _, dim in product.splits for a in dim_axes(dim)]
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


# ---------------------------------------------------------------- an interrupt


class Stop:
    """Asks for the end at the n-th report and each after it."""

    def __init__(self, after: int) -> None:
        self.after, self.reports = after, []

    def __call__(self, stage: str, price: float | None, bound: float | None) -> bool:
        self.reports.append((stage, price, bound))
        return len(self.reports) >= self.after


@pytest.mark.parametrize("after", (1, 2, 4))
def test_an_interrupt_ends_auto_with_the_best_so_far(after: int) -> None:
    stop = Stop(after)
    plan = made("mlp", "2x2", "auto", progress=stop)
    first = next(n for n, (_, price, _) in enumerate(stop.reports, 1) if price is not None)
    assert len(stop.reports) <= max(after, first) + 1  # what the interrupted search had found is reported
    seen = [price for _, price, _ in stop.reports if price is not None]
    assert plan.claims["step_seconds"] <= min(seen)
    assert plan.claims["step_seconds"] >= free("mlp", "2x2", "auto").claims["step_seconds"]
    assert plan.claims["chosen"] in plan.claims["candidates"]


@pytest.mark.full
def test_an_interrupt_while_the_best_is_judged_in_full_gives_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The search is over then, and what it answers is evaluated all the same."""
    in_full, calls = Evaluator.in_full, []

    def interrupted(evaluator: Evaluator, choice: Choice, *, timed: bool = True) -> Evaluation:
        calls.append(choice)
        press_ctrl_c()
        return in_full(evaluator, choice, timed=timed)

    monkeypatch.setattr(Evaluator, "in_full", interrupted)
    monkeypatch.setattr(deadline, "TO_END", 60.0)  # a busy machine would leave the search behind
    model, batch, loss = zoo.hugging_face("llama", layers=6, sequence=8, hidden=24, vocabulary=48)
    plan = mw.plan(model, batch, loss=loss, cluster=cluster("gloo", "2x2"), mesh=MESHES["2x2"], mode="auto")
    assert len(calls) == 1
    assert plan.claims["step_seconds"] == plan.claims["candidates"][plan.claims["chosen"]]


@pytest.mark.parametrize("after", (1, 3))
def test_an_interrupt_ends_the_exact_search_with_the_best_so_far(after: int) -> None:
    limit = 0.85 * free("wide mlp", "2x2", "dynamic_programming", "gloo").claims["peak_bytes"]
    stop, never = Stop(after), Stop(1 << 30)
    plan = made("wide mlp", "2x2", "dynamic_programming", "gloo", memory=limit, progress=stop)
    made("wide mlp", "2x2", "dynamic_programming", "gloo", memory=limit, progress=never)
    assert plan.claims["peak_bytes"] <= limit
    assert after <= len(stop.reports) < len(never.reports)
    assert any("the search was interrupted" in note for note in plan.notes)


def test_a_second_ctrl_c_interrupts() -> None:
    def progress(stage: str, price: float | None, bound: float | None) -> None:
        press_ctrl_c()
        press_ctrl_c()

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        made("mlp", "2x2", "auto", progress=progress)
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize("after", (1, 2, 3))
@pytest.mark.parametrize("share", (0.5, 0.6, 0.7))
@quick(lambda share, after: (share, after) in ((0.6, 2), (0.7, 3)))
def test_an_interrupt_under_a_limit_gives_what_fits(share: float, after: int) -> None:
    """Below what the first candidate takes: without anything that fits the search goes on to the first that does."""
    limit = share * tight("wide mlp", "2x2", "auto", "gloo").claims["peak_bytes"]
    plan = made("wide mlp", "2x2", "auto", "gloo", memory=limit, progress=Stop(after))
    assert plan.claims["peak_bytes"] <= limit


def test_progress_gets_better_and_ends_at_what_was_found() -> None:
    never = Stop(1 << 30)
    plan = made("gpt", "2x2", "auto", progress=never)
    bounds = [bound for _, _, bound in never.reports if bound is not None]
    prices = [price for _, price, _ in never.reports if price is not None]
    assert prices and bounds
    assert min(prices) == pytest.approx(plan.claims["step_seconds"], rel=1e-9)


def test_a_wish_that_is_no_option_of_a_search_is_refused() -> None:
    graph = captured_of(*built("mlp")).graph
    factors, mesh = factors_of(graph), Mesh.of({"dp": 2, "tp": 2})
    values = values_of(graph, factors)
    codes = all_codes(graph, factors, values, Ties())
    name = next(n.name for n in graph.nodes if n.op == "aten.linear.default")
    constraint = Strategy(through=(("tp", (0,)),))  # a linear layer with a bias is no sum of what comes in
    assert option_on(codes[name], constraint, "tp") not in codes[name].options
    family = honouring(named([[0], [1]]), {"tp": {name: constraint}}, mesh)
    with pytest.raises(StrategyError, match="cannot be planned with"):
        family(codes[name], np.array([2.0, 2.0]))
