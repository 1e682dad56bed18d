"""What is predicted of a pipeline: each rank's peak against the allocator, and refusals to look at one rank alone."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshwright.compile as stages
from bench.memory import peak_bytes
from meshwright.capture.batch import leaves
from meshwright.cost.cluster import Cluster
from meshwright.errors import PlanError
from meshwright.examples import gpt
from meshwright.partition.memory import peak
from meshwright.partition.tasks import simulate
from meshwright.pipeline.meshes import meshes_of
from meshwright.pipeline.predicted import predict
from meshwright.runtime.communicator import Counter
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep
from meshwright.techniques import techniques_from


def lowered(options: dict[str, Any], mesh: Any) -> Any:
    model, batch, loss = gpt.build(gpt.GPTConfig(256, 64, 4, 4, 64), batch=16)
    captured = stages.captured_of(model, batch, loss)
    plan = stages.plan_captured(captured, mesh, "data_parallel", None, techniques=techniques_from(options))
    return stages.values_of(model, captured), dict(leaves(batch)), stages.lower(captured, plan)


@pytest.mark.parametrize("place", (0, 1))
@pytest.mark.parametrize(
    ("options", "mesh"),
    [
        ({"pipeline": 2, "micro_batches": 4}, {"dp": 2}),
        ({"pipeline": 2, "micro_batches": 4, "recompute": "full"}, 2),
        ({"pipeline": 2, "micro_batches": 4, "schedule": "zero_bubble"}, 2),
    ],
)
def test_the_peak_of_each_rank_is_the_allocators(options: dict[str, Any], mesh: Any, place: int) -> None:
    expected, measured = peaks(options, mesh, place)
    assert expected == pytest.approx(measured, rel=0.02)


def peaks(options: dict[str, Any], mesh: Any, place: int) -> tuple[int, int]:
    """The most bytes on a rank at a place of the pipeline: predicted, and by the allocator."""
    parts = lowered(options, mesh)[2]
    world = parts.asked.ranks
    expected = predict(parts, Cluster.local(world.size)).peaks[place]

    def make() -> Callable[[], torch.Tensor]:
        values, batch, parts = lowered(options, mesh)
        comm = Counter(world, meshes_of(parts.asked).at(place, 0))
        plain = {k: v.detach() for k, v in values.items()}
        step = LocalStep(
            parts, Rank(comm, torch.device("cpu")), plain, lambda p: torch.optim.AdamW(p, lr=1e-3)
        )
        del values, plain
        stages._captured.clear()
        gc.collect()
        return lambda: step(batch)

    return expected, peak_bytes(make, warm_up=2, steps=2)


def test_who_looks_at_one_rank_alone_is_refused() -> None:
    parts = lowered({"pipeline": 2, "micro_batches": 2}, 2)[2]
    with pytest.raises(PlanError, match="the peak of a plan with 2 pipeline stages"):
        peak(parts)
    with pytest.raises(PlanError, match="the timeline of a plan"):
        simulate(parts, Cluster.local(2))


def test_a_plan_on_a_cluster_claims_what_its_stages_take() -> None:
    model, batch, loss = gpt.build(batch=8)
    cluster = Cluster.local(4)
    plan = stages.plan(model, batch, loss=loss, cluster=cluster, pipeline=2, micro_batches=4)
    told = plan.claims
    slowest = max(s["forward"] + s["backward"] for s in told["stages"])
    assert told["step_seconds"] > 4 * slowest and 0 < told["bubble"] < 1
    assert plan.ranks.size == 4 and plan.mesh.size == 2
    text = plan.explain()
    assert "stage 1 on rank 1 of the pipeline" in text and "1f1b: 2 stages, 4 micro-batches" in text
