"""Parameters that live in the host's memory between their uses: the numbers of one device, where values and gradients
are, and both memories."""

from __future__ import annotations

import itertools
from collections import Counter as Multiset
from typing import Any

import pytest
import torch

import meshwright as mw
from bench.memory import peak_bytes
from meshwright.capture.pytree import leaves
from meshwright.compile import captured_of, lower, values_of
from meshwright.core.graph import TO_DEVICE
from meshwright.errors import PlanError
from meshwright.examples import gpt
from meshwright.partition.collectives import step_collectives
from meshwright.predict.memory.step import peak
from meshwright.predict.price import program_price
from meshwright.predict.tasks import simulate
from meshwright.runtime.host_link import HostLink
from meshwright.runtime.parameter_offload import Fetches
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep
from tests.breadth import first
from tests.partition.test_overlap import Log
from tests.partition.test_tasks import check_order
from tests.verify.test_stashes import BOTH, built, counted, planned, trained_on_gpu

PARKED: dict[str, Any] = {"offload": ("parameters",), "threshold_kb": 0}
WITH_STATES: dict[str, Any] = {"offload": ("parameters", "optimizer"), "threshold_kb": 0}
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "gpt": ("gpt", {"dp": 2}, PARKED),
    "gpt, states too": ("gpt", BOTH, WITH_STATES),
    "llama, level 3, states too": ("llama", {"dp": 3}, {**WITH_STATES, "optimizer_parallel": 3}),
    "llama, level 3, micro-batches, layers again": (
        "llama", BOTH, {**PARKED, "optimizer_parallel": 3, "micro_batches": 2, "recompute": "full"},
    ),
    "gpt, copies": ("gpt", BOTH, {**PARKED, "interleave": 2}),
    "resnet": ("resnet", BOTH, PARKED),
    "recommender, everything": (
        "recommender", BOTH,
        {"offload": ("parameters", "optimizer", "activations"), "threshold_kb": 0, "slice_activation": True},
    ),
}  # fmt: skip


IN_OTHERS = (
    "gpt, copies",
    "gpt, states too",
    "llama, level 3, states too",
    "resnet",
)  # what these have is also in another case


@pytest.mark.parametrize(
    "case", first(len(CASES) - len(IN_OTHERS), sorted(CASES, key=IN_OTHERS.__contains__))
)
def test_parked_parameters_train_as_on_one_device(case: str) -> None:
    name, mesh, asked = CASES[case]
    model, batch, loss = built(name)
    plan, parts = planned(name, mesh, **asked)
    assert len(parts.resharded.host_parameters) > 3 and parts.fetched
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


def test_a_parameter_brought_wrong_for_backward_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, loss = built("gpt")
    plan, _ = planned("gpt", {"dp": 2}, **PARKED)
    again = Fetches._again
    monkeypatch.setattr(Fetches, "_again", lambda self, name, one: 1.01 * again(self, name, one))
    assert not mw.verify(model, batch, loss=loss, plan=plan).ok


class Scaled(torch.nn.Module):
    """A parameter without dims between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 6), torch.nn.Linear(6, 4)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh() * self.scale)


@pytest.mark.parametrize("more", ({}, {"optimizer_parallel": 3}), ids=("whole", "in parts"))
def test_a_parameter_without_dims_lives_there_too(more: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, batch = Scaled(), {"x": torch.randn(8, 6)}

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return model(batch["x"]).square().mean()

    plan = mw.plan(model, batch, loss=loss, mesh={"dp": 2}, mode="data_parallel", **WITH_STATES, **more)
    assert "scale" in str(lower(captured_of(model, batch, loss), plan).resharded.host_parameters)
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


def test_values_are_at_home_between_steps() -> None:
    for asked in (PARKED, WITH_STATES):
        _, parts = planned("gpt", {"dp": 2}, **asked)
        step, batch = counted("gpt", parts)
        before = {n: p.detach().clone() for n, p in step.parameters.items()}
        step(batch)
        for name, parameter in step.parameters.items():
            assert parameter.is_contiguous() and not torch.equal(parameter, before[name])
        homes = {leaf.data_ptr() for leaf in step.host_parameters.homes.values()}
        assert {step.leaves[n].data_ptr() for n in parts.resharded.host_parameters} == homes


@pytest.mark.parametrize("case", ["gpt", "llama, level 3, states too"])
def test_a_step_makes_exactly_the_predicted_collectives(case: str) -> None:
    name, mesh, asked = CASES[case]
    _, parts = planned(name, mesh, **asked)
    step, batch = counted(name, parts, 1)
    step.gradients(batch)
    expected = [(c.kind, c.axes, c.payload_bytes) for c in step_collectives(parts, 1)]
    expected += [("all_reduce", axes, size) for axes, _, size in step.bucket_summary()]
    assert Multiset((k, frozenset(a), n) for k, a, n in step.rank.comm.calls) == Multiset(
        (k, frozenset(a), n) for k, a, n in expected
    )


PEAKS: dict[str, dict[str, Any]] = {
    "layers again": {**PARKED, "recompute": "full"},
    "states too": WITH_STATES,
    "level 3, states too, micro-batches": {**WITH_STATES, "optimizer_parallel": 3, "micro_batches": 2},
}


@pytest.mark.parametrize("case", first(1, PEAKS))
def test_the_predicted_peak_of_the_device_is_the_measured_one(case: str) -> None:
    """Where the processor is the device, what the host has lies in the one memory there is: it is always there, and
    taken off."""
    _, parts = planned("deep", {"dp": 2}, **PEAKS[case])

    def make() -> Any:
        step, batch = counted("deep", parts)
        return lambda: step(batch)

    predicted = peak(parts, staged=False, apart=True)
    gone = predicted.categories["batch"]
    measured = peak_bytes(make, warm_up=1, steps=1)
    weights = sum(p.nbytes for p in counted("deep", parts)[0].parameters.values())
    measured -= (3 if "optimizer" in PEAKS[case]["offload"] else 1) * weights
    assert predicted.bytes - gone == pytest.approx(measured, rel=0.02)


def test_weights_leave_the_device() -> None:
    plain, host_parameters = (
        peak(planned("deep", {"dp": 2}, **a)[1], device="cuda") for a in ({}, WITH_STATES)
    )
    weights = plain.categories["parameters"]
    assert host_parameters.categories["parameters"] == 0
    assert host_parameters.bytes <= plain.bytes - 3 * weights  # two moments and the weights
    assert host_parameters.host_bytes >= 3 * weights


def test_price_and_timeline_have_every_copy() -> None:
    model, batch, loss = built("deep")
    cluster = mw.Cluster.preset("a100-40", nodes=1, ranks_per_node=2)
    plan = mw.plan(model, batch, loss=loss, cluster=cluster, mode="data_parallel", **PARKED)
    parts = lower(captured_of(model, batch, loss), plan)
    brought = [n.name for n in parts.local(0).nodes if n.op == TO_DEVICE]
    tasks = [t for t in simulate(parts, cluster).tasks if "host link" in t.streams]
    assert Multiset((t.name, t.kind) for t in tasks) == Multiset(
        [(n, "forward") for n in brought] + [(n, "backward") for n in parts.fetched]
    )
    price = program_price(parts, cluster)
    assert sum(t.seconds for t in tasks) == pytest.approx(
        sum(f + b for n, (f, b) in price.by_reshard.items() if n in brought)
    )


def test_parts_of_parked_weights_come_before_their_gathers_which_start_a_layer_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch, loss = built("gpt")
    _, parts = planned("gpt", {"dp": 2}, **PARKED, optimizer_parallel=3)
    log = Log(parts.ranks, 0)
    back = HostLink.back

    def copied(link: HostLink, x: torch.Tensor) -> Any:
        log.events.append("copy")
        return back(link, x)

    monkeypatch.setattr(HostLink, "back", copied)
    values = values_of(model, captured_of(model, batch, loss))
    step = LocalStep(parts, Rank(log, torch.device("cpu")), values, None)
    step.gradients(dict(leaves(batch)))
    found = [(e.removeprefix("start "), len(list(same))) for e, same in itertools.groupby(log.events)]
    order = [f"{count} copies" if e == "copy" else e for e, count in found if "sum" not in e]
    # Embeddings, three layers of twelve, the last norm: each is copied before the gather ahead of its own starts.
    assert order[:8] == [
        "14 copies",
        "gather 0",
        "wait gather 0",
        "12 copies",
        "gather 1",
        "wait gather 1",
        "12 copies",
        "gather 2",
    ]
    assert order[8:14] == [
        "wait gather 2",
        "2 copies",
        "gather 3",
        "wait gather 3",
        "gather 4",
        "wait gather 4",
    ]
    # Backward: the table that the head reads, the norm's with the last layer's, then each layer's two ahead.
    assert order[14:20] == ["1 copies", "gather 5", "wait gather 5", "10 copies", "gather 6", "wait gather 6"]
    assert order[20:] == [
        "8 copies",
        "gather 7",
        "wait gather 7",
        "8 copies",
        "gather 8",
        "wait gather 8",
        "gather 9",
        "wait gather 9",
    ]


def test_the_timeline_has_collectives_of_parked_weights_in_the_order_of_a_step() -> None:
    model, batch, loss = built("gpt")
    _, parts = planned("gpt", {"dp": 2}, **PARKED, optimizer_parallel=3)
    check_order(parts, values_of(model, captured_of(model, batch, loss)), dict(leaves(batch)), 4 << 10)


def test_the_plan_says_it() -> None:
    plan, _ = planned("deep", {"dp": 2}, offload="parameters", threshold_kb=4)
    assert any("stay" in note and "below 4 KiB" in note for note in plan.notes)
    assert "in host memory" in plan.explain()
    _, parts = planned("deep", {"dp": 2}, **PARKED)
    text = str(mw.TrainStep(counted("deep", parts)[0], parts).program)
    assert "again in backward to_device" in text


def test_a_pattern_parks_what_it_names() -> None:
    plan, parts = planned("deep", {"dp": 2}, offload="parameters:blocks.1", threshold_kb=0)
    targets = {i.name: i.target for i in parts.resharded.graph.inputs}
    away = {targets[name] for name in parts.resharded.host_parameters}
    assert away and all(target.startswith("blocks.1.") for target in away)
    assert not any("stay" in note for note in plan.notes)
    with pytest.raises(PlanError, match="matches 'blokcs") as caught:
        planned("deep", {"dp": 2}, offload="parameters:blokcs.1")
    assert "blocks.1" in caught.value.hint


@pytest.mark.parametrize("level", (1, 2))
def test_weights_that_are_whole_after_an_update_cannot_be_parked(level: int) -> None:
    with pytest.raises(PlanError, match="together with offload") as caught:
        planned("deep", {"dp": 2}, **PARKED, optimizer_parallel=level)
    assert "optimizer_parallel=3" in str(caught.value)


@pytest.mark.gpu
def test_a_model_trains_within_less_than_its_weights() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    config = gpt.GPTConfig(256, 512, 12, 8, 128)
    host_parameters = {"offload": ("parameters", "optimizer", "activations")}
    losses, peaks = zip(*(trained_on_gpu(config, 4, asked) for asked in ({}, host_parameters)), strict=True)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert peaks[1] < 0.5 * peaks[0]
