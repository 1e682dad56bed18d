"""What is predicted of a pipeline: each rank's peak against the allocator, and refusals to look at one rank alone."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import meshwright.compile as stages
from bench.memory import peak_bytes
from meshwright.capture.pytree import leaves
from meshwright.core.techniques import techniques_from
from meshwright.cost.cluster import Cluster, Measured
from meshwright.cost.machine import QUEUED
from meshwright.errors import PlanError
from meshwright.examples import gpt
from meshwright.pipeline.meshes import meshes_of
from meshwright.pipeline.schedules import make
from meshwright.predict.memory.step import peak
from meshwright.predict.pipeline_claims import play_stages
from meshwright.predict.pipeline_step import peaks_of, predict
from meshwright.predict.stage_time import StageSeconds
from meshwright.predict.tasks import simulate
from meshwright.runtime.communicator import Counter
from meshwright.runtime.kernels.split_linear import SplitLinear
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep
from tests.breadth import first


def lowered(options: dict[str, Any], mesh: Any) -> Any:
    wide = options.get("micro_batches") == 8  # so that weights' gradients are more than a micro-batch keeps
    config = gpt.GPTConfig(256, 128, 4, 4, 32) if wide else gpt.GPTConfig(256, 64, 4, 4, 64)
    model, batch, loss = gpt.build(config, batch=32 if wide else 16)
    captured = stages.captured_of(model, batch, loss)
    plan = stages.plan_captured(captured, mesh, "data_parallel", None, techniques=techniques_from(options))
    return stages.values_of(model, captured), dict(leaves(batch)), stages.lower(captured, plan)


@pytest.mark.parametrize("place", first(1, (0, 1)))
@pytest.mark.parametrize(
    ("options", "mesh"),
    [
        ({"pipeline": 2, "micro_batches": 4}, {"dp": 2}),
        pytest.param({"pipeline": 2, "micro_batches": 4, "recompute": "full"}, 2, marks=pytest.mark.slow),
        ({"pipeline": 2, "micro_batches": 4, "schedule": "zero_bubble"}, 2),
        pytest.param({"micro_batches": 4}, [{"dp": 1}, {"dp": 2}], marks=pytest.mark.slow),
    ],
)
def test_the_peak_of_each_rank_is_the_allocators(options: dict[str, Any], mesh: Any, place: int) -> None:
    expected, measured = peaks(options, mesh, place)
    assert expected == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("level", first(1, (3, 2)))
def test_only_the_last_backward_of_a_stage_reduces(level: int) -> None:
    """While others run more is kept, so what the last one needs beside is not there at their peak."""
    options = {"pipeline": 2, "micro_batches": 8, "optimizer_parallel": level, "threshold_kb": 0}
    expected, measured = peaks(options, {"dp": 2}, 0)
    assert expected == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("waited", (0.0, 1.0))
def test_gradients_of_a_stage_are_sent_while_the_rank_computes_others(waited: float) -> None:
    """Of the two stages of a rank that of the later layers is done first; what it waits for computing waits, too."""
    schedule = make("interleaved", 2, 2, 2)
    alone, sends = (
        StageSeconds(1.0, 2.0, 0.0, reduce=reduce, waited=waited if reduce else 0.0, sums=reduce)
        for reduce in (0.0, 3.0)
    )
    bare, only, both = (
        play_stages(schedule, stages, [0.0] * 4, [0.0, 0.0])
        for stages in ([alone] * 4, [alone, alone, alone, sends], [sends] * 4)
    )
    done = [{a.stage: end for a, _, end in bare.times[1] if a.kind == "backward"}[stage] for stage in (3, 1)]
    assert done[0] < done[1] == bare.times[1][-1][2]
    later = max(0.0, done[0] + 3.0 - waited - done[1]) + waited
    assert only.times[1][-1][2] == pytest.approx(done[1] + later)
    free = max(done[1] + 3.0 - waited, max(done[0] + 3.0 - waited, done[1]) + 3.0)
    after = free if done[0] + 3.0 - waited > done[1] else done[1] + 3.0 - waited
    assert both.times[1][-1][2] == pytest.approx(after + 2 * waited)


def peaks(options: dict[str, Any], mesh: Any, place: int) -> tuple[int, int]:
    """The most bytes on a rank at a place of the pipeline: predicted, and by the allocator."""
    parts = lowered(options, mesh)[2]
    world = parts.requested.ranks  # of which one only counts what is sent: nothing is copied for it
    expected = peaks_of(parts, Cluster.local(world.size), staged=False)[place]

    def make() -> Callable[[], torch.Tensor]:
        values, batch, parts = lowered(options, mesh)
        comm = Counter(world, meshes_of(parts.requested).at(place, 0))
        plain = {k: v.detach() for k, v in values.items()}
        step = LocalStep(
            parts, Rank(comm, torch.device("cpu")), plain, lambda p: torch.optim.AdamW(p, lr=1e-3)
        )
        del values, plain
        stages._captured.clear()
        gc.collect()
        return lambda: step(batch)

    return expected, peak_bytes(make, warm_up=1, steps=1)


def test_a_micro_batch_pays_for_starting_each_of_its_messages() -> None:
    """As many as a rank that counts does start, forward and backward."""
    parts = lowered({"pipeline": 2, "micro_batches": 4}, {"dp": 2})[2]
    machine = Cluster.preset("cpu", ranks_per_node=4)
    free, paid = (
        predict(parts, replace(machine, measured=Measured(post_seconds=each))).stages for each in (0.0, 1e-3)
    )
    for place in (0, 1):
        values, batch, parts = lowered({"pipeline": 2, "micro_batches": 4}, {"dp": 2})
        comm = Counter(parts.requested.ranks, meshes_of(parts.requested).at(place, 0))
        LocalStep(parts, Rank(comm, torch.device("cpu")), values, None).gradients(batch)
        tied = 256 * 64 * 4  # the table's gradient, added up at the end; and there is the loss
        passed = [k for k, _, size in comm.calls if k in ("send", "receive") and size not in (4, tied)]
        more = [
            getattr(b, half) - getattr(a, half)
            for a, b in [(free[place], paid[place])]
            for half in ("forward", "backward")
        ]
        assert passed and sum(more) == pytest.approx(1e-3 * len(passed) / 4)
        assert more[0] == pytest.approx(more[1])


def test_a_message_takes_what_a_message_was_measured_to_take() -> None:
    parts = lowered({"pipeline": 2, "micro_batches": 4}, 2)[2]
    machine = Cluster.preset("cpu", ranks_per_node=2)
    name = machine.levels[0].name
    sends = Measured(collectives={name: {"send": (7e-3, 1e9), "all_reduce": (1.0, 1e3)}})
    found = predict(parts, replace(machine, measured=sends))
    assert found.messages[1] == pytest.approx(7e-3 + found.received[1] / 1e9)
    assert predict(parts, machine).messages[1] < 7e-3


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_linears_whose_weights_wait_pay_for_the_queue(schedule: str) -> None:
    """By what starting operators takes, for as many linears as leave something in the queue."""
    options = {"pipeline": 2, "micro_batches": 4, "schedule": schedule}
    values, _, parts = lowered(options, 2)
    plain, split = (
        predict(parts, Cluster.preset("cpu", ranks_per_node=2), 2),
        predict(lowered({**options, "schedule": "1f1b"}, 2)[2], Cluster.preset("cpu", ranks_per_node=2), 2),
    )
    launch = Cluster.preset("cpu", ranks_per_node=2).device.launch_seconds
    for place in (0, 1):
        step = LocalStep(
            parts, Rank(Counter(parts.requested.ranks, place), torch.device("cpu")), values, None
        )
        _, module = step.made.programs[place][0]
        linears = sum(isinstance(m, SplitLinear) for m in module.modules())
        assert bool(linears) == (schedule == "zero_bubble")
        more, (ours, theirs) = linears * launch, (plain.stages[place], split.stages[place])
        assert ours.forward - theirs.forward == pytest.approx(QUEUED[0] * more)
        assert ours.backward - theirs.backward == pytest.approx((QUEUED[1] + QUEUED[2]) * more)
        assert ours.weights - theirs.weights == pytest.approx(QUEUED[2] * more)


def test_who_looks_at_one_rank_alone_is_refused() -> None:
    parts = lowered({"pipeline": 2, "micro_batches": 2}, 2)[2]
    with pytest.raises(PlanError, match="the peak of a plan with 2 pipeline stages"):
        peak(parts)
    with pytest.raises(PlanError, match="the timeline of a plan"):
        simulate(parts, Cluster.local(2))


def test_a_plan_on_a_cluster_claims_what_its_stages_take() -> None:
    model, batch, loss = gpt.build(batch=8)
    cluster = Cluster.local(4)
    plan = stages.plan(model, batch, loss=loss, cluster=cluster, pipeline=2, micro_batches=4, schedule="1f1b")
    told = plan.claims
    slowest = max(s["forward"] + s["backward"] for s in told["stages"])
    assert told["step_seconds"] > 4 * slowest and 0 < told["bubble"] < 1
    assert plan.ranks.size == 4 and plan.mesh.size == 2
    text = plan.explain()
    assert "stage 1 on rank 1 of the pipeline" in text and "1f1b: 2 stages, 4 micro-batches" in text
