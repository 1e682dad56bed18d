"""A loss that is no mean over rows is an error where workers train shares of a batch, and nothing shows the check."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw
from meshwright.errors import BatchError, PlanError, ServerError
from meshwright.loss.evaluation import evaluating
from meshwright.loss.example_count import examples
from meshwright.loss.mean_loss import check_mean
from meshwright.parameter_server import server_step
from meshwright.servers.lookups import Lookups
from meshwright.train.on_servers import share

CLASSES = torch.arange(1.0, 6.0)
Batch = dict[str, torch.Tensor]
Loss = Callable[[Any, Any], Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(50, 6), nn.Linear(6, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(ids).mean(1))


def batches(count: int = 5, rows: int = 8) -> list[Batch]:
    drawn = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        y = torch.randint(0, 5, (rows,), generator=drawn)
        y[:3] = -100
        found.append({"ids": torch.randint(0, 50, (rows, 4), generator=drawn), "y": y})
    return found


def mean(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["ids"]), batch["y"].clamp(min=0))


def ignoring(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["ids"]), batch["y"])


def weighted(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["ids"]), batch["y"].clamp(min=0), weight=CLASSES)


def total(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["ids"]), batch["y"].clamp(min=0), reduction="sum")


COUNTS: dict[Loss, Callable[[Batch], Any]] = {
    ignoring: lambda batch: (batch["y"] != -100).sum(),
    weighted: lambda batch: CLASSES[batch["y"].clamp(min=0)].sum(),
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def build(model: nn.Module, loss: Loss, **options: Any) -> Any:
    return mw.train_step(model, sgd, batches(1)[0], loss=loss, mode="parameter_server", **options)


# ---- steps of workers


@pytest.mark.parametrize("staleness", [0, None])
@pytest.mark.parametrize("loss", [ignoring, weighted, total])
def test_all_workers_refuse_what_is_no_mean(together: Any, loss: Loss, staleness: int | None) -> None:
    pushed: list[int] = []
    torch.manual_seed(0)
    models = [
        Net() for _ in range(3)
    ]  # here: a generator that another thread draws from would stop the check

    def work(rank: int) -> None:
        step = build(models[rank], loss, staleness=staleness)
        try:
            step(batches()[0])
        finally:
            pushed.append(step.steps)

    found = together(3, 2, work)
    assert pushed == [0, 0, 0]
    for error in found:
        assert isinstance(error, BatchError)
        assert "not a mean over the rows" in str(error) and "weight=lambda batch: " in str(error)
    if loss is total:
        assert "of the workers' shares nan" not in str(found[0])


@pytest.mark.parametrize("loss", [mean, *COUNTS])
@pytest.mark.parametrize("marked", [False, True])
def test_by_their_counts_shares_are_the_batch(together: Any, loss: Loss, marked: bool) -> None:
    """The first worker's share has no label, so it does not count."""
    torch.manual_seed(0)
    plain = Net()
    models = [copy.deepcopy(plain) for _ in range(4)]
    own = sgd(plain.parameters())
    for batch in batches():
        own.zero_grad()
        loss(plain, batch).backward()
        own.step()

    def work(rank: int) -> dict[str, torch.Tensor]:
        if marked:
            mw.on_server(models[rank].table)
            mw.on_server(models[rank].out)
        step = build(models[rank], loss, **({"weight": COUNTS[loss]} if loss in COUNTS else {}))
        for batch in batches():
            step(batch)
        return step.full_state()

    for state in together(4, 2, work):
        assert not isinstance(state, Exception), state
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def test_it_is_checked_in_few_steps_and_changes_nothing(together: Any, monkeypatch: Any) -> None:
    torch.manual_seed(0)
    plain = Net()

    def run() -> list[Any]:
        def work(rank: int) -> Any:
            called: list[int] = []

            def loss(model: Any, batch: Batch) -> torch.Tensor:
                called.append(len(batch["ids"]))
                return mean(model, batch)

            model = copy.deepcopy(plain)
            step, losses, calls = build(model, loss), [], []
            for batch in batches(8, rows=9):
                called.clear()
                losses.append(step(batch).item())
                calls.append(called.copy())
            traffic = step.traffic.pulled_bytes, step.traffic.pushed_bytes, step.traffic.looked_up_rows
            return calls, losses, traffic, model.training

        return together(2, 2, work)

    checked = run()
    monkeypatch.setattr(server_step.ServerStep, "_check_mean", lambda *_: None)
    for (calls, *others), (few, *expected), own in zip(checked, run(), (4, 5), strict=True):
        every = [9, 4, 5, own]  # the batch, all shares, and what is trained
        assert calls == [every if number in (1, 2, 4, 8) else [own] for number in range(1, 9)]
        assert few == [[own]] * 8
        assert others == expected


def test_one_worker_has_no_shares() -> None:
    assert build(Net(), total)(batches()[0]) > 0


def test_rows_are_pulled_once_while_they_are_kept() -> None:
    lookups, table, pulled = Lookups(), nn.Embedding(9, 2), []

    def pull(ids: torch.Tensor) -> torch.Tensor:
        pulled.append(ids.tolist())
        return ids[:, None].float().expand(-1, 2) + 100 * len(pulled)

    lookups.attach("table", table, pull)
    with torch.no_grad():
        with lookups.kept():
            table(torch.tensor([], dtype=torch.long))
            first = table(torch.tensor([5, 1]))
            assert torch.equal(table(torch.tensor([1, 7, 5]))[[2, 0]], first)
            assert torch.equal(table(torch.tensor([1, 5])), first[[1, 0]])
        table(torch.tensor([5]))
    assert pulled == [[], [1, 5], [7], [5]]


@pytest.mark.parametrize(
    ("make", "error", "what"),
    [
        (
            lambda: mw.train_step(Net(), sgd, batches(1)[0], loss=mean, weight=len),
            PlanError,
            "weight= is given with mode=None",
        ),
        (lambda: build(Net(), mean, weight=3), ServerError, "weight=3 is not a function"),
        (lambda: mw.parameter_server(Net(), sgd, loss=mean, weight="y"), ServerError, "is not a function"),
    ],
)
def test_weights_that_are_none(make: Callable[[], Any], error: type[Exception], what: str) -> None:
    with pytest.raises(error, match=what):
        make()


# ---- the check alone


def check(model: nn.Module, loss: Loss, batch: Any, workers: int = 2, weight: Any = examples) -> None:
    with evaluating(model):
        check_mean(model, loss, weight, batch, share, workers)


class Habits(nn.Module):
    """Dropout, statistics, a buffer that counts and one that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.drop = nn.Embedding(50, 6), nn.BatchNorm1d(6), nn.Dropout()
        self.out = nn.utils.spectral_norm(nn.Linear(6, 5))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(1))
        self.register_buffer("graph", torch.eye(2).to_sparse())
        self.norm.eval()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = ids[0].float()
        return self.out(self.drop(self.norm(self.table(ids).mean(1))))


def everything(model: Habits) -> list[Any]:
    return [
        [each.training for each in model.modules()],
        {name: (id(x), x.to_dense().tolist()) for name, x in model.named_buffers()},
        torch.get_rng_state().tolist(),
        random.getstate(),
        str(np.random.get_state()),
    ]


@pytest.mark.parametrize("draws", [False, True])
def test_nothing_shows_that_it_was_checked(draws: bool) -> None:
    model, seen, own = Habits(), [], torch.Generator().manual_seed(5)
    model.register_forward_hook(lambda *_: seen.append("after"))
    model.out.register_forward_pre_hook(lambda *_: seen.append("before"))

    def loss(model: Any, batch: Batch) -> torch.Tensor:
        if draws:
            torch.rand(1), random.random(), np.random.rand()
            torch.randint(0, 5, (3,), generator=own)
        return total(model, batch)

    before, state = everything(model), own.get_state()
    if draws:
        check(model, loss, batches()[0])
    else:
        with pytest.raises(BatchError):
            check(model, loss, batches()[0])
    assert everything(model) == before and torch.equal(own.get_state(), state)
    assert not seen
    model(batches()[0]["ids"])
    assert seen == ["before", "after"]


def of_a_training_mode(model: Any, batch: Batch) -> torch.Tensor:
    if not model.training:
        raise RuntimeError("no loss in evaluation mode")
    return total(model, batch)


def noisy(model: Any, batch: Batch) -> torch.Tensor:
    """Numbers are drawn, which here happen to change nothing."""
    return total(model, batch) if random.random() < 2 else mean(model, batch)


def of_a_generator() -> Loss:
    own = np.random.default_rng(0)
    return lambda model, batch: mean(model, batch) * float(own.random())


def of_the_batch(model: Any, batch: Batch) -> torch.Tensor:
    x = F.batch_norm(model(batch["ids"]), None, None, training=True)
    return F.cross_entropy(x, batch["y"].clamp(min=0))


@pytest.mark.parametrize(
    "loss", [of_a_training_mode, noisy, of_a_generator(), of_the_batch, lambda m, b: m(b["ids"])]
)
def test_what_cannot_be_compared_is_not_checked(loss: Loss) -> None:
    check(Net(), loss, batches()[0])


def of_small_numbers(model: Any, batch: Batch) -> torch.Tensor:
    """What is left of rounding where a model has learnt all."""
    found = model(batch["ids"])
    return (found - found.double().float() * (1 + 1e-7)).square().mean()


def with_autocast(model: Any, batch: Batch) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return mean(model, batch)


def with_a_penalty(model: Any, batch: Batch) -> tuple[torch.Tensor, str]:
    return mean(model, batch) + 0.1 * model.out.weight.square().sum(), "outputs"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("loss", [mean, of_small_numbers, with_autocast, with_a_penalty])
@pytest.mark.parametrize("rows", [7, 301])
def test_rounding_is_no_difference(dtype: torch.dtype, loss: Loss, rows: int) -> None:
    torch.manual_seed(1)
    check(Net().to(dtype), loss, batches(1, rows)[0], workers=7)


@pytest.mark.parametrize(
    ("loss", "dtype"),
    [
        (weighted, torch.float32),
        *((x, d) for x in (ignoring, total) for d in (torch.float32, torch.bfloat16)),
    ],
)
def test_a_difference_is_more_than_rounding(loss: Loss, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    model = Net().to(dtype)
    with pytest.raises(BatchError, match="not a mean"):
        check(model, loss, batches(1)[0])


def test_a_compiled_model_is_not_compiled_once_more() -> None:
    shapes: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        shapes.append(inputs)
        return graph.forward

    model: Any = torch.compile(Net(), backend=backend)
    check(model, mean, batches()[0])
    assert not shapes
    mean(model, batches()[0])
    assert len(shapes) == 1
