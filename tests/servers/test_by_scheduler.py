"""Workers and servers that no launcher has brought together: all that they know is the scheduler."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from meshwright.cli import app
from meshwright.errors import LaunchError, ServerError
from meshwright.launch.servers import added, servers_by_hand

ELASTIC = Path(__file__).with_name("elastic.py")
SECRET = "the secret of a job that is tested"
CLI = [sys.executable, "-m", "meshwright.cli"]


class Processes:
    """Of one job; `port`: of its scheduler. Their output is in `folder`."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.env = {**os.environ, "MESHWRIGHT_SECRET": SECRET, "MS_SERVER_NUM": "2", "OMP_NUM_THREADS": "1"}
        self.start(
            "scheduler", *CLI, "scheduler", "--listen", "127.0.0.1:29517", "--state", str(folder / "state")
        )

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        out = self._stack.enter_context((self.folder / f"{name}.log").open("ab"))
        made = subprocess.Popen(command, env=self.env, stdout=out, stderr=out)
        self._stack.callback(made.wait)
        self._stack.callback(made.kill)
        return made

    def server(self, number: int, **settings: object) -> subprocess.Popen[bytes]:
        state = str(self.folder / f"state{number}")
        place = {
            "host": "127.0.0.1",
            "port": 29517,
            "node": f"server{number}",
            "servers": 2,
            "number": number,
        }
        words = json.dumps({**place, "state": state, "job": "job", **settings})
        return self.start(f"server{number}", sys.executable, "-m", "meshwright.launch.server_by_hand", words)

    def worker(self, place: int | None, *words: object) -> subprocess.Popen[bytes]:
        rank = [] if place is None else ["--node-rank", str(place)]
        options = ["--add-to", "127.0.0.1:29517", *rank, "--on-failure", "continue", "--max-restarts", "2"]
        script = [str(ELASTIC), *map(str, words), str(self.folder)]
        return self.start(f"worker{place}", *CLI, "run", *options, "--grace", "20", *script)

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with ExitStack() as stack:
        yield Processes(tmp_path, stack)


def eventually(found: Callable[[], bool], what: str, seconds: float = 150.0) -> None:
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.mark.procs
@pytest.mark.full
@pytest.mark.timeout(240)
def test_workers_and_servers_come_and_go_and_no_row_is_lost(processes: Processes) -> None:
    """Workers 1 → 3 → 2, servers 2 → 3 → 2 → 3; a server is killed while it has rows that have moved."""
    first = [processes.server(0), processes.server(1)]
    main = processes.worker(0, 3000, 2, 0.2)
    eventually(lambda: "step 5 " in processes.log("worker0"), "the first worker trains alone")
    later = [processes.worker(place, 3000, 2, 0.2) for place in (1, None)]
    eventually(
        lambda: (processes.folder / "worker1").exists() and (processes.folder / "worker1024").exists(),
        "all train",
    )
    spread = [*CLI, "ps", "spread", "--master", "127.0.0.1:29517", "--mover", "a test"]
    third = processes.server(2, fresh=True)
    for count in (3, 2, 3):
        done = subprocess.run(
            [*spread, str(count)], env=processes.env, capture_output=True, text=True, timeout=100
        )
        assert done.stdout == f"the parameters are on {count} servers\n", done.stderr
    for killed, number in ((first[1], 1), (third, 2)):
        killed.kill()
        killed.wait()
        processes.server(number)
    later[0].send_signal(signal.SIGTERM)
    assert later[0].wait(60) == 128 + signal.SIGTERM
    (processes.folder / "fast").touch()
    assert main.wait(120) == 0
    assert "each sample was trained 2 times: True" in processes.log("worker0")
    assert " servers 3\n" in processes.log("worker0") and " servers 2\n" in processes.log("worker0")
    assert later[1].wait(60) == 0


@pytest.mark.procs
@pytest.mark.timeout(120)
def test_a_worker_that_is_stopped_together_with_the_servers_finishes_its_step(processes: Processes) -> None:
    """As a cluster stops a job that is deleted. The worker was killed when its grace was over."""
    every = [processes.server(0), processes.server(1), processes.worker(0, 3000, 2, 0.2)]
    eventually(lambda: "step 3 " in processes.log("worker0"), "it trains")
    for process in every:
        process.send_signal(signal.SIGTERM)
    assert [process.wait(60) for process in every] == [128 + signal.SIGTERM] * 3
    assert "worker 0 trained" in processes.log("worker0"), "it has left by itself"


@pytest.mark.parametrize(
    ("job", "place", "says"),
    [
        ("localhost:1", None, "'1' is not a port"),
        ("nowhere.invalid:8118", None, "the host nowhere.invalid is unknown"),
        ("127.0.0.1:8118", None, "several machines, and no secret"),
        ("/nowhere", None, "no job with parameter servers runs in /nowhere"),
    ],
)
def test_jobs_that_no_worker_can_be_added_to(job, place, says, monkeypatch) -> None:
    monkeypatch.delenv("MESHWRIGHT_SECRET", raising=False)
    with pytest.raises(LaunchError, match=says), added(job, place):
        pass


def test_a_number_of_servers_that_is_none(monkeypatch) -> None:
    monkeypatch.setenv("MS_SERVER_NUM", "two")
    with pytest.raises(LaunchError, match="MS_SERVER_NUM is 'two'"):
        servers_by_hand()


@pytest.mark.parametrize(
    ("words", "says"),
    [(["65"], "65 servers"), (["2", "/x", "--master", "localhost:8118"], "a folder, and --master")],
)
def test_parameters_are_not_spread(words, says) -> None:
    from typer.testing import CliRunner

    with pytest.raises(ServerError, match=says):
        CliRunner().invoke(app, ["ps", "spread", *words], catch_exceptions=False)
