"""Servers with a copy on another one and nothing on a disk: killed ones go on, and each push is applied once."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from meshwright.errors import ServerError
from meshwright.servers import messages as m
from meshwright.servers import snapshots
from meshwright.servers.in_folder import InFolder
from meshwright.servers.places import beside
from meshwright.servers.server import Server
from meshwright.servers.sockets import receive, send
from tests.breadth import quick
from tests.servers.jobs import full
from tests.servers.served import LIMITS, Job, plain, train, worker

STEPS, KILLS = 200, 20


def is_copied(job: Job, number: int) -> bool:
    """Whether another server has all of this one."""
    return job.running[1 - number].copies.has(number)


def until(found, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end
        time.sleep(0.001)


@LIMITS
@quick(lambda limit: limit is not None)  # without, in test_sockets.py
def test_killed_servers_go_on_from_their_copies(jobs, limit):
    """Twenty kills at any moment while two workers train: to the bit what it is without them."""
    job, chance, done = jobs(replicas=1), random.Random(0), 0
    first = worker(job, 0, 2, limit=limit)
    threads = [
        threading.Thread(target=lambda: train(worker(job, 1, 2, limit=limit), STEPS)),
        threading.Thread(target=lambda: train(first, STEPS)),
    ]
    for thread in threads:
        thread.start()
    while done < KILLS:
        until(lambda: is_copied(job, 0) and is_copied(job, 1))
        at = first.clock + chance.choice((0, 1, 3))
        until(lambda: first.clock >= min(at, STEPS))  # noqa: B023
        time.sleep(chance.random() * 0.01)
        job.kill(chance.randrange(2))
        done += 1
    for thread in threads:
        thread.join()
    found = full(first)
    until(lambda: is_copied(job, 0) and is_copied(job, 1))
    assert [r.server.counts.applied for r in job.running] == [{0: STEPS, 1: STEPS}] * 2
    assert all(torch.equal(found[name], value) for name, value in plain(STEPS, limit).items())


def test_a_server_that_was_started_elsewhere_is_heard_no_more(jobs):
    job = jobs(replicas=1)
    made = worker(job, 0, 1)
    train(made, 2)
    until(lambda: is_copied(job, 0))
    old = job.running[0]
    with InFolder(job.folder).call(1) as again:  # another process says that it is server 0
        send(again, m.Recover(0), [])
        known, tensors = receive(again)
        assert isinstance(known, m.Recovered)
        record = snapshots.decode(known.record)
        assert record.clocks == {0: 2}
        kept = snapshots.server_of(snapshots.Snapshot(record, dict(zip(known.names, tensors, strict=True))))
        push = m.Push(made.model, 1, 0, 2, 1.0)
        assert kept.answer(push, [])[0] == m.Done()
        made.transport.away = 1.0  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(ServerError, match="parameter server 0 does not answer"):
            made.push(1.0, {})
        assert old.failure is None
        send(again, push, [])
        assert receive(again)[0] == m.Done()


def test_values_that_are_lost_are_not_begun_anew():
    """A server without its values would otherwise be filled by seed, beside others that have trained."""
    _, made = Server(0), Server(0, lost=True)
    declare = m.Declare("job", (), snapshots.Server(0).map, 0)
    refused, _ = made.answer(declare, [])
    assert isinstance(refused, m.Refused)
    assert refused.what == "the values of parameter server 0 are lost"
    (pulled, _) = made.answer(
        m.Pull("a model of before", 0, 0, 3, (), ()), []
    )  # of a worker that trains already
    assert isinstance(pulled, m.Refused) and pulled.what == refused.what
    again, _ = made.answer(m.Declare("job", (), snapshots.Server(0).map, 0, attempt=1), [])
    assert isinstance(again, m.Declared)


def test_copies_of_servers_that_come_later_are_spread() -> None:
    assert [beside([3], number) for number in range(9)] == [1, 2, 0, 1, 2, 0, 1, 2, 0]
    assert [beside([2, 2], number) for number in range(8)] == [2, 3, 0, 1, 2, 0, 3, 1]
