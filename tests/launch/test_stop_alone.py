"""A machine that is stopped alone: the others wait, and all go on when it comes again."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.errors import LaunchError
from meshwright.launch.membership import Member
from meshwright.launch.nodes import Nodes
from meshwright.scheduler import client
from tests.launch.conftest import eventually

SCRIPT = """
import os, pathlib, time
folder = pathlib.Path(__file__).parent
(folder / f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}").touch()
while not (folder / "end").exists():
    time.sleep(0.02)
"""


@pytest.mark.procs
def test_a_machine_that_is_stopped_alone_may_come_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    master = f"127.0.0.1:{port}"
    begin = [sys.executable, "-m", "meshwright.cli"]
    env = {**os.environ, "MESHWRIGHT_SECRET": "s" * 30}
    more = ["--nnodes", "2", "--max-restarts", "1"]
    scheduler = [*begin, "scheduler", "--listen", master, *more]
    with contextlib.ExitStack() as stack:

        def start(*command: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(command, env=env, cwd=tmp_path)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        def worker(number: int) -> subprocess.Popen[bytes]:
            options = ["--master", master, "--node-id", str(number), "--stop-alone", "--no-scheduler"]
            return start(*begin, "run", *more, *options, str(script))

        workers = [worker(0), worker(1)]
        start(*scheduler)
        eventually(lambda: (tmp_path / "0-0").exists() and (tmp_path / "0-1").exists(), "both ranks run")
        workers[1].send_signal(signal.SIGTERM)
        assert workers[1].wait(60) == 128 + signal.SIGTERM
        time.sleep(0.2)
        assert workers[0].poll() is None
        workers[1] = worker(1)
        eventually(
            lambda: (tmp_path / "1-0").exists() and (tmp_path / "1-1").exists(), "both ranks run again"
        )
        (tmp_path / "end").touch()
        assert [w.wait(60) for w in workers] == [0, 0]


@pytest.mark.parametrize("alone", [True, False])
def test_who_is_stopped_alone_does_not_wait_for_a_scheduler_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """A cluster may have stopped it as well. Else the others have to hear of it, if it comes again soon."""
    calls = []

    def connect(*place: object) -> socket.socket:
        calls.append(place)
        raise ConnectionRefusedError

    monkeypatch.setattr(client, "connect", connect)
    nodes, place = Nodes(2, "127.0.0.1", index=1, stops_alone=alone), client.Place("127.0.0.1", 29400)
    Member(nodes, place, 1, 0, "restart", tmp_path, tmp_path, lambda: True).stopped(143)
    assert (len(calls) == 1) == alone


@pytest.mark.parametrize("option", ["--stop-alone", "--no-scheduler"])
def test_what_is_about_several_machines_is_refused_on_one(tmp_path: Path, option: str) -> None:
    from typer.testing import CliRunner

    from meshwright.cli import app

    done = CliRunner().invoke(app, ["run", option, str(tmp_path / "x.py")])
    assert isinstance(done.exception, LaunchError) and "on one machine" in done.exception.what
