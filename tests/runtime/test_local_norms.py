"""Norms of gradients before they are added up over ranks, against one device that sees a rank's examples alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.capture.pytree import leaves
from meshwright.compile import captured_of, lower, plan_captured, values_of
from meshwright.core.techniques import techniques_from
from meshwright.runtime.communicator import SimulatedWorld
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep

RANKS, ROWS = 2, 8


def built() -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 3)).double()
    return model, {"x": torch.randn(ROWS, 6).double()}, lambda m, b: m(b["x"]).square().sum()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"fusion": 0},
        {"optimizer_parallel": 1, "threshold_kb": 0},
        {"optimizer_parallel": 2, "threshold_kb": 0},
        {"micro_batches": 2},
        {"micro_batches": 2, "optimizer_parallel": 2, "threshold_kb": 0},
        {"micro_batches": 2, "reduce_dtype": "f32"},
    ],
    ids=str,
)
def test_they_are_those_of_a_rank_s_examples_alone(asked: dict[str, Any]) -> None:
    model, batch, loss = built()
    captured = captured_of(model, batch, loss)
    plan = plan_captured(captured, RANKS, "data_parallel", None, None, techniques_from(asked))
    parts, values = lower(captured, plan), values_of(model, captured)

    def body(comm: Any) -> dict[str, torch.Tensor]:
        mine = {k: v.detach().clone() for k, v in values.items()}
        step = LocalStep(parts, Rank(comm, torch.device("cpu")), mine, sgd)
        norms = step.local_norms(dict(leaves(batch)))
        assert step.rank.step == 0 and step.buckets.heard is None
        return norms

    count = asked.get("micro_batches", 1)
    x = batch["x"].unflatten(0, (count, RANKS, ROWS // RANKS // count))  # a micro-batch is cut over the ranks
    for rank, norms in enumerate(SimulatedWorld(plan.ranks).run(body)):
        own = x[:, rank].flatten(0, 1)
        model.zero_grad()
        loss(model, {"x": own}).backward()
        assert set(norms) == {name for name, _ in model.named_parameters()}
        for name, parameter in model.named_parameters():
            exact = 1e-5 if "reduce_dtype" in asked else 1e-12
            torch.testing.assert_close(norms[name].double(), parameter.grad.norm(), rtol=exact, atol=0)
