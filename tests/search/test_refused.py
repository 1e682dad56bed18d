"""What a search says where nothing it looks at is allowed, or can be lowered: a PlanError that names operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import meshwright as mw
from meshwright.compile import captured_of, plan_captured
from meshwright.core.techniques import techniques_from
from meshwright.cost.cluster import Cluster
from meshwright.errors import DoesNotFit, LayoutError, PlanError, StrategyError
from meshwright.plan.plan import Plan
from meshwright.planning.search_request import request_for
from meshwright.redistribute.steps import rounded_up
from meshwright.search.evaluate import Evaluator
from meshwright.search.solve import NoStates, Problem
from meshwright.search.space.build import Space
from meshwright.search.vectorized.prices import Priced
from tests.breadth import quick
from tests.search.planned import SEARCHES, made
from tests.search.test_vectorized import of_model


@pytest.mark.parametrize("mode", SEARCHES)
def test_where_no_choice_is_allowed_the_operators_are_named(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of all pairs of variables has no price."""
    original = Space.problem

    def broken(self: Space, alpha: float | None = None, micro_batches: int = 1) -> Problem:
        found = original(self, alpha, micro_batches)
        first = next(iter(found.pairs))
        return Problem(found.unary, {**found.pairs, first: np.full_like(found.pairs[first], np.inf)})

    monkeypatch.setattr(Space, "problem", broken)
    with pytest.raises(PlanError, match="no plan is possible on this mesh") as caught:
        made("mlp", "2x2", mode)
    error = caught.value
    assert isinstance(error.__cause__, NoStates)
    assert error.why.startswith("no layout of %linear") and "goes with one of" in error.why
    assert "mlp.py" in error.where and error.hint


def test_where_nothing_explains_that_no_choice_is_allowed_it_is_a_plan_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(*_: Any, **__: Any) -> None:
        raise NoStates(0)

    monkeypatch.setattr("meshwright.search.recursion.eliminate", none)
    monkeypatch.setattr("meshwright.search.infeasible.solve", none)
    with pytest.raises(PlanError, match="no plan is possible on this mesh") as caught:
        made("mlp", "2x2", "recursive_programming")
    assert isinstance(caught.value.__cause__, NoStates) and caught.value.hint


class Rotated(torch.nn.Module):
    """Rotary embeddings as GLM has them: a half of the frequencies, each repeated, by views that look alike."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q = self.up(x).view(*x.shape[:2], 2, 4).transpose(1, 2)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        cos = cos[..., :2].repeat_interleave(2, dim=-1)
        sin = sin[..., :2].repeat_interleave(2, dim=-1)
        half = torch.stack((-q[..., 1::2], q[..., 0::2]), dim=-1).flatten(-2)
        return (q * cos + half * sin).square().mean()


@pytest.mark.parametrize("mode", SEARCHES)
@quick(lambda mode: mode == "recursive_programming")  # all plan equal layers as one
def test_views_of_other_tensors_are_no_equal_layers(mode: str) -> None:
    torch.manual_seed(0)
    model = Rotated()
    batch = {"x": torch.randn(8, 16, 8), "cos": torch.rand(1, 16, 4), "sin": torch.rand(1, 16, 4)}
    plan = mw.plan(model, batch, loss=lambda m, b: m(**b), cluster=Cluster.local(4), mode=mode)
    mw.verify(model, batch, loss=lambda m, b: m(**b), plan=plan).raise_if_different()


@pytest.mark.parametrize("model", ["mlp", "gpt"])
@pytest.mark.parametrize("mode", SEARCHES)
@quick(lambda model, mode: model == "mlp")
def test_where_a_choice_cannot_be_lowered_it_is_a_plan_error(
    model: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_way(*_: Any) -> None:
        raise LayoutError("no collective of the price table leads from A to B", why="the table has none")

    monkeypatch.setattr(Evaluator, "_lowered", no_way)
    with pytest.raises(PlanError, match="has no program") as caught:
        made(model, "2x2", mode)
    error = caught.value
    assert (
        error.why == "no collective of the price table leads from A to B (the table has none)" and error.hint
    )


@pytest.mark.parametrize("mode", SEARCHES)
def test_cuts_without_room_are_refused_with_the_operator(mode: str) -> None:
    """Each axis alone has room in a dim of 4, the two together have not: 3 times 2 blocks."""
    pins = {"*": {"n": "dp"}, "layers.*": {"n": "tp"}}
    with pytest.raises(StrategyError):
        made("recommender", "2x3", mode, pins=pins)


def test_no_turn_of_a_recursion_cuts_a_pinned_factor_into_more_blocks_than_elements() -> None:
    here = of_model("bert", "8", {"*.query": {"n": "tp"}})
    arrays = here.arrays()
    now = np.zeros((len(arrays.names), 3), dtype=np.int8)
    for turn in ([0], [1], [2], [0, 1, 2]):
        for sheet in Priced(arrays, turn, now).sheets:
            sizes = sheet.kind.leaf_sizes[0]
            for row in sheet.rows:
                blocks = np.where(sheet.kind.codes.splits[row], 2.0, 1.0).prod(axis=0)
                assert (blocks <= sizes).all(), sheet.kind.codes.node.name


def in_two_stages(
    memory_bytes: float, mode: str = "recursive_programming", states: int = 2, **more: Any
) -> Plan:
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(8))
    )
    captured = captured_of(
        model, {"x": torch.randn(8192, 64)}, lambda model, batch: model(batch["x"]).square().mean()
    )
    asked = techniques_from({"pipeline": 2, **more})
    request = request_for(Cluster.local(4), memory_bytes, states)
    return plan_captured(captured, None, mode, None, request, asked)


@pytest.mark.parametrize(
    ("mode", "limit"),
    [
        pytest.param("recursive_programming", 6e6, marks=pytest.mark.full),
        ("recursive_programming", 0.5e6),
        pytest.param("auto", 0.5e6, marks=pytest.mark.full),
    ],
)
def test_all_that_a_refusal_of_stages_names_is_planned_with_it(mode: str, limit: float) -> None:
    with pytest.raises(DoesNotFit, match="the smallest single changes that fit") as caught:
        in_two_stages(limit, mode)
    changes = caught.value.changes
    assert changes and list(changes)[-1].endswith("B per rank")
    if limit == 6e6:
        assert "micro_batches=4" in changes
    for text, change in changes.items():
        assert text in caught.value.hint
        most = float(change.get("memory", limit))
        techniques = {k: v for k, v in change.items() if k not in ("memory", "optimizer_states")}
        states = change.get("optimizer_states", 2)
        found = in_two_stages(rounded_up(most), mode, states, **techniques)
        assert found.claims["peak_bytes"] <= rounded_up(most), text


def test_a_plan_in_stages_that_does_not_fit_says_what_takes_less() -> None:
    """The search adds up both stages, of which one has more than half."""
    with pytest.raises(
        PlanError, match=r'try: +less is taken with micro_batches=4, recompute="full"; or mode='
    ):
        in_two_stages(8e6)
