"""Clipping by the norm of all gradients, on all servers and on none: the numbers of one device, each update once."""

from __future__ import annotations

import copy
import itertools
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.errors import BatchError, ServerError
from meshwright.servers import messages as m
from meshwright.servers import snapshots
from meshwright.servers.asking import ask
from meshwright.servers.local import Local
from meshwright.servers.moving import use_servers
from meshwright.servers.norms import MOST, factor
from meshwright.servers.server import Server
from meshwright.servers.shards import spread
from meshwright.servers.worker import Worker
from tests.servers.habits import Net, adam, batches, loss, sgd
from tests.servers.jobs import ROWS, WIDTH, full, parameters, values

CLIP = 0.05
LIMIT = m.Limit(0.5, outside=False)


@pytest.mark.parametrize("marked", [lambda m: None, lambda m: mw.on_server(m.table)], ids=["all", "a table"])
@pytest.mark.parametrize("factory", [sgd, adam])
@pytest.mark.parametrize("clip", [CLIP, 1e9, math.inf])
def test_numbers_are_those_of_plain_pytorch(marked: Any, factory: Any, clip: float) -> None:
    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    marked(model)
    step, own = mw.parameter_server(model, factory, loss=loss, clip_norm=clip), factory(plain.parameters())
    for batch in batches():
        own.zero_grad()
        loss(plain, batch).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), clip)
        own.step()
        step(batch)
        torch.testing.assert_close(step.grad_norm, norm, rtol=1e-6, atol=1e-6)
        assert math.isinf(clip) or (norm > clip) == (clip == CLIP)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(step.full_state()[name], value, rtol=1e-6, atol=1e-6)


def test_train_step_takes_it() -> None:
    step = mw.train_step(Net(), sgd, batches(1)[0], loss=loss, mode="parameter_server", clip_norm=CLIP)
    with pytest.raises(ServerError, match=r"(?s)norm of the gradients is not known.*no step has been done"):
        _ = step.grad_norm
    step(batches(1)[0])
    assert step.grad_norm > CLIP


@pytest.mark.parametrize(("workers", "servers"), [(2, 3), (4, 1), (3, 2)])
@pytest.mark.parametrize("sparse", [False, True])
def test_rows_of_several_workers_are_added_up_before_the_norm(together, workers, servers, sparse) -> None:
    torch.manual_seed(0)
    plain = Net()
    start = copy.deepcopy(plain)
    start.table = nn.Embedding(50, 6, sparse=sparse, _weight=plain.table.weight.detach().clone())
    own, given = sgd(plain.parameters()), batches(4)
    for ids, goals in given:
        own.zero_grad()
        loss(plain, (ids, goals)).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        own.step()

    def work(rank: int) -> dict[str, torch.Tensor]:
        step = mw.parameter_server(copy.deepcopy(start), sgd, loss=loss, clip_norm=CLIP)
        for ids, goals in given:
            step((ids[rank::workers], goals[rank::workers]))  # uneven, one may be empty
        return step.full_state()

    for state in together(workers, servers, work):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-6)


def job(servers: int, workers: int, **more: Any) -> tuple[Local, list[Worker], m.Declare]:
    local, held = Local({n: Server(n) for n in range(4)}, 30), parameters("Adam", {"lr": 0.1})
    declare = m.Declare("job", held, spread(held, range(servers)), 0, workers, limit=LIMIT, **more)
    made = [Worker(local, n, declare) for n in range(workers)]
    made[0].fill(values)
    for worker in made:
        worker.join()
    return local, made, declare


def gradients(step: int) -> tuple[dict[str, torch.Tensor], dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    random = torch.Generator().manual_seed(step)
    ids = torch.randperm(ROWS, generator=random)[:20].sort().values
    return {"weight": torch.randn(3, WIDTH, generator=random)}, {
        "table": (ids, torch.randn(20, WIDTH, generator=random))
    }


def trained(steps: int, servers: int = 2) -> dict[str, torch.Tensor]:
    _, (worker,), _ = job(servers, 1)
    for step in range(steps):
        worker.push(1.0, *gradients(step))
    return full(worker)


class Killed(Exception):
    pass


class Dying(Local):
    """A worker's way to servers, killed after so many messages, also between those of one request to all."""

    def __init__(self, local: Local, messages: int) -> None:
        super().__init__(local.servers, 30)
        self.left, self._changed = messages, local._changed

    def ask(self, requests: Any, busy: float = 0.0) -> Any:
        found = {}
        for number, request in requests.items():
            if not self.left:
                raise Killed
            self.left -= 1
            found.update(super().ask({number: request}, busy))
        return found


@pytest.mark.parametrize("messages", [1, 2])
def test_a_push_that_nobody_has_committed_holds_nobody_up(messages: int) -> None:
    """As without clipping: what a killed worker had not sent to all is lost."""
    local, (first,), declare = job(2, 1)
    first.transport = Dying(local, messages)
    with pytest.raises(Killed):
        first.push(1.0, *gradients(0))
    for server in range(2):
        local.servers[server].answer(m.Leave(first.model, 0), [])
    again = Worker(local, 0, declare)
    assert again.join() == 0
    again.push(1.0, *gradients(0))
    assert [local.servers[n].counts.applied for n in range(2)] == [{0: 1}, {0: 1}]
    assert all(torch.equal(full(again)[name], value) for name, value in trained(1).items())


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("after", range(5, 10))
def test_a_step_whose_worker_was_killed_is_ended_once(after: int, restarts: bool) -> None:
    """The only worker is killed when both servers have committed its push: before the norm, or between two servers."""
    local, (first,), declare = job(2, 1)
    first.push(1.0, *gradients(0))
    first.transport = Dying(local, after)
    try:
        first.push(1.0, *gradients(1))
    except Killed:
        assert after < 9
    for server in range(2):
        local.servers[server].answer(m.Leave(first.model, 0), [])
        if restarts:
            local.servers[server] = snapshots.server_of(snapshots.copy(local.servers[server]))
    again = Worker(local, 0, declare)
    assert again.join() == 2
    again.push(1.0, *gradients(2))
    assert all(torch.equal(full(again)[name], value) for name, value in trained(3).items())
    assert [local.servers[n].counts.applied for n in range(2)] == [{0: 3}, {0: 3}]


def test_who_moves_blocks_ends_it_too() -> None:
    local, (first,), declare = job(2, 1)
    first.transport = Dying(local, 5)
    with pytest.raises(Killed):
        first.push(1.0, *gradients(0))
    for server in range(2):
        local.servers[server].answer(m.Leave(first.model, 0), [])
    use_servers(local, declare, range(3))
    again = Worker(local, 0, declare)
    assert again.join() == 1
    assert all(torch.equal(full(again)[name], value) for name, value in trained(1).items())


def test_servers_move_while_workers_train() -> None:
    local, workers, declare = job(2, 2)
    last = [1 << 30]

    def train(worker: Worker) -> None:
        while worker.clock < last[0]:
            full(worker)
            worker.push(1.0, *gradients(2 * worker.clock + worker.number))

    threads = [threading.Thread(target=train, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for count in (4, 1, 3):
        use_servers(local, declare, range(count))
    last[0] = max(worker.clock for worker in workers) + 3
    for thread in threads:
        thread.join()
    _, others, _ = job(1, 2)
    last[0] = workers[0].clock
    threads = [threading.Thread(target=train, args=(worker,)) for worker in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert workers[0].norm == pytest.approx(others[0].norm, rel=1e-12)
    for name, value in full(others[0]).items():
        torch.testing.assert_close(full(workers[0])[name], value, rtol=1e-6, atol=1e-6)


def test_nobody_reads_values_of_a_step_that_waits_for_its_norm() -> None:
    local, (first, second), _ = job(1, 2)
    for worker in (first, second):
        worker.transport = Dying(local, 1)
        with pytest.raises(Killed):
            worker.push(1.0, *gradients(worker.number))
    pull = m.Pull(first.model, 1, 0, 1, ("weight",))
    freeze = m.Freeze(first.model, 1, 0, 1)
    for request in (pull, freeze):
        assert local.servers[0].answer(request, [])[0] == m.Wait()
    measured = ask(local, {0: (m.Measure(first.model, 0), [])}, m.Measured)[0][0]
    clip = m.Clip(first.model, 0, math.sqrt(measured.squares))
    assert [local.servers[0].answer(clip, [])[0] for _ in range(2)] == [m.Done(), m.Done(repeated=True)]
    for request in (pull, freeze):
        assert not isinstance(local.servers[0].answer(request, [])[0], m.Wait | m.Refused)
    early = local.servers[0].answer(m.Clip(first.model, 1, 1.0), [])[0]
    assert isinstance(early, m.Refused) and "not all workers have pushed it" in early.why


@pytest.mark.parametrize("norm", [math.inf, math.nan, 0.25])
def test_a_norm_outlives_a_server(norm: float) -> None:
    local, (worker,), _ = job(1, 1)
    worker.push(1.0, *gradients(0))
    local.servers[0].norm = (0, norm)
    kept = snapshots.copy(local.servers[0])
    record = snapshots.decode(snapshots.encode(kept.record))
    again = snapshots.server_of(snapshots.Snapshot(record, kept.tensors))
    assert repr(again.norm) == repr((0, norm)) and again.limit == LIMIT


@pytest.mark.parametrize("norm", [0.0, 0.3, 7.0, math.inf, math.nan])
def test_the_factor_is_that_of_torch(norm: float) -> None:
    gradient = nn.Parameter(torch.zeros(2))
    gradient.grad = torch.tensor([3.0, 4.0])
    nn.utils.clip_grads_with_norm_([gradient], 0.5, torch.tensor(norm))
    ours = torch.tensor([3.0, 4.0]) * factor(norm, LIMIT)
    torch.testing.assert_close(ours, gradient.grad, equal_nan=True)
    assert factor(norm, m.Limit(MOST, outside=False)) == factor(norm, None) == 1.0


def some(model: Net) -> Net:
    mw.on_server(model.table)
    return model


def test_workers_that_drift_clip_their_own_updates(together) -> None:
    """Two workers that take turns are one device that takes their batches in turn."""
    torch.manual_seed(0)
    plain = Net()
    start, own, given = copy.deepcopy(plain), sgd(plain.parameters()), batches(4)
    for batch in given:
        own.zero_grad()
        loss(plain, batch).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        own.step()
    turn = [threading.Event() for _ in range(len(given) + 1)]
    turn[0].set()

    def work(rank: int) -> dict[str, torch.Tensor]:
        step = mw.parameter_server(copy.deepcopy(start), sgd, loss=loss, clip_norm=CLIP, staleness=None)
        for number in range(rank, len(given), 2):
            assert turn[number].wait(30)
            step(given[number])
            assert step.grad_norm > CLIP
            turn[number + 1].set()
        assert turn[-1].wait(30)
        return step.full_state()

    for state in together(2, 2, work):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-6)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no number": (lambda: mw.parameter_server(Net(), sgd, loss=loss, clip_norm=0), "clip_norm=0"),
    "drifting workers": (
        lambda: mw.parameter_server(some(Net()), sgd, loss=loss, clip_norm=1.0, staleness=None),
        r"(?s)clip_norm=1\.0 with staleness=None, and parameters on no server.*try:   staleness=0",
    ),
    "another limit": (
        lambda: setattr(mw.parameter_server(Net(), sgd, loss=loss, clip_norm=1.0), "clip_norm", 0.5),
        r"(?s)step\.clip_norm = 0\.5 of a step.*started with",
    ),
    "in a step that does not clip": (
        lambda: mw.parameter_server(Net(), sgd, loss=loss).grad_norm,
        r"(?s)the norm of the gradients is not known.*clip_norm= was not given",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_clipped(case: str) -> None:
    wrong, what = REFUSED[case]
    with pytest.raises(ServerError, match=what):
        wrong()


def test_all_workers_clip_by_the_same_norm(together) -> None:
    norms = itertools.cycle([1.0, 2.0])
    lock = threading.Lock()

    def work(_: int) -> None:
        with lock:
            norm = next(norms)
        mw.parameter_server(Net(), sgd, loss=loss, clip_norm=norm)

    errors = [error for error in together(2, 1, work) if error is not None]
    assert any("is asked for" in str(error) and "clip_norm=" in str(error) for error in errors)


def test_shares_of_different_batches_raise_on_all_workers() -> None:
    local, workers, _ = job(1, 2, shares=True)
    before = local.servers[0].stored["weight"].tensor.clone()
    errors: list[Exception] = []

    def push(worker: Worker) -> None:
        try:
            worker.push(1.0, *gradients(0), batch=f'{{"the batch": "{worker.number}"}}')
        except BatchError as error:
            errors.append(error)

    threads = [threading.Thread(target=push, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 2
    assert torch.equal(local.servers[0].stored["weight"].tensor, before)
