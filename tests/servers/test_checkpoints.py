"""Checkpoints of parameters on servers: what is loaded goes on as if nothing had been, with servers or without."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.errors import CheckpointError, ServerError
from meshwright.servers import messages as m
from meshwright.servers.local import Local
from meshwright.servers.server import Server
from meshwright.servers.shards import spread
from meshwright.servers.worker import Worker
from tests.servers.jobs import ROWS, job, parameters, values


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.out = nn.Embedding(ROWS, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.table(ids))).squeeze(-1)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def batch(number: int) -> torch.Tensor:
    return torch.randint(0, ROWS, (6,), generator=torch.Generator().manual_seed(number))


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


def step_of(seed: int, marked: bool, make=adam) -> mw.ServerStep:
    torch.manual_seed(seed)
    model = Net()
    if marked:
        mw.on_server(model.table)
    return mw.parameter_server(model, make, loss=loss)


@pytest.mark.parametrize("marked", [True, False], ids=["a table on servers", "all on servers"])
def test_a_step_that_resumes_goes_on_to_the_bit(marked: bool, tmp_path: Path) -> None:
    step, scheduler = step_of(0, marked), {"epoch": 3}
    for number in range(3):
        step(batch(number))
    assert step.optimizer is not None
    step.optimizer.param_groups[0]["lr"] = 0.05
    step(batch(3))
    path = step.save(tmp_path, data=scheduler, async_=marked)
    step(batch(4))
    step.wait()
    again = step_of(1, marked)
    loaded = again.resume(tmp_path)
    assert loaded is not None and (loaded.path, loaded.data, again.steps) == (path, scheduler, 4)
    again(batch(4))
    assert again.steps == 5
    want, found = step.full_state(), again.full_state()
    assert all(torch.equal(want[name], found[name]) for name in want)
    with pytest.raises(ServerError, match="loaded while workers train"):
        again.load(tmp_path)
    assert again.resume(tmp_path) is None  # it goes on


@pytest.mark.parametrize("back", [False, True], ids=["to one device", "from one device"])
def test_checkpoints_load_with_servers_and_without(back: bool, tmp_path: Path) -> None:
    torch.manual_seed(2)
    plain = mw.train_step(Net(), adam, batch(0), loss=loss, mesh=1)
    first, second = (plain, step_of(3, True)) if back else (step_of(3, True), plain)
    for number in range(3):
        first(batch(number))
    first.save(tmp_path)
    assert second.load(tmp_path).step == 3
    for step in (first, second):
        step(batch(3))
    want, found = first.full_state(), second.full_state()
    for name in want:
        torch.testing.assert_close(found[name], want[name], rtol=1e-6, atol=1e-6)


def test_checkpoints_that_are_not_of_this_step(tmp_path: Path) -> None:
    step = step_of(0, True)
    step(batch(0))
    step.save(tmp_path)
    with pytest.raises(CheckpointError, match="the states of Adam, the step runs SGD"):
        step_of(0, True, lambda p: torch.optim.SGD(p, lr=0.1)).load(tmp_path)
    other = mw.parameter_server(nn.Linear(2, 2), adam, loss=lambda model, x: model(x).sum())
    with pytest.raises(CheckpointError, match="of another model"):
        other.load(tmp_path)
    damaged = next(tmp_path.glob("step-*/rank*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    fresh = step_of(1, True)
    before = fresh.full_state()
    with pytest.raises(CheckpointError, match="damaged"):
        fresh.resume(tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in fresh.full_state().items())


@pytest.mark.parametrize(
    ("optimizer", "more"), [("Adam", {}), ("Adagrad", {}), ("SparseAdam", {"sparse": True})]
)
def test_a_copy_is_of_one_moment(optimizer: str, more: dict[str, bool]) -> None:
    """In step it waits until all workers have pushed what its worker has, and later steps do not change it."""
    table = parameters(optimizer, {"lr": 0.1}, **more)[0]
    given = (table, parameters("Adam", {"lr": 0.1})[1])
    servers, (first, second) = job(2, workers=2, given=given)
    order = torch.Generator().manual_seed(0)

    def push(worker: Worker) -> None:
        ids = torch.randint(0, ROWS, (20,), generator=order).unique()
        held = worker.pull(("weight",), {"table": ids})
        worker.push(1.0, {"weight": held["weight"].sin()}, {"table": (ids, held["table"].cos())})

    push(first)
    waiting = threading.Thread(target=first.freeze)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive(), "another worker has not pushed yet"
    push(second)
    waiting.join(30)
    stored = {number: server.stored for number, server in servers.servers.items()}
    want = {
        (number, name, block): each.take(block)
        for number, here in stored.items()
        for name, each in here.items()
        for block in each.blocks
    }
    for _ in range(3):
        later = threading.Thread(target=push, args=(second,))
        later.start()
        push(first)
        later.join(30)
    for (number, name, block), parts in want.items():
        found = servers.servers[number].copy.of(name).take(block)
        assert found.keys() == parts.keys()
        assert all(torch.equal(found[key], parts[key]) for key in parts)
    assert any(
        not torch.equal(stored[n][name].take(b)["values"], p["values"]) for (n, name, b), p in want.items()
    )
    second.leave()
    assert servers.servers[0].copy.worker == 0
    first.leave()
    assert servers.servers[0].copy.worker is None


def test_all_begins_anew_with_another_attempt() -> None:
    given, servers = parameters(), Local({0: Server(0)})
    first, second = (m.Declare("job", given, spread(given, range(1)), 0, 1, attempt) for attempt in (0, 1))
    trained = Worker(servers, 0, first)
    trained.fill(values)
    trained.join()
    trained.push(1.0, {"weight": torch.ones(3, 4)})
    assert Worker(servers, 0, second).missing[0].keys() == {"table", "weight"}
    with pytest.raises(ServerError, match="a worker of attempt 0"):
        Worker(servers, 0, first)


def test_nothing_is_loaded_once_workers_have_pushed() -> None:
    servers, (worker,) = job(1)
    worker.push(1.0, {"weight": torch.ones(3, 4)})
    for request in (m.Clear(worker.model), m.Begin(worker.model, 0, "")):
        answer, _ = servers.servers[0].answer(request, [])
        assert isinstance(answer, m.Refused) and "while workers train" in answer.what
