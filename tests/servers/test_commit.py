"""A push counts on all servers or on none, whatever is killed in the middle of it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from meshwright.errors import ServerError
from meshwright.servers import messages as m
from meshwright.servers import serving
from meshwright.servers.moving import use_servers
from meshwright.servers.server import Server
from meshwright.servers.sockets import Remote
from meshwright.servers.worker import Worker
from tests.breadth import quick
from tests.launch.conftest import Launches, eventually
from tests.servers.jobs import ROWS, WIDTH, full, job, values
from tests.servers.served import Job, worker

SCRIPT = Path(__file__).with_name("going_on.py")
STAGES = ("begun", "prepared", "committed on the first", "committed")
COUNTS = {stage: stage.startswith("committed") for stage in STAGES}


class Killed(Exception):
    """In place of the end of a process."""


def killed(made: Worker, stage: str) -> None:
    """Let the worker push all rows of the table, and be killed when it has come to a stage."""
    transport = made.transport
    assert isinstance(transport, Remote)
    ask, number = transport.ask, STAGES.index(stage)
    sent = 0

    def until(requests, busy=0.0):
        nonlocal sent
        if number == 0 and isinstance(requests[1][0], m.Push):
            ask({1: requests[1]})  # the other one does not hear of it
        elif sent < number:
            answers = ask(requests, busy)
            sent += 1
            if sent < number or number == len(STAGES) - 1:
                return answers
        transport.close()
        raise Killed

    transport.ask = until
    with contextlib.suppress(Killed):
        made.push(1.0, {}, {"table": (torch.arange(ROWS), torch.ones(ROWS, WIDTH))})
    transport.close()


@pytest.mark.parametrize("bound", [None, 0])
@pytest.mark.parametrize(
    ("replicas", "kills"),
    [(0, ()), (0, (0,)), (0, (1,)), (0, (0, 1)), (1, (0,)), (1, (1,))],
    ids=["", "first", "second", "both", "first-copied", "second-copied"],
)
@pytest.mark.parametrize("stage", STAGES)
# The second server, and each bound.
@quick(lambda kills, bound, **_: kills != (0,) and (bound == 0) == (len(kills) == 1))
def test_a_push_of_a_killed_worker(jobs, monkeypatch, stage, replicas, kills, bound):
    monkeypatch.setattr(serving, "GONE_SECONDS", 0.1)
    monkeypatch.setattr(serving, "RESTART_SECONDS", 0.3)
    made: Job = jobs(replicas=replicas)
    first = worker(made, 0, 1, "SGD", bound)
    lost = worker(made, 1, 1, "SGD", bound)
    killed(lost, stage)
    for number in kills:
        made.kill(number)
    full(first)  # it is there again, unlike the other one
    eventually(lambda: not any(1 in each.server.clocks.of for each in made.running), "it has left")
    pushed = [each.server.pushed.get(1, 0) for each in made.running]
    assert pushed == [int(COUNTS[stage])] * 2
    assert not any(each.server.prepared for each in made.running)
    first.push(1.0, {}, {})  # in step, what the other one has pushed counts now
    rows = full(first)["table"]
    expected = values("table", range(ROWS)) - 0.1 * COUNTS[stage] * (0.5 if bound == 0 else 1.0)
    torch.testing.assert_close(rows, expected)
    first.leave()


def test_a_push_that_counts_is_kept_until_it_is_allowed(jobs, monkeypatch):
    """Who moves blocks has asked all servers to hold before its worker was lost."""
    monkeypatch.setattr(serving, "GONE_SECONDS", 0.1)
    made: Job = jobs()
    first = worker(made, 0, 1, "SGD", None)
    lost = worker(made, 1, 1, "SGD", None)
    killed(lost, "committed on the first")
    first.ask_all({n: (m.Hold(first.model, "mover"), []) for n in (0, 1)}, m.Held)
    time.sleep(0.5)
    use_servers(first.transport.another(), first.declare, (0, 1), "mover")
    assert [each.server.pushed.get(1, 0) for each in made.running] == [1, 1]
    torch.testing.assert_close(full(first)["table"], values("table", range(ROWS)) - 0.1)


def test_a_worker_that_comes_again_pushes_again(jobs, monkeypatch):
    """Before anybody has noticed that it was killed."""
    monkeypatch.setattr(serving, "GONE_SECONDS", 30.0)
    made: Job = jobs()
    for stage in STAGES:
        killed(worker(made, 0, 1, "SGD", None), stage)
    last = worker(made, 0, 1, "SGD", None)
    assert last.clock == 2
    assert [each.server.pushed for each in made.running] == [{0: 2}, {0: 2}]
    torch.testing.assert_close(full(last)["table"], values("table", range(ROWS)) - 0.2)


@pytest.mark.procs
@pytest.mark.full
@pytest.mark.timeout(300)
def test_random_kills_of_workers_and_servers(launches: Launches, tmp_path: Path) -> None:
    """Each sample is trained as often as without them."""
    words = ("--servers", 3, "--workers", 3, "--server-state", "state", "--on-failure", "continue")
    process = launches.start(*words, "--max-restarts", 50, SCRIPT, "counted", "slowly")
    chance, killed = random.Random(), 0

    def all_there() -> bool:
        """Whether each worker has made a step in its process of now, or all are done."""
        return (tmp_path / "done").exists() or len(alive(tmp_path.glob("worker*"))) == 3

    while killed < 5:
        eventually(all_there, "all workers make steps")
        if (tmp_path / "done").exists():
            break
        servers = Path((tmp_path / "servers").read_text())
        pids = alive(servers.glob("*.pid") if chance.random() < 0.5 else tmp_path.glob("worker*"))
        time.sleep(chance.random() / 2)
        for pid in chance.sample(pids, min(1, len(pids))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
    out, errors = process.communicate(timeout=200)
    assert process.returncode == 0, out + errors
    assert killed > 2 and "each sample was trained 25 times: True" in out


def alive(files: Iterable[Path]) -> list[int]:
    """Processes whose numbers are in files."""
    return [int(said) for path in files if Path(f"/proc/{(said := path.read_text()) or 0}").exists()]


def test_what_was_given_up_is_not_committed() -> None:
    servers, (made,) = job(2, None)
    push = m.Push(made.model, 1, 0, 0, 1.0, prepare=True)
    for number in (0, 1):
        assert servers.ask({number: (push, [])})[number][0] == m.Done()
    servers.ask({0: (m.Leave(made.model, 0), [])})
    refused = servers.ask({0: (m.Commit(made.model, 1, 0, 0), [])})[0][0]
    assert isinstance(refused, m.Refused) and "worker 0 is no worker" in refused.what
    made.join()
    for number in (0, 1):
        refused = servers.ask({number: (m.Commit(made.model, 1, 0, 0), [])})[number][0]
        assert isinstance(refused, m.Refused) and "is not prepared" in refused.what
    made.push(1.0, {}, {})
    with pytest.raises(ServerError, match="pushes step 3"):
        made.ask_all({0: (m.Push(made.model, 1, 0, 3, 1.0), [])}, m.Done)


def test_blocks_move_while_a_worker_pushes() -> None:
    """Workers push by the map before, or split their push again."""
    servers, made = job(2, None, 2)
    servers.servers = {**servers.servers, 2: Server(2), 3: Server(3)}
    steps = 200

    def train(each: Worker) -> None:
        for _ in range(steps):
            each.push(1.0, {}, {"table": (torch.arange(ROWS), torch.ones(ROWS, WIDTH))})

    threads = [threading.Thread(target=train, args=(each,)) for each in made]
    for thread in threads:
        thread.start()
    for count in (4, 1, 3, 2):
        use_servers(servers, made[0].declare, range(count))
    for thread in threads:
        thread.join()
    rows = full(made[0])["table"]
    torch.testing.assert_close(rows, values("table", range(ROWS)) - 0.5 * 2 * steps)
    assert {s: server.pushed for s, server in servers.servers.items() if s in made[0].map.servers} == {
        0: {0: steps, 1: steps},
        1: {0: steps, 1: steps},
    }
