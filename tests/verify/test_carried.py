"""Plans carried over to other programs that train: other shapes, another loss, other trainable parameters. Weights stay
where they are, and the programs are equal to one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.compile import captured_of
from meshwright.examples import gpt
from meshwright.search.reuse import StoredLayout, carried_to_train
from tests.breadth import first, quick

PINS = {"blocks.*.qkv": {"n": "tp"}, "blocks.*.up": {"n": "tp"}, "head": {"n": "tp"}}
MIXED = {"mesh": {"dp": 2, "tp": 2}, "mode": "sharding_propagation", "pins": PINS}
PLANS: dict[str, dict[str, Any]] = {
    "zero1 × tp": {**MIXED, "optimizer_parallel": 1, "threshold_kb": 0},
    "tp": MIXED,
    "zero1": {"mesh": {"dp": 2}, "optimizer_parallel": 1, "threshold_kb": 0},
    "zero3 × tp": {**MIXED, "optimizer_parallel": 3, "threshold_kb": 0},
    "recompute, pipeline": {"mesh": {"dp": 2}, "pipeline": 2, "micro_batches": 2, "recompute": "full"},
    "auto": {"mode": "auto"},
}


LOSS = gpt.build()[2]


def regularized(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    squares = [p.square().sum() for p in model.parameters() if p.ndim == 2]
    return 2 * LOSS(model, batch) + 1e-3 * torch.stack(squares).sum()


@pytest.mark.parametrize("name", first(1, PLANS))
@pytest.mark.parametrize("what", ["shorter", "fewer", "loss", "frozen"])
@quick(lambda what, **_: what != "shorter")  # what is fewer is shorter, too
def test_a_plan_carried_over_is_equal_to_one_device(name: str, what: str) -> None:
    model, batch, loss = gpt.build()
    cluster = {"cluster": mw.Cluster.local(4)} if name == "auto" else {}
    plan = mw.plan(model, batch, loss=loss, **PLANS[name], **cluster)
    graph = captured_of(model, batch, loss).graph
    held = {
        e.name: StoredLayout(plan.inputs[e.name].forward, plan.states.get(e.name), e.needs_grad)
        for e in graph.input_of("parameter")
    }
    if what == "shorter":
        batch = {k: v[:, :7].contiguous() for k, v in batch.items()}
    elif what == "fewer":
        rows = 4 if "pipeline" in name else 3
        batch = {k: v[:rows, :5].contiguous() for k, v in batch.items()}
    elif what == "loss":
        loss = regularized
    else:
        model.requires_grad_(False)
        model.head.requires_grad_(True)
    captured = captured_of(model, batch, loss)
    made = carried_to_train(plan, captured.graph, [held])
    for entry, one in held.items():
        assert made.inputs[entry].dims == one.stored.dims
        assert made.states.get(entry) == one.updated
    mw.verify(model, batch, loss=loss, plan=made).raise_if_different()
