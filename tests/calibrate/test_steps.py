"""Whole steps: the work told beside a time is what the planner prices, and our own runtime runs the models."""

from __future__ import annotations

import json
import math

import pytest
import torch

from meshwright.calibrate import fit, steps
from meshwright.calibrate.bench import Bench
from meshwright.calibrate.models import MODELS
from meshwright.calibrate.plan import PACES, QUICK, Found, Point
from meshwright.compile import captured_of, lower, plan_captured
from meshwright.cost.cluster import Cluster
from meshwright.mesh import Mesh
from meshwright.partition.price import program_price
from meshwright.runtime.communicator import Alone


def test_the_work_of_a_step_is_priced_as_the_planner_prices_it() -> None:
    model, batch, loss = MODELS["step llama"][0]()
    captured = captured_of(model, batch, loss)
    parts = lower(captured, plan_captured(captured, Mesh.of(ranks=1), "stand_alone", None))
    cluster = Cluster.preset("cpu", ranks_per_node=1)
    told = json.loads(json.dumps(Found("step llama", (Point(1.0, 1.0),), about=steps.works(parts)).data()))
    seconds = fit.predicted(Found.of(told).about, cluster.device, cluster.measured)
    price = program_price(parts, cluster)
    assert seconds["update"] == pytest.approx(price.update, rel=1e-9)
    assert math.fsum(seconds.values()) == pytest.approx(price.compute + price.update, rel=1e-9)
    assert {"matmul", "attention", "memory", "update"} <= set(seconds)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model_of_the_fit_learns(name: str) -> None:
    """A few steps of plain gradient descent make the loss of its one batch smaller."""
    torch.manual_seed(0)
    model, batch, loss = MODELS[name][0]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    values = []
    for _ in range(4):
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        values.append(value.item())
    assert values[-1] < values[0]


def test_a_step_is_timed_with_the_work_it_does() -> None:
    bench = Bench(Alone(Mesh.of(rank=1)), torch.device("cpu"), cores=1)
    (point,), about = steps.measure(bench, "step convolution", PACES[QUICK])
    assert 1e-4 < point.seconds < 10
    flops = sum(forward for kind, _, forward, *_ in about["works"] if kind == "conv")
    # 2 FLOPs · places · weights: 3 → 24 and 24 → 48 channels on 32² and 16² places, 48 → 48 on 16², of 4 images.
    assert flops == 2 * 4 * 9 * (32**2 * 3 * 24 + 16**2 * 24 * 48 + 16**2 * 48 * 48)
    assert sum(about["trained"]) == 9 * (3 * 24 + 24 * 48 + 48 * 48) + 2 * (24 + 48 + 48) + 48 * 10 + 10
