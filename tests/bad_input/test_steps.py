"""Steps that cannot be built or run: optimizers, launches, batches."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.core.techniques import Options
from meshwright.errors import BatchError, RunError, ServerError
from meshwright.servers.places import JOINS
from tests.bad_input.wrong import built, fresh

HERE = Path(__file__).name


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_an_optimizer_instead_of_a_function_is_refused() -> None:
    model, batch, loss = built()
    with pytest.raises(RunError, match=r"optimizer is a SGD, not a function") as caught:
        mw.train_step(model, sgd(model.parameters()), batch, loss=loss, mesh=1)  # type: ignore[arg-type]
    assert "the parts of the parameters" in caught.value.why and "lambda parameters" in caught.value.hint


def test_a_plan_for_more_ranks_than_were_launched_is_refused_before_anything_starts() -> None:
    model, batch, loss = built()
    plan = mw.plan(model, batch, loss=loss, mesh={"dp": 2, "tp": 2})
    with pytest.raises(RunError, match=r"4 ranks \(dp=2 × tp=2\), 1 was launched") as caught:
        mw.train_step(model, sgd, batch, loss=loss, plan=plan)
    assert "--nproc 4" in caught.value.hint and not dist.is_initialized()


def test_a_step_that_shares_nothing_with_the_workers_it_comes_to_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of them would train a model of its own: `meshwright run --add-to`, `independent` on Kubernetes."""
    monkeypatch.setenv(JOINS, "1")
    model, batch, loss = built()
    with pytest.raises(ServerError, match=r"mw\.train_step by a worker that comes while others train"):
        mw.train_step(model, sgd, batch, loss=loss, mesh=1)
    with pytest.raises(ServerError, match=r"mw\.manual_step by a worker that comes while others train"):
        mw.manual_step(model, sgd, loss=loss, mesh=1)
    assert not dist.is_initialized()


def test_a_plan_for_fewer_ranks_than_were_launched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    model, batch, loss = built()
    with pytest.raises(RunError, match=r"4 ranks .*, 8 were launched"):
        mw.train_step(model, sgd, batch, loss=loss, mesh=4)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            lambda b: {"x": b["x"][:5], "y": b["y"]},
            r"'x' is f32\[5, 16\], the step was built for f32\[12, 16\]",
        ),
        (lambda b: {"x": b["x"].double(), "y": b["y"]}, r"'x' is f64\[12, 16\], .* for f32\[12, 16\]"),
        (lambda b: {"x": b["x"], "z": b["y"]}, "the batch has no 'y'"),
        (lambda b: None, "the batch has no 'x'"),
    ],
)
def test_a_batch_unlike_the_example_is_refused(change: Callable[[Any], Any], what: str) -> None:
    model, batch, loss = fresh()
    step = mw.train_step(model, sgd, batch, loss=loss, mesh=1)
    before = {n: p.clone() for n, p in step.parameters.items()}
    with pytest.raises(BatchError, match=what) as caught:
        step(change(batch))
    assert caught.value.why and caught.value.hint
    assert all(torch.equal(before[n], p) for n, p in step.parameters.items())


@pytest.mark.parametrize("name", ["lr", *signature(mw.train_step).parameters, *Options.__annotations__])
def test_an_argument_is_assigned_to_a_step(name: str) -> None:
    """It would be an attribute that nothing reads; what has an effect is not refused."""
    model, batch, loss = built()
    step = mw.train_step(model, sgd, batch, loss=loss, mesh=1)
    if name == "clip_norm":
        step.clip_norm = 1.0
        step(batch)
        assert step.grad_norm > 0
        with pytest.raises(RunError, match="clip_norm=-1"):
            step.clip_norm = -1
        return
    if name in ("optimizer", "techniques"):  # another error, and no argument's name
        return
    with pytest.raises(RunError, match=rf"step\.{name} = … changes nothing") as caught:
        setattr(step, name, 3)
    assert caught.value.hint and "{0}" not in caught.value.hint


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda step: torch.save(step, io.BytesIO())])
def test_a_step_is_copied(how: Callable[[Any], Any]) -> None:
    model, batch, loss = built()
    step = mw.train_step(model, sgd, batch, loss=loss, mesh=1)
    with pytest.raises(RunError, match="a training step cannot be copied or pickled") as caught:
        how(step)
    assert "step.save(path)" in caught.value.hint and "step.full_state()" in caught.value.hint
