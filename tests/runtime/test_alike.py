"""Ranks that step on other batches than the others, or with another optimizer, are told so, all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.errors import BatchError, RunError
from meshwright.runtime.agreement import checksum, is_due, options_that_differ, shared_options
from meshwright.runtime.trained import options_of
from tests.data import train as t

SHARDINGS = (
    {"mesh": {"dp": 4}},
    {"mesh": {"dp": 2, "tp": 2}, "mode": "sharding_propagation", "pins": {"0": {"n": "tp"}}},
    {"mesh": {"dp": 2}, "pipeline": 2, "micro_batches": 2},
)


def told(body: Callable[[Any], Any], error: type[Exception], **how: Any) -> list[str]:
    """The error that every rank raises, and that its weights were left as they were."""
    model, example, loss = t.classifier(8)
    parts = t.parts_for(model, example, loss, **how)

    def on_rank(step: Any) -> str:
        with pytest.raises(error) as caught:
            body(step)
        return str(caught.value)

    return t.on_ranks(parts, model, example, loss, on_rank)


@pytest.mark.parametrize("how", SHARDINGS, ids=str)
def test_a_rank_with_a_batch_of_its_own(how: dict[str, Any]) -> None:
    _, example, _ = t.classifier(8)

    def body(step: Any) -> None:
        before = {name: x.clone() for name, x in step.parameters.items()}
        own = example["x"] + (step.world.rank == 2)
        try:
            step({"x": own, "y": example["y"]})
        finally:
            assert all(torch.equal(x, before[name]) for name, x in step.parameters.items())

    found = told(body, BatchError, **how)
    assert len(set(found)) == 1 and len(found) == 4
    assert found[0].startswith("'x' of the batch of step 1 differs between ranks\n  why:   checksum ")
    assert "on ranks 0, 1, 3; checksum" in found[0] and "on rank 2\n" in found[0]
    assert "with mw.shard_loader each rank reads only its part" in found[0]


@pytest.mark.parametrize("how", SHARDINGS, ids=str)
def test_a_rank_that_skips_a_batch(how: dict[str, Any]) -> None:
    def body(step: Any) -> None:
        for number, batch in enumerate(mw.shard_loader(t.Points(48), step)):
            if number != 2 or step.world.rank != 1:
                step(batch)

    for said in told(body, BatchError, **how):  # the third step of rank 1 is compared in the fourth
        assert said.startswith("ranks are at different batches in step 4\n")
        assert "samples 24 to 31 of epoch 0 on ranks 0, 2, 3; samples 32 to 39 of epoch 0 on rank 1" in said


def test_streams_that_differ() -> None:
    _, example, _ = t.classifier(8)

    def body(step: Any) -> None:
        own = example["x"] + step.world.rank
        for batch in mw.shard_loader([{"x": own, "y": example["y"]}], step):
            step(batch)

    (said, *_) = told(body, BatchError, mesh=2)
    assert "different batches in step 1" in said and "batch 0 of epoch 0 (x checksum" in said


def test_a_stream_is_looked_into_when_ranks_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    model, example, loss = t.classifier(8)
    asked: list[int] = []

    def counted(x: torch.Tensor) -> str:
        asked.append(x.numel())
        return checksum(x)

    monkeypatch.setattr("meshwright.data.sharded_loader.checksum", counted)

    def body(step: Any) -> None:
        for batch in mw.shard_loader([example] * 40, step):
            step(batch)

    t.on_ranks(t.parts_for(model, example, loss, mesh=2), model, example, loss, body)
    assert asked.count(48) == asked.count(8) == 2 * len([n for n in range(1, 41) if is_due(n)]) == 12


@pytest.mark.parametrize("how", [SHARDINGS[0], SHARDINGS[2]], ids=str)
def test_a_rank_with_a_learning_rate_of_its_own(how: dict[str, Any]) -> None:
    _, example, _ = t.classifier(8)

    def body(step: Any) -> None:
        if step.pipe is not None:
            step.comparison.options = frozenset({(0, "lr")})  # as `train_step` finds it out
        step(example)
        if step.world.rank == 1:
            step.optimizer.param_groups[0]["lr"] = 0.3
        step(example)

    for said in told(body, RunError, **how):
        assert said.startswith("in step 2 the options of the optimizer differ between ranks\n")
        assert "  why:   lr=0.1 on ranks 0, 2, 3; lr=0.3 on rank 1\n" in said


@pytest.mark.parametrize("how", SHARDINGS, ids=str)
def test_a_rank_that_clips_to_another_norm(how: dict[str, Any]) -> None:
    _, example, _ = t.classifier(8)

    def body(step: Any) -> None:
        step.before.clip_norm = 1.0
        step(example)
        step.before.clip_norm = 0.5 if step.world.rank == 1 else 0.1
        step(example)

    for said in told(body, RunError, **how):
        assert said.startswith("step.clip_norm differs between ranks in step 2\n")
        assert "  why:   0.1 on ranks 0, 2, 3; 0.5 on rank 1\n" in said


@pytest.mark.parametrize("saved", [False, True])
def test_a_difference_of_one_step_is_seen_in_the_next_comparison_or_before_a_save(saved: bool) -> None:
    _, example, _ = t.classifier(8)

    def body(step: Any) -> None:
        for number in range(1, 9):
            own = example["x"] + (number == 6 and step.world.rank == 1)
            step({"x": own, "y": example["y"]})
            if saved and number == 7:
                step.comparison.compare(step.rank.step)

    for said in told(body, BatchError, mesh=2):
        assert said.startswith("'x' of the batch of step 6 differs between ranks\n")
        assert f"(seen in step {7 if saved else 8}: updates since then differ as well)" in said


def test_an_option_that_was_another_for_one_step() -> None:
    _, example, _ = t.classifier(8)

    def body(step: Any) -> None:
        for number in range(1, 8):
            (group,) = step.optimizer.param_groups
            group["lr"] = 0.3 if number == 5 and step.world.rank == 1 else 0.1
            step(example)
        step.comparison.compare(step.rank.step)

    for said in told(body, RunError, mesh=2):
        assert said.startswith("in step 5 the options of the optimizer differ between ranks\n")
        assert "lr=0.1 on rank 0; lr=0.3 on rank 1 (seen in step 7" in said


def test_options_that_all_ranks_begin_with() -> None:
    first, second = [{"lr": "0.1", "eps": "1"}, {"lr": "0.2"}], [{"lr": "0.1", "eps": "2"}, {"lr": "0.2"}]
    assert shared_options([first, second, first]) == {(0, "lr"), (1, "lr")}
    assert shared_options([first, second[:1]]) == frozenset()  # which of the two it is nobody knows


def test_forward_steps_compare_too() -> None:
    model, example, _ = t.classifier(8)
    from meshwright.capture.forward import capture_forward
    from meshwright.compile import lower, plan_captured, values_of
    from meshwright.runtime.communicator import SimulatedWorld
    from meshwright.runtime.forward import LocalForward, leaves_of
    from meshwright.runtime.rank import Rank

    captured = capture_forward(model, {"x": example["x"]}, lambda model, batch: model(batch["x"])).captured
    parts = lower(captured, plan_captured(captured, 2, "data_parallel", None))

    def on_rank(comm: Any) -> None:
        device = torch.device("cpu")
        leaves = leaves_of(parts, comm, device, values_of(model, captured))
        forward = LocalForward(parts, Rank(comm, device), leaves)
        forward({"x": example["x"] + comm.rank})
        with pytest.raises(BatchError, match="'x' of the batch of step 1 differs"):  # found in the next pass
            forward({"x": example["x"]})

    SimulatedWorld(parts.requested.ranks).run(on_rank)


def test_when_ranks_compare() -> None:
    assert [n for n in range(1, 140) if is_due(n)] == [1, 2, 4, 8, 16, 32, 64, 96, 128]


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(40_000),
        torch.randn(300, 200).T,
        torch.randint(0, 9, (7,)),
        torch.randn(5).bfloat16(),
        torch.tensor(True),
        torch.randn(3, dtype=torch.complex64),
        torch.zeros(0, 4),
    ],
    ids=lambda x: f"{x.dtype} {tuple(x.shape)}",
)
def test_checksums_are_of_what_is_in_a_tensor(x: torch.Tensor) -> None:
    assert checksum(x) == checksum(x.clone(memory_format=torch.contiguous_format))
    if x.numel():
        assert checksum(x) != checksum(x.logical_not() if x.dtype == torch.bool else x + 1)


def test_options_without_tensors() -> None:
    groups = [{"params": [1], "lr": 0.1, "betas": (0.9, 0.95), "of": torch.ones(1)}]
    assert options_of(groups) == [{"betas": "(0.9, 0.95)", "lr": "0.1"}]
    assert options_that_differ([[{"lr": "0.1", "eps": "1e-8"}], [{"lr": "0.3", "eps": "1e-8"}]]) == [
        "lr=0.1",
        "lr=0.3",
    ]
    assert options_that_differ([[{}], [{}, {}]]) == ["1 group of parameters", "2 groups of parameters"]
