"""Cuts of parameters by their names: the operators that read them follow."""

from __future__ import annotations

import functools

import pytest
import torch

import meshwright as mw
from meshwright.compile import captured_of, lower
from meshwright.errors import StrategyError
from meshwright.examples import gpt
from meshwright.partition.collectives import program_collectives
from meshwright.plan.plan import Plan

SMALL = gpt.GPTConfig(48, 24, 2, 4, 8)


@functools.cache
def small():
    return gpt.build(SMALL, batch=4)


def test_parameters_are_cut_by_their_names(tmp_path) -> None:
    model, batch, loss = gpt.build(SMALL, batch=4)
    pins = {"*.up.weight": {"0": "tp"}, "*.down.weight": {1: "tp"}, "tokens.weight": {"0": "tp"}}
    plan = mw.plan(model, batch, loss=loss, mesh={"dp": 2, "tp": 2}, mode="sharding_propagation", pins=pins)
    found = {name: str(layout.forward) for name, layout in plan.inputs.items()}
    assert [found[f"blocks.{n}.up.weight".replace(".", "_")] for n in (0, 1)] == ["[96/tp, 24]"] * 2
    assert found["blocks_0_down_weight"] == "[24, 96/tp]" and "48/tp" in found["tokens_weight"]
    report = mw.verify(model, batch, loss=loss, plan=plan)
    report.raise_if_different()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").pins == plan.pins


def test_one_layer_may_be_cut_otherwise() -> None:
    """Equal layers are planned as one, unless a name tells them apart."""
    model, batch, loss = gpt.build(SMALL, batch=4)
    plan = mw.plan(
        model,
        batch,
        loss=loss,
        mesh={"tp": 2},
        mode="semi_auto",
        pins={"blocks.1.up.weight": {"0": "tp"}},
    )
    found = {name: str(layout.forward) for name, layout in plan.inputs.items()}
    assert found["blocks_0_up_weight"] == "[96, 24]" and found["blocks_1_up_weight"] == "[96/tp, 24]"
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        (
            {"*.upp.weight": {"0": "tp"}},
            r"no module of the model matches '\*.upp.weight', nor does a parameter",
        ),
        ({"*.up.weight": {"2": "tp"}}, "splits '2' of a parameter"),
        ({"*.up.weight": {"n": "tp"}}, "splits 'n' of a parameter"),
        ({"*.norm1.weight": {"0": "tp"}}, "dim 0 of blocks.0.norm1.weight cannot be split"),
        ({"tokens.weight": {"0": ("tp", "tp")}}, "uses an axis twice"),
    ],
)
def test_names_and_dims_that_are_not_there_are_errors(pins, said: str) -> None:
    model, batch, loss = small()
    with pytest.raises(StrategyError, match=said):
        mw.plan(model, batch, loss=loss, mesh={"tp": 2}, mode="sharding_propagation", pins=pins)


def test_a_mean_of_each_group_needs_nobody_else() -> None:
    """What `cross_batch` is asked for, with numbers that one device gives too: groups of the batch have means of their
    own, and a rank holds whole groups."""

    class Groups(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(6, 8, bias=False)

        def forward(self, x):
            h = self.inner(x).unflatten(0, (4, -1))
            return (h - h.mean(1, keepdim=True)).square().sum()

    model, batch = Groups(), torch.randn(16, 6)

    def loss(model, batch):
        return model(batch)

    plan = mw.plan(model, batch, loss=loss, mesh=4)
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()
    parts = lower(captured_of(model, batch, loss), plan)
    sent = program_collectives(parts.local(0), parts.plan.mesh, 0)
    assert [(c.kind, c.payload_bytes) for c in sent] == [("all_reduce", 4)]  # the loss
