"""Whole steps: the work told beside a time is what the planner prices, and our own runtime runs the models."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright.calibrate import step_rows as steps
from meshwright.calibrate.bench import Bench
from meshwright.calibrate.models import MODELS
from meshwright.calibrate.plan import PACES, QUICK, MeasuredRow, Point
from meshwright.compile import captured_of, lower, plan_captured
from meshwright.core.mesh import Mesh
from meshwright.core.techniques import techniques_from
from meshwright.cost.cluster import Cluster
from meshwright.planning.search_request import request_for
from meshwright.predict.tasks import simulate
from meshwright.runtime.communicator import Alone
from tests.partition.models import UNEVEN


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("step gpt, cut", {}),
        ("step llama, stored in parts", {}),
        ("step convolution, data parallel", {}),
        ("step gpt, cut", {"interleave": 2}),
        ("step gpt, data parallel", {"micro_batches": 2, "interleave": 2}),
    ],
)
def test_a_described_step_is_priced_as_the_planner_simulates_it(name: str, asked: dict[str, int]) -> None:
    """On any cluster, whatever the rates were when it was described."""
    row = steps.ROWS[name]
    captured = captured_of(*MODELS[row.model][0](8))
    plan = steps.plan(captured, Mesh.of(rank=4), row)
    parts = lower(captured, replace(plan, techniques=replace(plan.techniques, **asked)))
    written = MeasuredRow(name, (Point(1.0, 1.0),), about=steps.describe_step(parts, steps.neighbours(4)))
    about = MeasuredRow.of(json.loads(json.dumps(written.data()))).about
    cluster = replace(Cluster.preset("cpu", ranks_per_node=4), measured=UNEVEN)
    on_level = [[axis, size, cluster.levels[-1].name] for axis, size, _ in about["mesh"]]
    made = steps.priced({**about, "mesh": on_level}, cluster)
    assert made.seconds() == pytest.approx(simulate(parts, cluster).step_seconds, rel=1e-9)
    shares = made.shares()
    assert math.fsum(shares.values()) == pytest.approx(made.seconds(), rel=1e-3)
    talks = {
        "step llama, stored in parts": ["meeting", "waited"],
        "step wide, stored in parts": ["hidden_rows"],
        "step gpt, cut": ["hidden"] if asked else ["meeting", "hidden"],
    }.get(name, ["hidden"])
    assert {"memory", "update", "launch", *talks} <= set(shares)
    device = replace(cluster.device, issue_seconds=2e-3)  # of a GPU: the host issues beside it
    known = replace(cluster.measured, operators={"layer_norm f32": (2.0, 3.0), "bias f32": (1.0, 9.0)})
    gpu = replace(cluster, device=device, measured=known)
    made = steps.priced({**about, "mesh": on_level}, gpu)
    assert made.seconds() == pytest.approx(simulate(parts, gpu).step_seconds, rel=1e-9)
    assert "issue" in made.shares()
    assert math.fsum(made.shares().values()) == pytest.approx(made.seconds(), rel=1e-3)


@pytest.mark.parametrize("link", [0.0, 5e10])
@pytest.mark.parametrize(
    "asked",
    [
        {"recompute": "full"},
        {"offload": "activations"},
        {"offload": ["parameters", "optimizer", "activations"]},
        {"offload": "activations", "micro_batches": 2},
    ],
    ids=str,
)
def test_a_step_with_work_of_the_host_is_priced_as_the_planner_simulates_it(
    asked: dict[str, Any], link: float
) -> None:
    """Copies, updates on the host, and what backward computes again."""
    captured = captured_of(*MODELS["step llama"][0](2))
    cluster = replace(
        Cluster.preset("h100", ranks_per_node=1),
        measured=UNEVEN,
        host_bytes_per_s=link,
        host_memory_bytes=10**12,
    )
    cluster = replace(cluster, device=replace(cluster.device, issue_seconds=2e-5))
    plan = plan_captured(captured, 1, "stand_alone", None, request_for(cluster), techniques_from(asked))
    parts = lower(captured, plan)
    about = json.loads(json.dumps(steps.describe_step(parts, cluster)))
    made = steps.priced(about, cluster)
    assert made.seconds() == pytest.approx(simulate(parts, cluster).step_seconds, rel=1e-9)
    assert math.fsum(made.shares().values()) == pytest.approx(made.seconds(), rel=1e-2)
    assert any("copy" in task or "again" in task for task in about["tasks"])


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model_of_the_fit_learns(name: str) -> None:
    """A few steps of plain gradient descent make the loss of its one batch smaller."""
    torch.manual_seed(0)
    model, batch, loss = MODELS[name][0](1)
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
    (point,), about = steps.measure(bench, steps.rows(1, "cpu")["step convolution"], PACES[QUICK])
    assert 1e-4 < point.seconds < 10
    forward = [t["work"] for t in about["tasks"] if t["phase"] == "forward"]
    flops = sum(row[2] for row in forward if row[0] == "conv")
    # 2 FLOPs · places · weights: 3 → 24 and 24 → 48 channels on 32² and 16² places, 48 → 48 on 16², of 2 images.
    assert flops == 2 * 2 * 9 * (32**2 * 3 * 24 + 16**2 * 24 * 48 + 16**2 * 48 * 48)
    (updated,) = (t["update"] for t in about["tasks"] if "update" in t)
    parameters = 9 * (3 * 24 + 24 * 48 + 48 * 48) + 2 * (24 + 48 + 48) + 48 * 10 + 10
    assert sum(elements for elements, _ in updated) == parameters
