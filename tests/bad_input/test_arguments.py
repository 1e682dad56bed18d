"""Arguments of another kind than expected: an error of ours that says so, and nothing is taken in silence."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.errors import (
    BatchError,
    CaptureError,
    CheckpointError,
    LaunchError,
    MeshError,
    PlanError,
    RunError,
    StrategyError,
    did_you_mean,
)
from tests.bad_input.wrong import built, fresh
from tests.data import train as t


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


def train(**change: Any) -> mw.TrainStep:
    model, batch, loss = fresh()
    given = {"model": model, "optimizer": adam, "batch": batch, "loss": loss, "mesh": 1} | change
    return mw.train_step(given.pop("model"), given.pop("optimizer"), given.pop("batch"), **given)


def script() -> torch.nn.Module:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return torch.jit.script(torch.nn.Linear(16, 16))


def forward(**change: Any) -> mw.ForwardStep:
    model, batch, _ = built()
    given = {"outputs": lambda model, batch: model(batch["x"]), "mesh": 1} | change
    return mw.forward_step(given.pop("model", model), {"x": batch["x"]}, **given)


CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no model": (lambda: train(model=None), CaptureError, "the model is a NoneType"),
    "a compiled model": (lambda: train(model=torch.compile(fresh()[0])), CaptureError, "OptimizedModule"),
    "a model in DataParallel": (
        lambda: forward(model=torch.nn.DataParallel(fresh()[0])), CaptureError, "the model is a DataParallel",
    ),
    "TorchScript": (lambda: train(model=torch.nn.Sequential(script())), CaptureError, "0 is a RecursiveScript"),
    "no model to run": (lambda: forward(model=None), CaptureError, "the model is a NoneType"),
    "no model for a manual step": (lambda: mw.manual_step(None, adam), CaptureError, "the model is a NoneType"),  # type: ignore[arg-type]
    "no model to copy to": (lambda: train().copy_to(None), CaptureError, "the model is a NoneType"),  # type: ignore[arg-type]
    "another model to copy to": (
        lambda: train().copy_to(torch.nn.Linear(2, 2)), RunError, "tensors have no place in this model",
    ),
    "compile as a word": (lambda: train(compile="yes"), RunError, "compile="),
    "compile for a plan": (
        lambda: mw.plan(*built()[:2], loss=built()[2], mesh=2, compile=True), PlanError, "under any plan",
    ),
    "memory in words, before a capture that would fail": (
        lambda: mw.plan(torch.nn.Sequential(script()), built()[1], cluster=mw.Cluster.local(2), memory="60GB"),  # type: ignore[arg-type]
        PlanError, "memory=",
    ),
    "a model on the meta device with a batch that is not": (
        lambda: mw.plan(fresh()[0].to("meta"), built()[1], loss=built()[2], mesh=2), CaptureError, "make the batch",
    ),
    "a number for a plan": (lambda: train(plan=3, mesh=None), PlanError, "plan=3"),
    "a number for a plan of a forward pass": (lambda: forward(plan=3, mesh=None), PlanError, "plan=3"),
    "a number for a plan to prove": (
        lambda: mw.verify(*built()[:2], loss=built()[2], plan=3), PlanError, "plan=3",  # type: ignore[arg-type]
    ),
    "a number for pins, of a cluster": (
        lambda: mw.plan(*built()[:2], loss=built()[2], cluster=mw.Cluster.local(2), pins=5),  # type: ignore[arg-type]
        StrategyError, "pins=5 is an int",
    ),
    "pins in a list, of several meshes": (
        lambda: mw.plan(*built()[:2], loss=built()[2], mesh=[1, 1], mode="semi_auto", pins=[1]),  # type: ignore[arg-type]
        StrategyError, "is a list",
    ),
    "a mesh without axes": (lambda: train(mesh={}), MeshError, r"mesh=\{\} is not a mesh"),
    "a shape": (
        lambda: mw.plan(*built()[:2], loss=built()[2], mesh=(2, 4)), MeshError,
        r'(?s)mesh=\(2, 4\) is not a mesh.*mesh=\{"dp": 2, "tp": 4\} for one mesh of 8 ranks; '
        r"mesh=\[2, 4\] for a pipeline",
    ),
    "a shape for a step": (lambda: train(mesh=(2, 2)), MeshError, r"mesh=\(2, 2\) is not a mesh"),
    "a number for a cluster": (lambda: train(mesh=None, cluster=3), PlanError, "the cluster is 3"),
    "no loss": (lambda: train(loss=None), CaptureError, "loss=None is not a function"),
    "no outputs": (lambda: forward(outputs=None), CaptureError, "outputs=None is not a function"),
    "a batch without tensors": (lambda: train(batch={}), CaptureError, "the example batch has no tensors"),
    "buckets of less than nothing": (lambda: train(bucket_bytes=-1), RunError, "bucket_bytes=-1"),
    "a word for a switch": (lambda: train(exact_random="no"), RunError, "exact_random='no'"),
    "a word for a switch of results": (
        lambda: forward()({"x": built()[1]["x"]}, gather="no"), RunError, "gather='no'",  # type: ignore[arg-type]
    ),
    "a word for a switch of a save": (lambda: train().save("x", async_="no"), RunError, "async_='no'"),  # type: ignore[arg-type]
    "a word for a switch of a load": (lambda: train().load("x", optimizer="no"), RunError, "optimizer='no'"),  # type: ignore[arg-type]
    "no step to save": (lambda: mw.Autosave(None, "x", every=1), CheckpointError, "the step is a NoneType"),  # type: ignore[arg-type]
    "nothing to keep": (lambda: mw.Autosave(train(), "x", every=1, keep=0), CheckpointError, "keep=0"),
    "no step to report": (lambda: mw.Metrics(None), RunError, "the step is a NoneType"),  # type: ignore[arg-type]
    "a number for a file of metrics": (lambda: mw.Metrics(train(), 3), RunError, "path=3"),  # type: ignore[arg-type]
    "a word for tokens": (lambda: mw.Metrics(train(), tokens="x"), RunError, "tokens='x'"),  # type: ignore[arg-type]
    "a number for the cluster of metrics": (lambda: mw.Metrics(train(), cluster=3), RunError, "cluster=3"),  # type: ignore[arg-type]
    "a word for shuffle": (lambda: mw.shard_loader(t.Points(8), train(), shuffle="no"), BatchError, "shuffle='no'"),  # type: ignore[arg-type]
    "less than no workers": (
        lambda: mw.shard_loader(_Samples(), train(), num_workers=-1), BatchError, "no DataLoader with num_workers=-1",
    ),
    "half a position": (
        lambda: mw.shard_loader(_Samples(), train()).load_state_dict({"kind": "samples"}), RunError, "has no 'epoch'",
    ),
    "a word for a dtype": (
        lambda: mw.verify(*built()[:2], loss=built()[2], mesh=1, dtype="f64"), RunError, "dtype='f64'",  # type: ignore[arg-type]
    ),
    "a number for a job": (lambda: mw.launch(3), LaunchError, "the job is an int"),  # type: ignore[arg-type]
    "no path of a plan": (lambda: mw.Plan.load(None), PlanError, "the plan file 'None'"),  # type: ignore[arg-type]
    "no path to read": (lambda: mw.CheckpointReader(None), CheckpointError, "the path of a checkpoint is None"),  # type: ignore[arg-type]
    "nothing to put into a stage": (lambda: mw.stage(None, 0), PlanError, "is given None"),
}  # fmt: skip


class _Samples:
    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {name: x[number % len(x)] for name, x in built()[1].items()}


@pytest.mark.parametrize("name", CASES)
def test_it_is_said(name: str) -> None:
    make, error, said = CASES[name]
    with pytest.raises(error, match=said) as caught:
        make()
    assert caught.value.why and caught.value.hint  # type: ignore[attr-defined]


def test_no_hint_names_the_empty_word() -> None:
    assert did_you_mean("x", ("", "full", "selective")) == "known: full, selective"
