"""Layers that are equal are listed twice in a plan file, and read back as all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import meshwright as mw
from meshwright.compile import captured_of
from meshwright.core.layout import TensorLayout
from meshwright.examples import mlp
from meshwright.plan.plan import Plan
from tests.test_plan import with_hubs


class StochasticDepth(torch.nn.Module):
    """A perceptron whose later layers are left out more often, as those of vision transformers are."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(24, 24) for _ in range(depth))

    def forward(self, x_bd: torch.Tensor) -> torch.Tensor:
        """[batch, width] → [batch, width]."""
        for number, layer in enumerate(self.layers, 1):
            kept = 1 - number / (2 * len(self.layers))
            drawn_b1 = (kept + torch.rand(len(x_bd), 1)).floor()
            x_bd = x_bd + F.dropout(F.relu(layer(x_bd)), 1 - kept) / kept * drawn_b1
        return x_bd


def deep(depth: int = 5) -> Any:
    return mlp.build(depth=depth)


def test_equal_layers_are_said_twice_and_read_back_as_all() -> None:
    built_deep = deep()
    model, batch, loss = built_deep
    captured = captured_of(model, batch, loss)
    pins = {"up.*": {"n": "tp"}}
    full = with_hubs(
        mw.plan(model, batch, loss=loss, mesh={"dp": 2, "tp": 2}, mode="sharding_propagation", pins=pins)
    )
    full = replace(full, again=frozenset(full.hubs))
    folds = [(b.start, b.length, b.repeats) for b in captured.folding.blocks]
    assert [r for _, _, r in folds] == [5]
    plan = full.folded(captured.graph, folds)
    text = plan.to_json()
    data = json.loads(text)
    assert "up_1_weight" in data["hubs"] and "up_2_weight" not in {
        *data["hubs"],
        *data["inputs"],
        *data["again"],
    }
    assert len(full.strategies) - len(data["nodes"]) == 3 * folds[0][1]
    loaded = Plan.from_json(text)
    assert "equal layers" in loaded.explain()
    assert loaded.check(captured.graph) == plan and replace(plan, folds=()) == replace(full, folds=())
    assert loaded.check(captured.graph).to_json() == text
    mw.verify(model, batch, loss=loss, plan=loaded).raise_if_different()
    # Deeper models make longer files only by their folds.
    assert Plan.from_json(text).strategies.keys() < full.strategies.keys()


def test_a_layer_that_differs_is_said_in_full() -> None:
    model, batch, loss = deep()
    captured = captured_of(model, batch, loss)
    folds = [(b.start, b.length, b.repeats) for b in captured.folding.blocks]
    full = with_hubs(mw.plan(model, batch, loss=loss, mesh={"dp": 2, "tp": 2}, mode="sharding_propagation"))
    for odd in (
        replace(full, again=frozenset({"up_3_weight"})),
        replace(full, again=frozenset({"up_1_weight"})),
        replace(full, hubs={k: v for k, v in full.hubs.items() if k != "up_4_weight"}, again=frozenset()),
        replace(full, inputs={**full.inputs, "up_4_weight": TensorLayout.replicated((96, 24))}),
        full.pin("up.3", n="tp"),
    ):
        read = Plan.from_json(odd.folded(captured.graph, folds).to_json()).check(captured.graph)
        assert replace(read, folds=()) == replace(odd, folds=())


@pytest.mark.parametrize("mesh", [{"dp": 4}, {"dp": 2, "tp": 2}])
def test_layers_of_which_a_float_differs_are_planned_once(mesh: dict[str, int], tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 24), "y": torch.randn(8, 24)}
    model, loss = StochasticDepth(6), lambda m, b: F.mse_loss(m(b["x"]), b["y"])
    captured = captured_of(model, batch, loss)
    (block,) = captured.folding.blocks
    assert block.repeats == 6 and captured.folding.unique_nodes < len(captured.graph.nodes) / 3
    plan = mw.plan(
        model,
        batch,
        loss=loss,
        mesh=mesh,
        mode="sharding_propagation",
        pins={"layers.*": {"n": "tp"}} if "tp" in mesh else None,
    )
    assert plan.folds == ((block.start, block.length, 6),)
    plan.save(tmp_path / "plan.json")
    loaded = mw.Plan.load(tmp_path / "plan.json").check(captured.graph)
    assert loaded == plan
    mw.verify(model, batch, loss=loss, plan=loaded).raise_if_different()
