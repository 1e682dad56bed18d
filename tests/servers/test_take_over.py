"""Servers of a lost machine go on elsewhere from their copies, and nothing is lost or counted twice."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from bench.machines import machines
from meshwright.errors import ServerError
from meshwright.scheduler.client import FILE
from meshwright.servers import messages as m
from meshwright.servers.by_scheduler import ByScheduler, heirs
from meshwright.servers.in_folder import InFolder
from meshwright.servers.journal import Journal
from meshwright.servers.local import Local
from meshwright.servers.moving import use_servers
from meshwright.servers.places import LATE_WORKERS
from meshwright.servers.server import Server
from meshwright.servers.serving import Serving
from meshwright.servers.shards import spread
from meshwright.servers.sockets import Remote
from meshwright.servers.worker import Worker
from tests.launch.conftest import Launches, eventually
from tests.scheduler.serving import serving
from tests.servers.jobs import full, parameters, values
from tests.servers.served import train, worker

SCRIPT, PORT = Path(__file__).with_name("taking_over.py"), 29485
KEY = {"MESHWRIGHT_SECRET": "the secret of a job that is tested", "OMP_NUM_THREADS": "1"}


@pytest.mark.procs
@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["killed", "unreachable", "continue"])
def test_a_job_goes_on_without_a_machine(launches: Launches, tmp_path: Path, how: str) -> None:
    """One server and one worker on each of two machines; the second machine is lost while both push. Ranks are
    started again, or go on."""
    with machines(2) as two:
        if how != "killed" and not two[1].port:
            pytest.skip("no network namespaces here")
        started = []
        for index, machine in enumerate(two):
            options = ("--nnodes", "1:2", "--node-id", f"n{index}", "--master", f"{two[0].address}:{PORT}")
            kept = ("--max-restarts", 1, "--servers", 1, "--replicas", 1, "--log-dir", f"logs{index}")
            kept = (*kept, "--on-failure", "continue" if how == "continue" else "restart")
            words = (*options, *kept, SCRIPT, tmp_path, "None" if how == "killed" else "0", how)
            started.append(launches.start(*words, env=KEY, prefix=machine.prefix))
        launches.wait_for("0.0", "1.0")
        steps = lambda rank: int((tmp_path / f"{rank}.0").read_text().split()[0])  # noqa: E731
        eventually(lambda: min(steps(0), steps(1)) > 20, "both have made some steps")
        if how == "killed":
            started[1].kill()
            out, err = started[0].communicate(timeout=200)
        else:
            with two[1].unreachable():
                out, err = started[0].communicate(timeout=200)
            started[1].kill()
        started[1].communicate()
    assert started[0].returncode == 0, out + err
    assert "each push counts once: True; none is lost: True" in out, out + err
    assert "node n1" in err and "is lost" in err


FOUR = {0: "a", 1: "b", 2: "c", 3: "d"}
RING = {0: 1, 1: 2, 2: 3, 3: 0}


@pytest.mark.parametrize(
    ("homes", "copies", "nodes", "found"),
    [
        (FOUR, RING, "bcd", {0: "c"}),  # not beside its copy (b), nor beside whose copy it has (d)
        (
            FOUR,
            RING,
            "cd",
            {0: "c", 1: "d"},
        ),  # of two at once, both may have lost their copies: as even as can be
        ({0: "a", 1: "b"}, {0: 1, 1: 0}, "a", {1: "a"}),  # there is one machine
        ({0: "a", 1: "a", 2: "b"}, {0: 2, 1: 2, 2: 0}, "bc", {0: "b", 1: "b"}),  # c has no servers
        ({0: "a"}, {}, "bc", {}),
        (FOUR, RING, "abcd", {}),
    ],
)
def test_which_machine_takes_over(homes, copies, nodes, found) -> None:
    assert heirs(homes, copies, tuple(nodes)) == found


def test_servers_of_a_machine_that_comes_again_come_home(tmp_path: Path) -> None:
    with serving() as (place, _):
        place.write(tmp_path / FILE)
        a, b, c = (ByScheduler(tmp_path) for _ in range(3))
        assert (a.begin(1, "a"), b.begin(2, "b"), c.begin(1, "c")) == (range(1), range(1, 3), range(3, 4))
        mine = lambda met: [n for n, here in met.runs(64).items() if here]  # noqa: E731
        assert [mine(met) for met in (a, b, c)] == [[0], [1, 2], [3]]
        for met in (a, c):  # both hear of the attempt
            met.take_over(["a", "c"])
        assert sorted(mine(a) + mine(c)) == [0, 1, 2, 3]
        assert b.runs(64) == {0: False, 1: False, 2: False, 3: False}
        assert [a.moved(n) for n in range(4)] == [False, True, True, False]
        a.want(5)  # one more, of which the place does not change when machines come
        again = ByScheduler(tmp_path)
        assert again.begin(2, "b") == range(1, 3)
        assert [mine(met) for met in (a, again, c)] == [[0], [1, 2, 4], [3]]
        assert again.moved(1)  # what it has on a disk may be old
        for met in (a, b, c, again):
            met.close()


def test_workers_of_before_are_not_waited_for(jobs) -> None:
    """All were started again, but for one that came late: nobody waits until connections to a lost machine close."""
    job = jobs(1)
    first = worker(job, 0, 1)
    late = Worker(first.transport.another(), LATE_WORKERS, first.declare)
    late.join()
    other = Worker(first.transport.another(), 1, first.declare)
    other.join()
    server = job.running[0].server
    assert set(server.clocks.of) == {0, 1, LATE_WORKERS}
    again = Worker(first.transport.another(), 0, _in(first.declare, 1))
    assert set(server.clocks.of) == {LATE_WORKERS}
    again.join()
    Worker(first.transport.another(), 1, _in(first.declare, 1))
    assert set(server.clocks.of) == {0, LATE_WORKERS}


def test_workers_of_a_lost_machine_are_not_waited_for(jobs, tmp_path: Path, monkeypatch) -> None:
    """A server that another machine starts has been told which they are, and waits a minute for the others."""
    with serving() as (place, _):
        place.write(tmp_path / FILE)
        met = ByScheduler(tmp_path)
        assert met.gone() == []
        met.begin(1, "a")
        met.take_over(["a"], [1])
        assert met.gone() == [1]
        met.take_over(["a"])
        assert met.gone() == []
        met.close()
        (tmp_path / FILE).unlink()
    monkeypatch.setattr(InFolder, "gone", lambda _: [1])
    job = jobs(1)
    first = worker(job, 0, 2)
    Worker(first.transport.another(), 1, first.declare).join()
    job.kill(0)
    eventually(lambda: set(job.running[0].server.clocks.of) == {0}, "the server goes on without worker 1")


def _in(declare: m.Declare, life: int) -> m.Declare:
    return m.Declare(declare.job, declare.parameters, declare.map, declare.bound, declare.workers, life=life)


def test_an_empty_folder_takes_what_the_copy_has(jobs, tmp_path: Path) -> None:
    """A machine in the place of a lost one: its folder has nothing, and from here on what the server has."""
    job = jobs(replicas=1)
    made = worker(job, 0, 1)
    train(made, 3)
    job.running[0].close()
    met = InFolder(job.folder)
    journal = Journal(tmp_path / "new", 0)
    assert journal.fresh and met.been(0)
    job.running[0] = Serving(Server(0, lost=True), met, journal, replicas=1)
    threading.Thread(target=job.running[0].run, daemon=True).start()
    train(made, 2)
    before = full(made)
    job.running[0].close()
    kept = Journal(tmp_path / "new", 0)
    found = kept.server()
    assert found.counts.applied == {0: 5}
    rows = found.stored["table"].tensors()["values"]
    assert any(torch.equal(rows[0], row) for row in before["table"])
    kept.close()


def test_servers_that_come_later_are_declared_when_they_are_used() -> None:
    """A machine that joins brings a server. Workers that count it declare the job's own map: else the server would be
    filled with the values of the beginning, and take no others."""
    given = parameters()
    servers = Local({n: Server(n) for n in range(2)}, 30)
    first = Worker(servers, 0, m.Declare("job", given, spread(given, range(1)), 0))
    first.fill(values)
    first.join()
    train(first, 3)
    again = Worker(servers, 0, m.Declare("job", given, spread(given, range(2)), 0))
    again.fill(values)
    again.join()
    before = {name: value.clone() for name, value in full(again).items()}
    assert use_servers(servers, again.declare, range(2)).servers == (0, 1)
    after = full(again)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert servers.servers[1].stored["table"].blocks


def test_a_server_that_has_no_address_yet_is_waited_for(tmp_path: Path) -> None:
    """Its process may take long to start on a busy machine; one that is lost is an error at once."""
    met = InFolder(tmp_path)
    met.begin(1, "")
    given = parameters()
    declare = m.Declare("job", given, spread(given, range(1)), 0)
    found: list[Worker] = []
    waiting = threading.Thread(target=lambda: found.append(Worker(Remote(met, away=0.1), 0, declare)))
    waiting.start()
    time.sleep(0.5)
    made = Serving(Server(0), InFolder(tmp_path))
    threading.Thread(target=made.run, daemon=True).start()
    waiting.join()
    made.close()
    assert found[0].missing
    met.lose(0, "it ended by SIGKILL")
    with pytest.raises(ServerError, match="parameter server 0 is lost"):
        Worker(Remote(met, away=0.1), 0, declare)
