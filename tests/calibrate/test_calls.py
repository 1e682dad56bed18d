"""A plan's own operators, timed by themselves: which they are, that they run, and that predictions use them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from meshwright.calibrate import calls
from meshwright.calibrate.calls import calls_of, with_calls
from meshwright.calibrate.step_rows import describe_step, priced
from meshwright.compile import captured_of, lower, plan_captured
from meshwright.core.techniques import techniques_from
from meshwright.cost.cluster import Cluster
from meshwright.errors import ClusterError
from meshwright.examples import gpt
from meshwright.predict.pipeline_step import predict
from meshwright.predict.price import program_price
from meshwright.predict.step_time import step_times

CONFIG = gpt.GPTConfig(vocabulary=96, width=48, layers=2, heads=4, sequence=24)
HERE = Cluster.preset("cpu", ranks_per_node=1)


def lowered(mesh=1, mode="stand_alone", pins=None, **techniques):
    model, batch, loss = gpt.build(CONFIG, batch=8)
    captured = captured_of(model, batch, loss)
    return lower(captured, plan_captured(captured, mesh, mode, pins, None, techniques_from(techniques)))


@pytest.fixture
def known_seconds(monkeypatch):
    """Every call takes a millisecond forward and two backward."""
    monkeypatch.setattr(calls, "_measured", lambda bench, call: (1e-3, 2e-3))


def test_equal_calls_are_one_and_shards_are_others():
    whole = calls_of(lowered())
    assert "linear.default(f32[8, 24, 48]*, f32[192, 48]*, f32[192]*)" in whole
    assert not any(name.startswith(("view", "transpose", "split")) for name in whole)
    cut = calls_of(lowered({"dp": 2, "tp": 2}, "sharding_propagation", {"blocks.*.up": {"n": "tp"}}))
    assert "linear.default(f32[4, 24, 48]*, f32[96, 48]*, f32[96]*)" in cut
    assert not any("meshwright" in name for name in cut)


def test_each_call_of_a_small_model_runs():
    parts = lowered()
    seen: list[tuple[int, int]] = []
    found = with_calls(HERE, parts, torch.device("cpu"), lambda done, total, what: seen.append((done, total)))
    assert set(found.measured.calls) == set(calls_of(parts))
    assert all(0.0 < forward < 1.0 and 0.0 <= back < 1.0 for forward, back in found.measured.calls.values())
    assert seen == [(n, len(seen)) for n in range(len(seen))]
    assert (
        found.measured.calls["cross_entropy_loss.default(f32[192, 96]*, i64[192], None, 1, -100, 0.0)"][1]
        > 0.0
    )


def test_convolutions_norms_and_expanded_inputs_run():
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Sequential(
                torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()
            )
            self.token, self.table = torch.nn.Parameter(torch.zeros(1, 1, 8)), torch.nn.Embedding(5, 8)

        def forward(self, x, ids):
            rows = self.body(x).flatten(2).transpose(1, 2)
            return torch.cat([self.token.expand(len(x), -1, -1), rows, self.table(ids)], 1).square().mean()

    batch = {"x": torch.randn(2, 3, 8, 8), "ids": torch.arange(8).view(2, 4) % 5}
    captured = captured_of(Net(), batch, lambda model, batch: model(**batch))
    parts = lower(captured, plan_captured(captured, 1, "stand_alone", None))
    assert set(with_calls(HERE, parts, torch.device("cpu")).measured.calls) == set(calls_of(parts))


@pytest.mark.parametrize("techniques", [{}, {"micro_batches": 2}, {"recompute": "full"}])
def test_predictions_use_them(known_seconds, techniques):
    parts = lowered(**techniques)
    found = with_calls(HERE, parts, torch.device("cpu"))
    price, sites = program_price(parts, found), parts.factors.sites
    linear = next(name for name, site in sites.items() if site.node.op == "aten.linear.default")
    times = techniques.get("micro_batches", 1)
    node = price.by_node[linear]
    again = node.backward_seconds > 2.5e-3 * times  # of what is recomputed
    assert node.forward_seconds == pytest.approx(times * 1e-3)
    assert node.backward_seconds == pytest.approx(times * (3e-3 if again else 2e-3))
    assert step_times(parts, found).step_seconds > step_times(parts, HERE).step_seconds
    again_priced = priced(describe_step(parts, found), found).seconds()
    assert again_priced == pytest.approx(step_times(parts, found).step_seconds, rel=0.02)


def test_stages_of_a_pipeline_have_theirs(known_seconds):
    cluster = replace(HERE, levels=(replace(HERE.levels[0], size=4),))
    stages = {"blocks.0": 0, "blocks.1": 1}
    parts = lowered({"pp": 2, "dp": 2}, "data_parallel", pipeline=2, micro_batches=2, stages=stages)
    found = with_calls(cluster, parts, torch.device("cpu"))
    assert "linear.default(f32[2, 24, 48]*, f32[192, 48]*, f32[192]*)" in found.measured.calls
    assert predict(parts, found).step_seconds > 10 * predict(parts, cluster).step_seconds


def test_known_calls_are_not_measured_again(known_seconds, monkeypatch):
    parts = lowered()
    once = with_calls(HERE, parts, torch.device("cpu"))
    monkeypatch.setattr(calls, "_measured", lambda bench, call: pytest.fail("measured again"))
    assert with_calls(once, parts, torch.device("cpu")) == once


def test_what_cannot_run_alone_keeps_its_prediction(monkeypatch):
    def refused(node):
        raise RuntimeError("no kernel here")

    monkeypatch.setattr(calls, "torch_operator", lambda node: refused)
    parts = lowered()
    assert with_calls(HERE, parts, torch.device("cpu")).measured.calls == {}


def test_another_type_of_device_is_refused():
    with pytest.raises(ClusterError, match=r"H100.*cannot be measured on a device of type cpu"):
        with_calls(Cluster.preset("h100", ranks_per_node=1), lowered(), torch.device("cpu"))
