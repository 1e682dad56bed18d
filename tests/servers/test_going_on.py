"""`meshwright run --resume-state`: all of a job is killed at once, and another launcher goes on from its servers."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch

from meshwright.errors import LaunchError, ServerError
from meshwright.launch import server_state
from meshwright.launch.servers import ATTEMPT, STATE, attempt_begins, check_joins
from meshwright.scheduler.client import FILE
from meshwright.servers import messages as m
from meshwright.servers.journal import Journal
from meshwright.servers.of_job import check_goes_on, life
from meshwright.servers.places import FOLDER, LATE_WORKERS, LAUNCHES
from meshwright.servers.same_job import LAUNCH
from meshwright.servers.server import Server
from meshwright.servers.shards import fingerprint, spread
from meshwright.servers.torn import pushed
from meshwright.servers.worker import Worker
from tests.launch.conftest import Launches, eventually
from tests.scheduler.serving import serving
from tests.servers import jobs

SCRIPT = Path(__file__).with_name("going_on.py")
SAYS = {
    "counted": "each sample was trained 2 times: True",
    "steps": "equal to one device",
    "clip": "equal to one device",
}


@pytest.mark.full
@pytest.mark.procs
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "how",
    ["counted", pytest.param("steps", marks=pytest.mark.full), pytest.param("clip", marks=pytest.mark.full)],
)
def test_a_job_goes_on_after_its_launcher_was_killed(launches: Launches, tmp_path: Path, how: str) -> None:
    words = ("--servers", 2, "--workers", 2, "--server-state", "state")
    for launch in range(3):
        process = launches.start(*words, *(["--resume-state"] if launch else []), SCRIPT, how)
        if launch == 2:
            break
        eventually((tmp_path / "begun").exists, "steps are made")
        time.sleep(random.random() / 2)
        process.kill()
        process.communicate()
        launches.wait_until_gone()
        (tmp_path / "begun").unlink()
    out, errors = process.communicate(timeout=200)
    assert process.returncode == 0, out + errors
    assert SAYS[how] in out


class Written:
    """Servers that write their journals below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journals = [Journal(folder / str(number), number) for number in (0, 1)]
        self.servers = [Server(0), Server(1)]

    def ask(self, number: int, request: m.Request, tensors: m.Tensors) -> None:
        reply, _ = self.servers[number].answer(request, tensors)
        assert not isinstance(reply, m.Refused | m.Wait | m.Moved), reply
        self.journals[number].write(self.servers[number], request, tensors)

    def gone_on(self) -> list[Server]:
        """The servers that another launcher begins with."""
        known = pushed(self.folder)
        self.close()
        self.journals = [Journal(self.folder / str(number), number) for number in (0, 1)]
        self.servers = [journal.server(known) for journal in self.journals]
        return self.servers

    def close(self) -> None:
        for journal in self.journals:
            journal.close()


def test_a_push_counts_on_all_servers_if_it_does_on_the_first(tmp_path: Path) -> None:
    """And it does so when a server is killed later; one that nobody has committed is made again."""
    written, given = Written(tmp_path), jobs.parameters()
    declare = m.Declare("job", given, spread(given, (0, 1)), None, 2)
    model = fingerprint("job", given)
    (owner,) = declare.map.owners["weight"]
    for number in (0, 1):
        written.ask(number, declare, [])
        for name, blocks in written.servers[number].missing().items():
            parameter = next(p for p in given if p.name == name)
            written.ask(
                number, m.Fill(model, name, blocks), [jobs.values(name, parameter.rows_of(b)) for b in blocks]
            )
        for worker in (0, 1):
            written.ask(number, m.Join(model, worker, 0), [])

    def push(worker: int, clock: int, committed: tuple[int, ...]) -> None:
        for number in (0, 1):
            names = ("weight",) if number == owner else ()
            body = m.Push(model, 1, worker, clock, 1.0, names, prepare=True)
            written.ask(number, body, [torch.ones(3, jobs.WIDTH)] * len(names))
        for number in committed:
            written.ask(number, m.Commit(model, 1, worker, clock), [])

    push(0, 0, (0, 1))
    push(1, 0, (0, 1))
    push(0, 1, (0,))
    push(1, 1, ())
    lr, begin = jobs.SGD["lr"], jobs.values("weight", range(1))
    for _ in range(2):
        servers = written.gone_on()
        assert [dict(server.clocks.of) for server in servers] == [{0: 2, 1: 1}] * 2
        torch.testing.assert_close(servers[owner].stored["weight"].tensor.detach(), begin - 3 * lr)
    push(1, 1, (0, 1))
    written.close()
    again = Journal(tmp_path / str(owner), owner).server()
    torch.testing.assert_close(again.stored["weight"].tensor.detach(), begin - 4 * lr)
    assert dict(again.clocks.of) == {0: 2, 1: 2}


def test_workers_that_do_not_come_again_are_not_waited_for() -> None:
    """The others do what they had not pushed."""
    servers, made = jobs.job(count=1, workers=3)
    server, gone = servers.servers[0], made[0].declare
    made[0].push(1.0, {})
    late = Worker(servers, LATE_WORKERS, gone)
    late.join()
    declare = m.Declare(gone.job, gone.parameters, gone.map, gone.bound, 2, life=LAUNCH)
    again = [Worker(servers, number, declare) for number in (0, 1)]
    assert dict(server.clocks.of) == {0: 1, 1: 0} and not server.clocks.expected
    assert [worker.join() for worker in again] == [1, 0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: None, "has the values of another job, .*the same command with --resume-state"),
        (lambda state: (state / "1" / "0.log").unlink(), "lacks server 1 of 2"),
        (lambda state: (state / "job.json").unlink(), "has nothing to go on from"),
        (
            lambda state: (state / "job.json").write_text('{"job":"a","servers":2,"boot":"other"}'),
            "was started again since",
        ),
    ],
    ids=["in use", "a server lost", "unknown", "machine started again"],
)
def test_a_folder_that_a_job_cannot_have(tmp_path: Path, change, says: str) -> None:
    server_state.claim(tmp_path, "a", 2, alone=True)
    server_state.claim(tmp_path, "b", 2, alone=True)  # the other one has written nothing
    server_state.claim(tmp_path, "a", 2, alone=True)
    for number in "01":
        (tmp_path / number).mkdir()
        (tmp_path / number / "0.log").touch()
    assert server_state.go_on(tmp_path).launches == 1
    change(tmp_path)
    with pytest.raises(LaunchError, match=f"(?s){says}"):
        (server_state.go_on if "another" not in says else claimed_by_b)(tmp_path)


def claimed_by_b(state: Path) -> None:
    server_state.claim(state, "b", 2, alone=True)


def test_a_folder_has_one_launcher(tmp_path: Path) -> None:
    with server_state.locked(tmp_path):
        with pytest.raises(LaunchError, match="belongs to a job that runs"), server_state.locked(tmp_path):
            pass
    with server_state.locked(tmp_path):
        pass


def test_what_servers_alone_cannot_go_on_with(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    check_goes_on(["layer.weight"], shares=True)
    assert life() == 0
    (tmp_path / LAUNCHES).write_text("2")
    assert life() == 2 * LAUNCH
    check_goes_on([], shares=False)
    for rest, shares, says in ((["layer.weight"], False, "layer.weight"), ([], True, "its share")):
        with pytest.raises(ServerError, match=f"(?s)cannot go on.*{says}.*step.resume"):
            check_goes_on(rest, shares)


def test_over_machines_a_folder_of_another_job_is_refused_before_ranks_start(
    tmp_path: Path, monkeypatch
) -> None:
    """Where the job runs already, before this machine joins; else with the first attempt, on all machines."""
    state = tmp_path / "kept"
    (state / "0").mkdir(parents=True)
    (state / "0" / "0.log").touch()
    (tmp_path / STATE).write_text(str(state))
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with serving() as (place, _):
        place.write(tmp_path / FILE)
        check_joins()
        with pytest.raises(LaunchError, match=r"(?s)has the values of another job.*no later job can"):
            attempt_begins(1, ["node0", "node1"])
        with pytest.raises(LaunchError, match="has the values of another job"):
            check_joins()
        (state / "0" / "0.log").unlink()
        attempt_begins(1, ["node0", "node1"])
        (state / "0" / "0.log").touch()
        check_joins()  # it is its own
        attempt_begins(2, ["node0"])
        assert (tmp_path / ATTEMPT).read_text().splitlines() == ["2", "node0"]
