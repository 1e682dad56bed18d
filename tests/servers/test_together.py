"""Workers that are all started again with one that fails: what some have pushed of a step counts for none."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from msgspec import structs

from meshwright.errors import ServerError
from meshwright.launch.servers import check_joins
from meshwright.servers import messages as m
from meshwright.servers import serving
from meshwright.servers.dealing import Stream, deal
from meshwright.servers.dealt import dealt
from meshwright.servers.in_folder import InFolder
from meshwright.servers.local import Local
from meshwright.servers.of_job import check_begins, goes_on
from meshwright.servers.server import Server
from meshwright.servers.serving import Serving
from meshwright.servers.shards import spread
from meshwright.servers.sockets import Remote
from meshwright.servers.worker import Worker
from tests.servers import jobs
from tests.servers.jobs import ROWS, full


def begin(servers: Local, life: int = 0, workers: int = 2) -> list[Worker]:
    return jobs.job(workers=workers, servers=servers, life=life, together=True)[1]


def push(worker: Worker) -> None:
    """A gradient of the worker's own."""
    number = float(worker.number + worker.clock)
    worker.push(
        1.0, {"weight": torch.full((3, 4), number)}, {"table": (torch.arange(ROWS), torch.ones(ROWS, 4))}
    )


def trained(steps: int, workers: int = 2) -> dict[str, torch.Tensor]:
    made = begin(Local({n: Server(n) for n in range(2)}), workers=workers)
    for _ in range(steps):
        for worker in made:
            push(worker)
    return full(made[0])


@pytest.mark.parametrize("workers", [2, 1])
def test_a_step_that_one_has_not_pushed_is_done_again_by_all(workers: int) -> None:
    """The second life may have fewer workers."""
    servers = Local({n: Server(n) for n in range(2)})
    first = begin(servers)
    for worker in (*first, first[0]):
        push(worker)
    assert [worker.clock for worker in first] == [2, 1]
    again = begin(servers, life=1, workers=workers)
    assert [worker.clock for worker in again] == [1] * workers
    assert torch.equal(full(again[0])["table"], trained(1)["table"])
    for worker in again:
        push(worker)
    if workers == 2:
        assert all(
            torch.equal(mine, other)
            for mine, other in zip(full(again[0]).values(), trained(2).values(), strict=True)
        )


def test_a_worker_that_was_asked_to_end_does_its_step_again_too() -> None:
    servers = Local({n: Server(n) for n in range(2)})
    first = begin(servers)
    for worker in (*first, first[0]):
        push(worker)
    first[0].leave()
    again = begin(servers, life=1)
    assert [worker.clock for worker in again] == [1, 1]
    for worker in again:
        push(worker)
    assert torch.equal(full(again[0])["table"], trained(2)["table"])


def test_a_lost_worker_is_waited_for_if_all_are_started_again() -> None:
    servers = Local({n: Server(n) for n in range(2)})
    made = begin(servers)
    push(made[0])
    server = servers.servers[0]
    assert server.answer(m.Leave(made[0].model, 1, lost=True), [])[0] == m.Left(0)
    assert set(server.clocks.of) == {0, 1} and server.rounds
    server.answer(m.Leave(made[0].model, 1), [])  # this one has said so itself
    assert set(server.clocks.of) == {0} and not server.rounds


def test_samples_of_a_step_that_is_done_again_are_dealt_again() -> None:
    stream = Stream()
    assert stream.deal(0, 1, -1, 4, 10, 10) == (0, 4)
    stream.pushed(0, 7)
    stream.taken_back(0, 7)
    stream.taken_back(0, 7)
    assert stream.done == 0 and stream.deal(1, 1, -1, 4, 10, 10) == (0, 4)


def test_a_job_deals_the_samples_of_one_data_set() -> None:
    streams: dict[str, Stream] = {}
    assert deal(streams, "10 samples", 0, 1, -1, 10, 10, 10) == (0, 10)
    with pytest.raises(ServerError, match="of 9 samples"):
        deal(streams, "9 samples", 1, 1, -1, 9, 9, 9)
    streams["10 samples"].pushed(0, 0)
    assert deal(streams, "9 samples", 1, 1, -1, 9, 9, 9) == (0, 9)
    with pytest.raises(ServerError, match="0 of 9 samples"):
        deal(streams, "9 samples", 1, 1, -1, 0, 9, 9)


def test_samples_count_the_epochs_of_the_job() -> None:
    (worker,) = begin(Local({n: Server(n) for n in range(2)}), workers=1)

    def epoch(epochs: int) -> int:
        found = 0
        for indices in dealt(worker, 10, 4, epochs, 0):
            push(worker)
            found += len(indices)
        return found

    assert [epoch(1), epoch(2)] == [10, 10]
    list(worker.deal("10 samples, seed 0", 10, 10, 40))  # another worker has had all of the next two
    push(worker)
    list(worker.deal("10 samples, seed 0", 10, 10, 40))
    push(worker)
    assert [epoch(3), epoch(4)] == [0, 0]
    with pytest.raises(ServerError, match="has no more samples"):
        epoch(4)


def test_a_script_that_begins_anew_asks_where_training_stands(capsys: pytest.CaptureFixture[str]) -> None:
    servers = Local({n: Server(n) for n in range(2)})
    (worker,) = begin(servers, workers=1)
    assert goes_on(worker, worker.declare) == 0
    push(worker)
    (again,) = begin(servers, life=1, workers=1)
    changed = tuple(structs.replace(p, options={"lr": 0.1}) for p in worker.declare.parameters)
    step = goes_on(again, structs.replace(again.declare, parameters=changed))
    assert (
        step == 1
        and "training goes on at step 1" in (said := capsys.readouterr().err)
        and "lr=0.5, not 0.1" in said
    )
    with pytest.raises(ServerError, match="training goes on at step 1, and the script begins"):
        check_begins(step)
    check_begins(0)


def test_a_job_without_servers_starts_in_any_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MESHWRIGHT_SERVERS", raising=False)
    (tmp_path / "state").mkdir()
    check_joins()


def test_a_server_waits_for_workers_that_are_started_again_together(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "GONE_SECONDS", 0.05)
    meeting = InFolder(tmp_path)
    meeting.begin(1, "")
    held = jobs.parameters()
    for together, left in ((True, []), (False, [0])):
        server = Serving(Server(0), meeting)
        threading.Thread(target=server.run, daemon=True).start()
        declare = m.Declare("job", held, spread(held, range(1)), 0, together=together)
        worker = Worker(Remote(meeting), 0, declare)
        worker.fill(jobs.values)
        worker.join()
        worker.transport.close()
        time.sleep(0.5)
        assert list(server.server.clocks.left) == left
        server.close()
