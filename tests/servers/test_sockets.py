"""Servers at sockets, in threads of the test: killed ones go on, lost workers are not waited for, junk is dropped."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import socket
import tempfile
import threading
import time
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.cli.ps import tables
from meshwright.errors import MeshwrightError, ServerError
from meshwright.scheduler.client import FILE
from meshwright.servers import messages as m
from meshwright.servers import serving, snapshots
from meshwright.servers.counts import Counts
from meshwright.servers.in_folder import InFolder, running
from meshwright.servers.places import LAUNCHER, PREFIX
from meshwright.servers.server import Server
from meshwright.servers.shards import Parameter, spread
from meshwright.servers.sockets import Remote, receive, send
from tests.breadth import quick
from tests.servers.jobs import ROWS, WIDTH, full
from tests.servers.jobs import job as local_job
from tests.servers.served import LIMITS, plain, train, worker


@LIMITS
@quick(lambda limit: limit is None)  # clipped, in test_replicas.py
def test_killed_servers_go_on_with_the_same_values(jobs, tmp_path, limit):
    """Twenty random kills while two workers train: to the bit what it is without them, each push applied once."""
    job, steps = jobs(every=4000), 40
    kills = random.Random(0).sample([(step, n) for step in range(steps) for n in (0, 1)], 20)
    first, second = worker(job, 0, 2, limit=limit), None

    def kill(step: int) -> None:
        for number in (n for at, n in kills if at == step):
            job.kill(number)

    other = threading.Thread(target=lambda: train(worker(job, 1, 2, limit=limit), steps))
    other.start()
    train(first, steps, kill)
    other.join()
    found = full(first)
    assert [r.server.counts.applied for r in job.running] == [{0: steps, 1: steps}] * 2
    assert list(tmp_path.glob("state/*/*.safetensors")), "no snapshot was made"
    second = Server(0)
    assert second.answer(m.Join("", 0, 0), [])[0] == m.Refused(
        "this server has no model yet", "", "declare it first"
    )
    assert all(torch.equal(found[name], value) for name, value in plain(steps, limit).items())


def test_no_server_has_a_part_of_a_push_while_another_one_is_away(jobs, monkeypatch):
    job = jobs(2)
    made = worker(job, 0, 1)
    pulled = made.pull(("weight",))
    meeting, tries, heard = made.transport.meeting, [], []
    call = meeting.call

    def away(number: int) -> Any:
        tries.append(number)
        if tries.count(0) == 3 and not heard:
            heard.append(dict(job.running[1].server.clocks.of))
            job.running[0] = job.started(0)
        return call(number)

    monkeypatch.setattr(meeting, "call", away)
    job.running[0].close()
    made.push(1.0, {"weight": pulled["weight"]})
    assert heard == [{0: 0}]
    assert [dict(each.server.clocks.of) for each in job.running] == [{0: 1}, {0: 1}]


def test_what_was_half_written_is_dropped(jobs, tmp_path):
    job = jobs(1)
    made = worker(job, 0, 1)
    train(made, 3)
    before = full(made)
    log = tmp_path / "state" / "0" / "0.log"
    log.write_bytes(log.read_bytes() + log.read_bytes()[:100])
    job.kill(0)
    assert all(torch.equal(a, b) for a, b in zip(full(made).values(), before.values(), strict=True))
    train(made, 1)
    job.kill(0)
    assert job.running[0].server.counts.applied == {0: 4}


@pytest.mark.parametrize(("name", "sparse"), [("SparseAdam", True), ("Adagrad", False), ("SGD", False)])
def test_a_snapshot_is_all_of_a_server(tmp_path, name, sparse):
    table = Parameter("table", (ROWS, WIDTH), "float32", name, {"lr": 0.1}, True, sparse)
    first = local_job(1, workers=2, given=(table,))
    path = tmp_path / "0.safetensors"
    for round in range(4):
        for made in first[1][: 2 if round < 3 else 1]:  # the last round waits for a push
            ids = torch.arange(round, round + 3)
            made.push(1.0, {}, {"table": (ids, torch.ones(3, WIDTH))})
    snapshots.write(snapshots.copy(first[0].servers[0]), path)
    again = snapshots.read(path, 0)
    last = m.Push(first[1][1].model, 1, 1, 3, 1.0, (), ("table",))
    tensors = [torch.tensor([7]), torch.ones(1, WIDTH)]
    servers = first[0].servers[0], again
    assert [server.answer(last, tensors)[0] for server in servers] == [m.Done()] * 2
    one, other = (server.stored["table"].tensors() for server in servers)
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[key]) for key, value in one.items())
    assert servers[0].counts == servers[1].counts


def test_a_snapshot_of_parameters_whose_names_have_slashes() -> None:
    """As in ``nn.ParameterDict({"user/id": …, "user": …})``; the state of one is none of the other's."""
    given = tuple(Parameter(name, (3,), "float32", "Adam", {"lr": 0.1}) for name in ("p.user/id", "p.user"))
    first, (made,) = local_job(1, given=given, values=lambda *_: torch.ones(3))
    server, gradients = first.servers[0], {"p.user/id": torch.ones(3), "p.user": -torch.ones(3)}
    for _ in range(2):  # a snapshot of what a snapshot gave
        made.push(1.0, gradients)
        again = snapshots.server_of(snapshots.copy(server))
        for name in gradients:
            one, other = (each.stored[name].tensors() for each in (server, again))
            assert one.keys() == other.keys() == {"values", "step", "exp_avg", "exp_avg_sq"}
            assert all(torch.equal(value, other[key]) for key, value in one.items())
        first.servers[0] = server = again


def test_snapshots_of_others_are_refused(jobs, tmp_path):
    job = jobs(1)
    train(worker(job, 0, 1), 1)
    path = tmp_path / "0.safetensors"
    snapshots.write(snapshots.copy(job.running[0].server), path)
    assert snapshots.read(path, 0).clocks.of == {0: 1}
    with pytest.raises(ServerError, match="is of server 0"):
        snapshots.read(path, 1)
    path.write_bytes(b"junk")
    with pytest.raises(ServerError, match="is no snapshot"):
        snapshots.read(path, 0)


def test_a_lost_worker_is_not_waited_for(jobs, monkeypatch):
    monkeypatch.setattr(serving, "GONE_SECONDS", 0.2)
    job = jobs(2)
    first = worker(job, 0, 2)
    thread = threading.Thread(target=lambda: train(worker(job, 1, 2), 2))  # and then its connections close
    thread.start()
    train(first, 6)
    thread.join()
    assert [r.server.counts.applied for r in job.running] == [{0: 6, 1: 2}] * 2


def test_bytes_that_are_no_message_end_the_connection_alone(jobs, tmp_path):
    job = jobs(1)
    made = worker(job, 0, 1)
    before = full(made)
    for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\4junk", b"\xff\xff\xff\xff", b"\0\0\0\1\x80"):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(InFolder(tmp_path).place(0))
            stranger.sendall(junk)
            stranger.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(InFolder(tmp_path).place(0))
        send(stranger, m.Push("0abc", 1, 0, 0, 1.0), [])
        answer, _ = receive(stranger)
        assert isinstance(answer, m.Refused)
    assert all(torch.equal(a, b) for a, b in zip(full(made).values(), before.values(), strict=True))


def test_a_server_that_stays_away_is_named(jobs, tmp_path):
    made = worker(jobs(1), 0, 1)
    job_of_nobody = Remote(InFolder(tmp_path / "elsewhere"), away=0.1)
    with pytest.raises(ServerError, match="parameter server 0 does not answer"):
        job_of_nobody.ask({0: (m.Leave(made.model, 0), [])})
    (tmp_path / "elsewhere").mkdir()
    InFolder(tmp_path / "elsewhere").lose(0, "it ended by SIGKILL")
    began = time.monotonic()
    with pytest.raises(ServerError, match="parameter server 0 is lost"):
        Remote(InFolder(tmp_path / "elsewhere"), away=60).ask({0: (m.Leave(made.model, 0), [])})
    assert time.monotonic() - began < 60


def test_the_status_of_servers(jobs, tmp_path, monkeypatch):
    job = jobs(2)
    InFolder(tmp_path).begin(2, "")
    InFolder(tmp_path).want(3)
    (tmp_path / LAUNCHER).write_text(str(os.getpid()))
    made = worker(job, 0, 1, "SGD")
    train(made, 3)
    told = CliRunner().invoke(app, ["ps", "status", str(tmp_path), "--json"])
    assert told.exit_code == 1
    first, second, silent = json.loads(told.stdout).values()
    assert silent == "parameter server 2 does not answer"
    assert first["clocks"] == second["clocks"] == {"0": 3}
    assert first["counts"]["updates"] == 3
    assert first["blocks"] + second["blocks"] == 50 + 1
    assert first["counts"]["pulled_bytes"] + second["counts"]["pulled_bytes"] == 3 * (3 + 5) * WIDTH * 4
    known = made.prefetch(made.transport, {"table": torch.arange(4)})
    made.pull((), {"table": torch.arange(4)}, known)
    shown = CliRunner().invoke(app, ["ps", "status", str(tmp_path)])
    assert "100 % of 4 prefetched rows had not changed" in shown.stdout
    assert "staleness 0" in shown.stdout
    assert "2   does not answer" in shown.stdout
    with socket.socket(socket.AF_UNIX) as hangs:  # it is connected, and says nothing
        hangs.bind(str(tmp_path / "2.sock"))
        hangs.listen()
        monkeypatch.setattr("meshwright.cli.ps.ANSWER_SECONDS", 0.2)
        shown = CliRunner().invoke(app, ["ps", "status", str(tmp_path)])
    assert shown.exit_code == 1 and "2   does not answer" in shown.stdout
    InFolder(tmp_path).want(2)
    assert CliRunner().invoke(app, ["ps", "status", str(tmp_path)]).exit_code == 0


def test_a_move_is_not_begun_while_a_server_hangs(jobs, tmp_path, monkeypatch):
    job = jobs(1)
    made = worker(job, 0, 1, "SGD")
    (tmp_path / LAUNCHER).write_text(str(os.getpid()))
    monkeypatch.setattr("meshwright.cli.ps.ANSWER_SECONDS", 0.1)
    monkeypatch.setattr("meshwright.cli.ps.BEGIN_SECONDS", 0.5)
    job.running[0].close()
    with socket.socket(socket.AF_UNIX) as hangs:
        (tmp_path / "0.sock").unlink(missing_ok=True)
        hangs.bind(str(tmp_path / "0.sock"))
        hangs.listen()
        with pytest.raises(ServerError, match="parameter server 0 does not answer"):
            CliRunner().invoke(app, ["ps", "spread", "1", str(tmp_path)], catch_exceptions=False)
    assert made.map.servers == (0,)


@pytest.mark.parametrize(
    "words", [("ps", "status"), ("ps", "spread", "2"), ("run", "--add-to", "newest", "x.py")]
)
def test_the_job_is_named_where_none_or_several_run(words, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "x.py").touch()
    monkeypatch.chdir(tmp_path)

    def ask(*more):
        return CliRunner().invoke(app, [*words, *more], catch_exceptions=False)

    with pytest.raises(MeshwrightError, match="no job with parameter servers runs here"):
        ask()
    folders = [tmp_path / f"{PREFIX}{name}" for name in "ab"]
    for folder in folders:
        folder.mkdir()
        (folder / LAUNCHER).write_text(str(os.getpid()))
    with pytest.raises(
        MeshwrightError, match=r"(?s)2 jobs with parameter servers run here: .*servers-b.*try:"
    ):
        ask()
    for folder in folders:  # launchers of one job
        (folder / FILE).write_text("{}")
    assert len(running()) == 1


@pytest.mark.parametrize("words", [("status",), ("spread", "2")])
def test_a_folder_of_no_job_is_refused(words, tmp_path):
    for text in (None, "4194305", "x"):  # none, one that has ended, and something else
        if text is not None:
            (tmp_path / LAUNCHER).write_text(text)
        with pytest.raises(
            ServerError, match=f"(?s)is no job.*no job with parameter servers runs in {tmp_path}"
        ):
            CliRunner().invoke(app, ["ps", *words, str(tmp_path)], catch_exceptions=False)


def test_a_terminal_of_80_columns_shows_the_status_in_full():
    counts = Counts(updates=1_234_567, pulled_bytes=10**12, pushed_bytes=10**12)
    declared = ("job", 0, 0, False, (), spread((), (63,)))
    big = m.Seen(
        *declared,
        10**12,
        4096,
        64,
        {1024: 10**7},
        {7: 10**7},
        counts,
        (10.0, 10.0),
        m.Copied(63, 999),
        10**12,
    )
    screen = Console(width=80, file=io.StringIO())
    for table in tables({63: big}):
        screen.print(table)
    assert isinstance(screen.file, io.StringIO)
    text = screen.file.getvalue()
    assert "…" not in text and "1234567" in text and "100 %" in text
    heads = [line.split() for line in text.splitlines() if "server " in line or "worker " in line]
    assert heads[0] == "server memory blocks updates waiting pulled pushed busy".split()
    assert len(heads) == 3


def test_an_answer_that_comes_late_is_one(jobs, tmp_path):
    made = worker(jobs(1), 0, 1)
    seen, _ = Remote(InFolder(tmp_path), 0.0, 0.0).ask({0: (m.Look(), [])})[0]
    assert isinstance(seen, m.Seen)
    assert (seen.job, seen.clocks) == ("job", {made.number: 0})


def test_a_server_that_fails_within_an_update_ends(jobs, tmp_path):
    """It may have made half of it; and the push that it has counted would not be made again."""
    job = jobs(1)
    made = worker(job, 0, 1)
    made.transport.away = 0.5
    serving_ = job.running[0]

    def broken(*_: Any) -> Any:
        raise RuntimeError("half of an update")

    serving_.server._update = broken
    with pytest.raises(ServerError, match="parameter server 0 does not answer"):
        train(made, 1)
    assert "RuntimeError: half of an update" in str(serving_.failure)
