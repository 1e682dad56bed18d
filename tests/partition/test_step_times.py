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
from meshwright.predict.step_time import step_times
from meshwright.predict.tasks import Lister, simulate

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
    assert sum(listed) < len(line.tasks)


@pytest.mark.parametrize("options", CASES, ids=str)
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
