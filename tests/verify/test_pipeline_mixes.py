"""Stages beside all that changes how a rank keeps, brings, adds up or takes turns: the numbers are those of one device,
and each technique does in a stage what it does in a model of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.compile import captured_of, lower
from meshwright.core.graph import START
from meshwright.examples import recommender
from meshwright.predict.pipeline_step import stages_in_copies
from meshwright.runtime.activation_offload import Store
from meshwright.runtime.micro_batches import StepBatch
from meshwright.runtime.sharded_update import ScatterBucket
from meshwright.runtime.step import LocalStep
from tests.breadth import quick
from tests.verify.test_pipelines import MIXED, STAGES, built, planned, prove, steps_of

SMALL = {"threshold_kb": 0}
MIXES: dict[str, dict[str, Any]] = {
    "states on the host": {"offload": "optimizer"},
    "activations on the host": {"offload": "activations"},
    "parameters on the host": {"offload": "parameters", **SMALL},
    "all on the host": {"offload": ("optimizer", "activations", "parameters"), "recompute": "full", **SMALL},
    "slices": {"slice_activation": True},
    "slices of what enters layers, on the host": {
        "slice_activation": True,
        "recompute": "full",
        "offload": "activations",
    },
    "parts of gradients added up": {
        "optimizer_parallel": 2,
        "gradient_accumulation_shard": True,
        **SMALL,
    },
    "parts of weights and gradients": {
        "optimizer_parallel": 3,
        "gradient_accumulation_shard": True,
        **SMALL,
    },
    "copies": {"interleave": 2, "micro_batches": 2},
    "copies, recomputed": {"interleave": 2, "micro_batches": 2, "recompute": "full", "optimizer_parallel": 1},
}


ALSO_IN_A_MIX = (
    "states on the host",
    "activations on the host",
    "parameters on the host",
    "slices",
    "parts of gradients added up",
    "copies",
    "copies, recomputed",  # in test_techniques.py
)
TURNS = [  # one schedule for each mix, the other in the slow tests
    pytest.param(
        mix,
        schedule,
        marks=pytest.mark.slow
        if not (number + turn) % 2
        else pytest.mark.full
        if mix in ALSO_IN_A_MIX
        else (),
    )
    for number, mix in enumerate(MIXES)
    for turn, schedule in enumerate(("1f1b", "zero_bubble"))
]


@pytest.mark.parametrize(("mix", "schedule"), TURNS)
def test_stages_beside_a_technique_compute_what_one_device_does(mix: str, schedule: str) -> None:
    prove("gpt", MIXED, **{"pipeline": 2, "micro_batches": 4, "schedule": schedule, **MIXES[mix]})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "bert", "t5", "resnet"])
@pytest.mark.parametrize("schedule", STAGES)
@pytest.mark.parametrize("mix", MIXES)
def test_all_schedules_of_other_models_do(mix: str, schedule: str, name: str) -> None:
    prove(
        name, MIXED, **{"pipeline": STAGES[schedule], "micro_batches": 2, "schedule": schedule, **MIXES[mix]}
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("offload", [(), ("optimizer",)])
@quick(lambda schedule, offload: bool(offload) == (schedule == "1f1b"))
def test_tables_on_the_host_beside_stages(schedule: str, offload: tuple[str, ...]) -> None:
    model, batch, loss = recommender.build(batch=8)
    for table in model.deep_tables:
        mw.on_host(table)
    options = {"mesh": {"dp": 2}, "pipeline": 2, "micro_batches": 4, "schedule": schedule}
    plan = mw.plan(model, batch, loss=loss, offload=offload, **options)
    assert plan.hosts and plan.stages
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


def test_what_is_kept_elsewhere_of_a_micro_batch_comes_back_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1F1B's first stage two micro-batches wait for their backward at once: neither finds what is the other's."""
    held: list[int] = []
    bring = Store.bring

    def counted(self: Store, run: Any) -> None:
        held.append(len({id(item()) for item in run.items if item() is not None}))
        bring(self, run)

    monkeypatch.setattr(Store, "bring", counted)
    plan = planned("gpt", 2, pipeline=2, micro_batches=4, offload="activations")

    def look(step: LocalStep, batch: Any) -> tuple[int, ...]:
        step(batch)
        return tuple(step.made.stores)

    assert steps_of("gpt", plan, look) == [(0,), ()]  # the last layer's stay: backward begins with them
    assert max(held) > 0


def test_parts_of_gradients_are_reduced_in_every_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    start = ScatterBucket.start

    def counted(self: ScatterBucket, comm: Any) -> None:
        started.append(1)
        start(self, comm)

    monkeypatch.setattr(ScatterBucket, "start", counted)
    counts = []
    for each_time in (False, True):
        started.clear()
        asked = {"optimizer_parallel": 2, "gradient_accumulation_shard": each_time, **SMALL}
        plan = planned("gpt", {"dp": 2}, pipeline=2, micro_batches=4, **asked)
        steps_of("gpt", plan, lambda step, batch: step.gradients(batch))
        counts.append(len(started))
    assert counts[0] and counts[1] == 4 * counts[0]


def test_copies_take_turns_in_every_stage() -> None:
    model, batch, loss = built("llama")
    pins = {"*.attention.q": {"n": "tp"}, "*.up": {"n": "tp"}}
    asked = {"mesh": {"tp": 2}, "mode": "sharding_propagation", "pins": pins}
    plan = mw.plan(model, batch, loss=loss, pipeline=2, micro_batches=2, interleave=2, **asked)
    parts = lower(captured_of(model, batch, loss), plan)
    for stage in stages_in_copies(parts, 0)[0]:
        copies = [node.name[:5] for node in stage.segment.graph.nodes if node.op == START]
        assert {"copy0", "copy1"} <= set(copies)
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


@pytest.mark.parametrize("stages", [{}, {"pipeline": 2}])
def test_a_plan_of_copies_with_recompute_explains_what_they_keep(stages: dict[str, int]) -> None:
    plan = planned("gpt", {"dp": 2}, interleave=2, recompute="full", **stages)
    assert "recomputed in backward" in plan.explain()


def test_a_copy_that_reads_the_other_ones_examples_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, loss = built("gpt")
    plan = planned("gpt", 2, pipeline=2, micro_batches=2, interleave=2)
    given = StepBatch.given

    def first_alone(self: Any, program: int) -> dict[str, torch.Tensor]:
        found = given(self, program)
        return {k: found[k.replace("copy1_", "copy0_")] for k in found}

    monkeypatch.setattr(StepBatch, "given", first_alone)
    assert not mw.verify(model, batch, loss=loss, plan=plan).ok


@pytest.mark.parametrize("schedule", ("zero_bubble", "zero_bubble_v"))
@pytest.mark.parametrize("more", ({}, {"gradient_accumulation_shard": True}), ids=("", "shard"))
@quick(lambda schedule, more: bool(more) == (schedule == "zero_bubble"))
def test_weights_that_are_gathered_together_get_their_gradients_at_once(
    schedule: str, more: dict[str, Any]
) -> None:
    """The first linear's input has no gradient, so its weight's comes with the first half of backward; the second's
    could wait. Both came in one gather, and go back in one scatter."""

    class Chain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = (torch.nn.Linear(16, 16) for _ in range(3))
            self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))

        def forward(self, x_bf: torch.Tensor) -> torch.Tensor:
            y_bf = torch.tanh(self.second(torch.tanh(self.first(x_bf))))
            for layer in self.layers:
                y_bf = y_bf + torch.tanh(layer(y_bf))
            return self.last(y_bf)

    torch.manual_seed(0)
    batch = torch.randn(8, 16), torch.randn(8, 16)
    techniques = {
        "optimizer_parallel": 3,
        "threshold_kb": 0,
        "micro_batches": 4,
        "schedule": schedule,
        **more,
    }
    stages = 4 if schedule == "zero_bubble_v" else 2
    found = mw.verify(
        Chain(),
        batch,
        loss=lambda m, b: (m(b[0]) - b[1]).square().mean(),
        mesh={"dp": 2},
        pipeline=stages,
        **techniques,
    )
    assert found.ok, found
