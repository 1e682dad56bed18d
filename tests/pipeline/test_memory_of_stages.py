"""Stages are cut so that the ranks have memory for them, and what adds up their bytes is near what is predicted."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

import meshwright as mw
from meshwright.compile import captured_of, lower
from meshwright.cost.cluster import Cluster
from meshwright.errors import PlanError
from meshwright.examples import gpt
from meshwright.pipeline.of_plan import schedule_of
from meshwright.pipeline.split import split
from meshwright.predict.pipeline_step import predict
from meshwright.predict.split_costs import costs_of, stage_room
from tests.breadth import quick


def cluster(ranks: int) -> Cluster:
    """Ranks of one machine whose speeds are no measured ones, so that the cuts are the same on all machines."""
    found = Cluster.local(ranks)
    return replace(found, device=replace(found.device, flops={"f32": 1e11}, memory_bytes_per_s=1e10))


CLUSTER = cluster(2)


def built() -> Any:
    return gpt.build(gpt.GPTConfig(256, 64, 6, 4, 64), batch=16)


def planned(**how: Any) -> mw.Plan:
    model, batch, loss = built()
    asked = {"pipeline": 2, "micro_batches": 4, "mode": "data_parallel", "cluster": CLUSTER, **how}
    return mw.plan(model, batch, loss=loss, **asked)


@functools.cache
def free() -> mw.Plan:
    return planned()


def test_the_first_stage_of_1f1b_gives_operators_away_when_memory_is_short() -> None:
    limit = 0.9 * free().claims["peak_bytes"]
    tight = planned(memory=limit)
    assert free().claims["peak_where"] == "rank 0 of the pipeline"
    assert tight.claims["peak_bytes"] <= limit and not any("does not fit" in note for note in tight.notes)
    firsts = [sum(stage == 0 for stage in plan.stages.values()) for plan in (free(), tight)]
    assert firsts[1] < firsts[0]
    assert tight.claims["step_seconds"] > free().claims["step_seconds"]


def test_where_nothing_fits_the_plan_is_refused() -> None:
    with pytest.raises(PlanError, match="the plan does not fit into"):
        planned(memory=0.5 * free().claims["peak_bytes"])
    with pytest.raises(PlanError, match="after"):
        planned(memory=1e6, stages={"blocks.0": 1, "blocks.1": 0})


@pytest.mark.parametrize("how", [{}, {"recompute": "full"}, {"optimizer_parallel": 1}])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@quick(lambda schedule, how: schedule == "1f1b" and not how)
def test_bytes_of_a_split_are_near_what_its_programs_need(schedule: str, how: dict[str, Any]) -> None:
    model, batch, loss = built()
    captured = captured_of(model, batch, loss)
    mesh, four = {"dp": 2}, cluster(4)
    plan = planned(**how, cluster=four, schedule=schedule, mesh=mesh)
    in_one = mw.plan(model, batch, loss=loss, mesh=mesh, micro_batches=4, **how)
    costs = costs_of(lower(captured, in_one), CLUSTER)
    parts = lower(captured, plan)
    room, in_flight = stage_room(parts, schedule_of(plan), 1e9)
    found = split(captured.graph, 2, costs, pins=plan.stages, in_flight=in_flight)
    for added, peak in zip(found.memory, predict(parts, four).peaks, strict=True):
        # What lives for a moment only, and gradients on their way, are not in the sums.
        assert 0.75 * peak < added + (1e9 - room) < 1.02 * peak
