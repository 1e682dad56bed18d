"""Seconds of steps with many micro-batches, told from a few, are those of the whole timeline."""

from __future__ import annotations

from dataclasses import replace

import pytest

import meshwright as mw
from meshwright.compile import captured_of, lower
from meshwright.cost.cluster import Cluster
from meshwright.examples import gpt
from meshwright.predict import step_time as module
from meshwright.predict.issued import Issued
from meshwright.predict.step_time import FEW, Unlike, played, step_times
from meshwright.predict.tasks import Filled, Lister, simulate
from meshwright.predict.timeline import Task
from tests.breadth import quick

CLUSTER = Cluster.preset("h100", nodes=2, ranks_per_node=2)
SLOW = {"compute": 1.3, "collective": 1.6}  # what runs beside one another slows one another down
CASES = [
    {},
    {"optimizer_parallel": 2, "threshold_kb": 0},
    {"optimizer_parallel": 2, "threshold_kb": 0, "gradient_accumulation_shard": True},
    {"optimizer_parallel": 3, "threshold_kb": 0, "recompute": "full"},
    {"optimizer_parallel": 3, "threshold_kb": 0, "reshard_after_forward": False},
    {"interleave": 2, "micro_batches": 16},
    {"offload": ("activations", "optimizer")},
    {"optimizer_parallel": 3, "threshold_kb": 0, "offload": ("parameters",)},
    {"mode": "dynamic_programming"},
]


@pytest.fixture(scope="module")
def model():
    config = gpt.GPTConfig(vocabulary=512, width=256, layers=2, heads=4, sequence=64)
    return gpt.build(config, batch=128)


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("slowdown", [{}, SLOW], ids=["alone", "slowed"])
@quick(lambda options, slowdown: bool(slowdown) == bool(options) and options.get("optimizer_parallel") != 2)
def test_a_few_micro_batches_tell_of_many(model, options, slowdown, monkeypatch):
    net, batch, loss = model
    how = {"mode": "data_parallel", "cluster": CLUSTER, "micro_batches": 32, **options}
    parts = lower(captured_of(net, batch, loss), mw.plan(net, batch, loss=loss, **how))
    cluster = replace(CLUSTER, measured=replace(CLUSTER.measured, slowdown=slowdown))
    listed: list[int] = []
    played = module.play
    monkeypatch.setattr(
        module, "play", lambda tasks, *more: listed.append(len(tasks)) or played(tasks, *more)
    )
    found, line = step_times(parts, cluster), simulate(parts, cluster)
    assert found.step_seconds == pytest.approx(line.step_seconds, rel=1e-9)
    assert found.exposed_seconds == pytest.approx(line.exposed_seconds, rel=1e-9)
    assert found.hidden_seconds == pytest.approx(line.hidden_seconds, rel=1e-9, abs=1e-12)
    assert len(listed) == 1
    assert sum(listed) < 0.6 * len(line.tasks)


@pytest.mark.parametrize("options", CASES, ids=str)
# The others are in the test before.
@quick(lambda options: not options or bool({"interleave", "offload", "mode"} & set(options)))
def test_micro_batches_between_are_listed_once(model, options, monkeypatch):
    net, batch, loss = model
    how = {"mode": "data_parallel", "cluster": CLUSTER, "micro_batches": 32, **options}
    parts = lower(captured_of(net, batch, loss), mw.plan(net, batch, loss=loss, **how))
    asked: list[int] = []
    more = Issued.with_more
    monkeypatch.setattr(Issued, "with_more", lambda step, times: asked.append(times) or more(step, times))
    found = Lister(parts, CLUSTER).issued(6)
    assert asked == [3]
    monkeypatch.setattr(Issued, "with_more", lambda step, times: None)
    assert Lister(parts, CLUSTER).issued(6) == found


def step_of(programs: int, issue_seconds: float, first: float = 9.0, middle: float = 1.0) -> Filled:
    """A step of one operator in each micro-batch, the first of which takes longer, and one of all of them."""
    times = [first, middle, *[1.0] * (programs - 2)]
    tasks = [
        Task(f"{n}", ("compute",), seconds, issue_seconds=issue_seconds) for n, seconds in enumerate(times)
    ]
    return Filled((*tasks, Task("update", ("compute",), 2.0)), tuple(range(1, programs + 1)))


@pytest.mark.parametrize("issue_seconds", [0.0, 0.9])
def test_four_micro_batches_tell_of_forty(issue_seconds):
    found = played(step_of(FEW, issue_seconds), CLUSTER, 40 - FEW)
    assert found.step_seconds == pytest.approx(played(step_of(40, issue_seconds), CLUSTER).step_seconds)


def test_a_host_that_falls_behind_is_simulated_in_full():
    # The device is late by the first micro-batch, and waits for the host from the seventeenth on.
    few, many = step_of(FEW, 1.5), played(step_of(40, 1.5), CLUSTER)
    assert many.step_seconds == pytest.approx(40 * 1.5 + 1.0 + 2.0)
    with pytest.raises(Unlike):
        played(few, CLUSTER, 40 - FEW)


def test_micro_batches_that_do_not_repeat_are_simulated_in_full():
    with pytest.raises(Unlike):
        played(step_of(FEW, 0.0, middle=1.5), CLUSTER, 40 - FEW)
