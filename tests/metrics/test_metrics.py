"""Records of a run: what they say is what happened, and no step waits for them."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import meshwright as mw
from meshwright.errors import RunError
from meshwright.examples import gpt
from meshwright.metrics.flops import model_flops
from tests.data import train as t


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def trained(tmp_path: Path, steps: int = 4, **options):
    """Losses of a few steps on one rank, and the records."""
    model, example, loss = t.classifier(8)
    batch = next(iter(t.DataLoader(t.Points(8), batch_size=8)))
    path = tmp_path / "run" / "metrics.jsonl"

    def body(step):
        with mw.Metrics(step, path, **options) as metrics:
            return [metrics(step(batch), lr=0.1).item() for _ in range(steps)]

    (losses,) = t.on_ranks(t.parts_for(model, example, loss, 1), model, example, loss, body)
    return losses, records(path)


def test_a_record_says_loss_rates_memory_and_waiting(tmp_path: Path) -> None:
    losses, found = trained(tmp_path)
    assert [r["loss"] for r in found] == losses and [r["step"] for r in found] == [1, 2, 3, 4]
    for r in found:
        assert r["samples_per_s"] == pytest.approx(8 / r["step_s"])
        # 6 × 8 and 8 × 5 for eight rows: 2 FLOPs forward, twice that backward but for the first input
        assert r["model_flops_per_s"] * r["step_s"] == pytest.approx(2 * 8 * (2 * 48 + 3 * 40))
        assert 1e7 < r["memory_bytes"] <= r["peak_memory_bytes"] and r["lr"] == 0.1
        assert "flops_utilisation" not in r and "tokens_per_s" not in r and r["waited_s"] == 0


def test_every_so_many_steps_with_a_share_of_the_peak(tmp_path: Path) -> None:
    cluster = mw.Cluster.local(1)
    losses, found = trained(tmp_path, 6, every=3, tokens=80, cluster=cluster)
    assert [r["step"] for r in found] == [3, 6] and [r["loss"] for r in found] == [losses[2], losses[5]]
    peak = cluster.device.flops.get("f64")
    for r in found:
        assert r["tokens_per_s"] == pytest.approx(80 / r["step_s"])
        if peak:
            assert r["flops_utilisation"] == pytest.approx(r["model_flops_per_s"] / peak)


def test_flops_of_a_gpt_are_six_for_each_weight_and_token() -> None:
    """As every paper counts them; attention's scores and values come on top."""
    model, batch, loss = gpt.build(gpt.GPTConfig(48, 64, 2, 4, 16), batch=4)
    parts = t.parts_for(model, batch, loss, {"dp": 2}, recompute="full")
    tokens = 4 * 16
    weights = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "positions" not in n)
    # Two layers; two products forward and five backward, of 2 FLOPs each; half of it is masked.
    attention = 2 * 7 * 2 * tokens * 16 * 64 / 2
    assert sum(model_flops(parts).values()) == pytest.approx(6 * weights * tokens + attention, rel=1e-6)


def test_a_rank_waits_for_the_slower_one(tmp_path: Path) -> None:
    """Rank 1 sleeps before each step: rank 0 waits for it, and not the other way round."""
    model, example, loss = t.classifier(8)
    batch = next(iter(t.DataLoader(t.Points(8), batch_size=8)))

    def body(step):
        with mw.Metrics(step, tmp_path / "m.jsonl", all_ranks=True) as metrics:
            for _ in range(3):
                if step.world.rank == 1:
                    time.sleep(0.05)
                metrics(step(batch))

    t.on_ranks(t.parts_for(model, example, loss, {"dp": 2}), model, example, loss, body)
    first, second = (records(tmp_path / f"m.{rank}.jsonl") for rank in (0, 1))
    waited = [sum(r["waited_s"] for r in found) for found in (first, second)]
    assert waited[0] > 0.1 > waited[1]
    assert [r["rank"] for r in second] == [1, 1, 1]


def test_no_step_waits_for_its_loss(tmp_path: Path, monkeypatch) -> None:
    """Numbers are taken out of tensors on the other thread alone."""
    threads: list[str] = []
    item = torch.Tensor.item

    def watched(self):
        threads.append(threading.current_thread().name)
        return item(self)

    model, example, loss = t.classifier(8)
    batch = next(iter(t.DataLoader(t.Points(8), batch_size=8)))

    def body(step):
        step(batch)
        monkeypatch.setattr(torch.Tensor, "item", watched)
        with mw.Metrics(step, tmp_path / "m.jsonl") as metrics:
            for _ in range(3):
                metrics(step(batch))
        monkeypatch.undo()

    t.on_ranks(t.parts_for(model, example, loss, 1), model, example, loss, body)
    assert threads == ["meshwright-metrics"] * 3


def test_a_trace_on_demand_and_by_a_signal(tmp_path: Path) -> None:
    model, example, loss = t.classifier(8)
    batch = next(iter(t.DataLoader(t.Points(8), batch_size=8)))
    step = mw.train_step(model, t.sgd, example, loss=loss, mesh=1)
    before = signal.getsignal(signal.SIGUSR1)
    with mw.Metrics(step, tmp_path / "m.jsonl", trace_signal=signal.SIGUSR1) as metrics:
        metrics(step(batch))
        asked = metrics.profile(steps=2)
        with pytest.raises(RunError, match="a trace is being taken"):
            metrics.profile()
        for _ in range(2):
            metrics(step(batch))
        os.kill(os.getpid(), signal.SIGUSR1)
        for _ in range(5):
            metrics(step(batch))
    assert signal.getsignal(signal.SIGUSR1) is before
    traces = sorted(tmp_path.glob("trace-*.json"))
    assert len(traces) == 2 and asked in traces
    for path in traces:
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
        names = {e.get("name", "") for e in events}
        assert {
            "forward of segment 0, micro-batch 0",
            "backward of segment 0, micro-batch 0",
            "update",
        } <= names
        assert "rank 0" in {e["args"]["name"] for e in events if e["name"] == "process_name"}
        assert any("addmm" in n or "linear" in n for n in names)


def test_what_cannot_be_written_is_said(tmp_path: Path, monkeypatch) -> None:
    model, example, loss = t.classifier(8)
    step = mw.train_step(model, t.sgd, example, loss=loss, mesh=1)
    batch = next(iter(t.DataLoader(t.Points(8), batch_size=8)))
    with pytest.raises(RunError, match="every=0"):
        mw.Metrics(step, every=0)
    metrics = mw.Metrics(step, tmp_path / "m.jsonl")
    for value in (torch.zeros(3), [1.0]):
        with pytest.raises(RunError, match="norms= is a"):  # at once, and of this call alone
            metrics(step(batch), norms=value)

    def full(record):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(metrics._writers[0], "write", full)
    metrics(step(batch))
    with pytest.raises(RunError, match="No space left"):
        metrics.close()


def test_tensorboard_and_the_bar(tmp_path: Path, capsys) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    losses, _ = trained(tmp_path, tensorboard=tmp_path / "tb", progress=True, total=4)
    found = events.EventAccumulator(str(tmp_path / "tb")).Reload().Scalars("loss")
    assert [(e.step, e.value) for e in found] == [(n + 1, pytest.approx(v)) for n, v in enumerate(losses)]


def test_the_bar_shows_where_the_run_is() -> None:
    import io

    from rich.console import Console

    from meshwright.metrics.writers import Bar

    screen = io.StringIO()
    bar = Bar(40, Console(file=screen, force_terminal=True, width=100))
    bar.write({"step": 10, "loss": 2.5, "tokens_per_s": 12345.6})
    bar.close()
    said = screen.getvalue()
    assert "10/40" in said and "loss 2.5" in said and "12,346 tokens/s" in said


def test_what_fills_a_batch_up_is_no_sample(tmp_path: Path) -> None:
    model, example, loss = t.classifier(8)

    def body(step):
        with mw.Metrics(step, tmp_path / "m.jsonl", every=2, tokens=24) as metrics:
            for batch in mw.shard_loader(t.Points(29), step, last="pad"):
                metrics(step(batch))

    t.on_ranks(t.parts_for(model, example, loss, 1), model, example, loss, body)
    counted = [
        (r["samples_per_s"] * r["step_s"], r["tokens_per_s"] * r["step_s"])
        for r in records(tmp_path / "m.jsonl")
    ]
    assert counted == [pytest.approx((8, 24)), pytest.approx((6.5, 19.5))]  # the last batch has five
