"""What a step in micro-batches is said to cost is what its program does: seconds, what is sent, and memory."""

from __future__ import annotations

from collections import Counter as Multiset
from typing import Any

import pytest

import meshwright as mw
from meshwright.compile import captured_of, lower
from meshwright.cost.cluster import Cluster
from meshwright.examples import gpt
from meshwright.partition import Partition
from meshwright.partition.collectives import step_collectives
from meshwright.predict.memory.step import peak
from meshwright.predict.price import program_price
from meshwright.predict.tasks import step_tasks

PINS = {"*.qkv": {"n": "tp"}, "*.up": {"n": "tp"}, "head": {"n": "tp"}}


def parts_of(count: int, mode: str = "sharding_propagation", **techniques: Any) -> Partition:
    model, batch, loss = gpt.build(gpt.GPTConfig(48, 24, 2, 4, 32), batch=32)
    plan = mw.plan(
        model,
        batch,
        loss=loss,
        mesh={"dp": 2, "tp": 2},
        mode=mode,
        pins=PINS if mode != "data_parallel" else None,
        micro_batches=count,
        **techniques,
    )
    return lower(captured_of(model, batch, loss), plan)


def test_computing_takes_no_less_and_reductions_and_the_update_are_paid_once() -> None:
    cluster = Cluster.local(4)
    once, four = (program_price(parts_of(count), cluster) for count in (1, 4))
    assert four.compute >= once.compute
    assert four.reduction == pytest.approx(once.reduction)
    assert four.update == pytest.approx(once.update)
    assert four.backward_communication > once.backward_communication  # latencies


PARTED = {"optimizer_parallel": 3, "threshold_kb": 0}  # every use of a weight is a gather


@pytest.mark.parametrize(
    ("mode", "techniques"),
    [
        pytest.param("data_parallel", {}, marks=pytest.mark.full),
        ("sharding_propagation", {}),
        pytest.param("sharding_propagation", {"interleave": 2}, marks=pytest.mark.full),
        ("data_parallel", {"interleave": 2, **PARTED}),
    ],
)
def test_the_timeline_sends_what_the_step_sends(mode: str, techniques: dict[str, Any]) -> None:
    parts = parts_of(4, mode, **techniques)
    tasks = [t for t in step_tasks(parts, Cluster.local(4)) if "collective" in t.about]
    found = Multiset(str(t.about["collective"]) for t in tasks if t.kind != "reduce")
    assert found == Multiset(c.kind for c in step_collectives(parts, 0))
    assert any(t.kind == "reduce" for t in tasks) or techniques.items() >= PARTED.items()


def test_copies_share_what_is_gathered() -> None:
    cluster = Cluster.local(4)
    two, four, together = (
        program_price(parts_of(count, "data_parallel", **techniques, **PARTED), cluster)
        for count, techniques in ((2, {}), (4, {}), (2, {"interleave": 2}))
    )
    assert together.forward_communication == pytest.approx(two.forward_communication)
    assert together.backward_communication == pytest.approx(two.backward_communication)
    assert together.compute == pytest.approx(four.compute)


def test_gradients_are_reduced_after_the_last_micro_batch_has_begun() -> None:
    tasks = step_tasks(parts_of(4), Cluster.local(4), bucket_bytes=4096)
    first = next(n for n, t in enumerate(tasks) if t.kind == "reduce")
    computed = [t.kind for t in tasks[first:] if "operator" in t.about]
    assert computed and "forward" not in computed


def test_activations_are_those_of_one_micro_batch_and_gradients_are_held() -> None:
    once, four = (peak(parts_of(count)) for count in (1, 4))
    assert four.bytes < once.bytes
    assert four.categories["saved"] < 0.35 * once.categories["saved"]
    assert four.categories["gradients"] >= once.categories["gradients"]


def test_claims_are_of_the_program_that_runs() -> None:
    model, batch, loss = gpt.build(gpt.GPTConfig(48, 24, 1, 4, 8), batch=16)
    cluster = Cluster.local(2)
    plan = mw.plan(model, batch, loss=loss, cluster=cluster, mode="auto", micro_batches=4)
    parts = lower(captured_of(model, batch, loss), plan)
    assert plan.claims["price_seconds"] == pytest.approx(program_price(parts, cluster).total)
    assert plan.techniques.micro_batches == 4
