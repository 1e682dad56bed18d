"""`mw.train_step(…, mode="parameter_server")`: each worker trains its share of the global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.errors import BatchError, PlanError, ServerError
from meshwright.train.on_servers import share


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def build(**options: Any) -> Any:
    return mw.train_step(
        nn.Linear(3, 1), sgd, torch.ones(4, 3), loss=loss, mode="parameter_server", **options
    )


def test_a_step_is_one_on_servers() -> None:
    step = build(staleness=2)
    assert isinstance(step, mw.ServerStep)
    before = step.evaluate(torch.ones(4, 3))
    assert step(torch.ones(4, 3)) == before
    assert step.evaluate(torch.ones(4, 3)) < before
    assert step.steps == 1


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_shares_are_all_examples_once(workers: int) -> None:
    batch = {"x": torch.arange(14).view(7, 2), "y": (torch.arange(7), "name", torch.tensor(0.5))}
    shares = [share(batch, worker, workers) for worker in range(workers)]
    assert torch.equal(torch.cat([each["x"] for each in shares]), batch["x"])
    assert torch.equal(torch.cat([each["y"][0] for each in shares]), torch.arange(7))
    assert all(each["y"][1] == "name" and each["y"][2] == 0.5 for each in shares)
    assert all(len(each["x"]) >= 7 // workers for each in shares)


def test_batches_without_shares() -> None:
    with pytest.raises(BatchError, match=r"the first dim of x is 4, that of weights\.0 3"):
        share({"x": torch.ones(4), "weights": [torch.ones(3)]}, 0, 2)
    with pytest.raises(BatchError, match=r"(?s)the batch has 2 examples for 3 workers.*drop_last=True"):
        share(torch.ones(2, 5), 0, 3)
    with pytest.raises(BatchError, match="y of the batch is no tensor"):
        share({"x": torch.ones(4), "y": torch.ones(4).numpy()}, 0, 2)
    with pytest.raises(BatchError, match="ids of the batch is no tensor"):
        share({"x": torch.ones(4), "ids": [3, 1, 4, 1]}, 0, 2)
    assert share({"x": torch.ones(4), "words": ["a", "b", "c", "d"], "sizes": (3, 2)}, 1, 2)["sizes"] == (
        3,
        2,
    )
    with pytest.raises(BatchError, match="the batch has 0 examples"):
        share([3, "no tensor"], 0, 1)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a mesh": (lambda: build(mesh=1), 'mesh= is given together with mode="parameter_server"'),
    "a technique": (lambda: build(optimizer_parallel=1), "optimizer_parallel= is given together with"),
    "a seed": (lambda: build(seed=1), "seed= is given together with"),
    "staleness elsewhere": (
        lambda: mw.train_step(nn.Linear(3, 1), sgd, torch.ones(4, 3), loss=loss, staleness=1),
        "staleness=1 with mode=None",
    ),
    "a plan": (
        lambda: mw.plan(nn.Linear(3, 1), torch.ones(4, 3), loss=loss, mode="parameter_server"),
        'mode="parameter_server" has no plan',
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_apply_is_refused(case: str) -> None:
    wrong, what = REFUSED[case]
    with pytest.raises(PlanError, match=what):
        wrong()


HELPERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "Autosave": (
        lambda step: mw.Autosave(step, "ckpt", every=2),
        r"step\.resume\(path\) before the first step",
    ),
    "Metrics": (lambda step: mw.Metrics(step), r"step\.traffic"),
    "shard_loader": (
        lambda step: mw.shard_loader([torch.ones(3)], step),
        "a plain DataLoader of full batches",
    ),
}


@pytest.mark.parametrize("name", HELPERS)
def test_helpers_of_plans_say_what_to_use_here(name: str) -> None:
    helper, hint = HELPERS[name]
    with pytest.raises(mw.MeshwrightError, match=hint):
        helper(build())


def test_a_staleness_that_is_none() -> None:
    with pytest.raises(ServerError, match="staleness=-1"):
        build(staleness=-1)


def test_a_step_that_does_not_update() -> None:
    with pytest.raises(ServerError, match="gradients are not accumulated"):
        build()(torch.ones(4, 3), update=False)


def test_samples_are_for_batches_of_each_workers_own() -> None:
    with pytest.raises(ServerError, match=r"samples\(…\) deals each worker samples of its own"):
        next(build().samples(8, batch=2))


@pytest.mark.parametrize(
    ("name", "hint"),
    [("forward_step", r"step\.evaluate"), ("full", r"step\.full_state"), ("evalute", "evaluate")],
)
def test_what_only_other_steps_have_is_named(name: str, hint: str) -> None:
    with pytest.raises(AttributeError, match=f"no '{name}'; .*{hint}"):
        getattr(build(), name)
