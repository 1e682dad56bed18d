"""`meshwright run --servers`: servers and workers as processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from meshwright.servers.in_folder import running
from meshwright.servers.places import LAUNCHER, PREFIX

SCRIPT, LOSING, SAME, LARGER = (
    Path(__file__).with_name(name)
    for name in ("training.py", "losing.py", "same_script.py", "larger_than_memory.py")
)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "meshwright.cli", "run", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.procs
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", [pytest.param((), marks=pytest.mark.full), ("clip",)])
def test_workers_and_servers_that_are_killed_train_as_one_device(tmp_path, how):
    words = ("--servers", "2", "--workers", "2", "--server-state", str(tmp_path))
    done = run(*words, str(SCRIPT), "kill", "move", *how)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal to one device" in done.stdout
    assert done.stderr.count("ended by SIGKILL: it is started again") == 2
    again = run(*words, str(SCRIPT))
    assert again.returncode == 2
    assert f"--server-state {tmp_path} has the values of another job" in again.stderr
    assert "step.resume in the script" in again.stderr and "Traceback" not in again.stderr


@pytest.mark.procs
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("mode", "marks", "kind"),
    [
        ("parameter_server", "one", "ServerStep"),
        pytest.param("parameter_server", "all", "ServerStep", marks=pytest.mark.full),
        pytest.param("data_parallel", "one", "TrainStep", marks=pytest.mark.full),
    ],
)
def test_one_script_for_every_mode(mode, marks, kind):
    done = run("--servers", "2", "--workers", "2", str(SAME), mode, marks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"equal to one device: {kind}" in done.stdout


@pytest.mark.procs
@pytest.mark.timeout(300)
@pytest.mark.full  # 1.6 GB on two servers
def test_a_table_of_four_times_the_memory_of_a_worker(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # each thread has a stack, which counts
    done = run("--servers", "2", "--workers", "1", str(LARGER))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the worker cannot hold the table: True" in done.stdout
    assert "equal to its rows on one device: True; within the limit: True" in done.stdout


@pytest.mark.procs
@pytest.mark.timeout(300)
@pytest.mark.full  # the test before kills workers, too
def test_others_go_on_without_a_killed_worker_which_comes_again(tmp_path):
    how = ("--on-failure", "continue", "--max-restarts", "1", "--tail", "1")
    done = run("--servers", "1", "--workers", "2", *how, str(LOSING), str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the others go on; it is started again" in done.stderr
    assert "it went on after step 3: True" in done.stdout


@pytest.mark.procs
@pytest.mark.timeout(300)
@pytest.mark.full
def test_without_state_a_killed_server_ends_the_job():
    done = run("--servers", "2", "--workers", "2", str(SCRIPT), "kill")
    assert done.returncode != 0
    assert "parameter server 0 ended by SIGKILL: it is started again, without its values" in done.stderr
    # the launcher does not repeat what the shown rank said, and either rank may notice first
    said = done.stdout + done.stderr
    assert "the values of parameter server 0 are lost" in said
    assert "nothing is lost with --replicas 1 or --server-state" in said


@pytest.mark.full  # test_shares.py starts workers again, test_together.py in one process
@pytest.mark.procs
@pytest.mark.timeout(300)
def test_all_workers_start_again_where_they_were(tmp_path):
    """The step that one of them has not pushed counts for none: all do it again."""
    anew = Path(__file__).with_name("beginning_anew.py")
    words = ("--servers", "2", "--workers", "2", "--max-restarts", "1", str(anew), str(tmp_path), "worker")
    done = run(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "it went on from step 5, and is equal to one device" in done.stdout
    assert "training goes on at step 5, with the servers' values" in done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.procs
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("how", "words"),
    [("one", ()), pytest.param("copies", ("--replicas", "1"), marks=pytest.mark.full)],
)
def test_a_job_whose_values_are_lost_goes_on_from_its_checkpoint(tmp_path, how, words):
    anew = Path(__file__).with_name("beginning_anew.py")
    counts = ("--servers", "2", "--workers", "2", "--max-restarts", "1")
    done = run(*counts, *words, str(anew), str(tmp_path / "saved"), how)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "it went on from step 3, and is equal to one device" in done.stdout
    assert "are lost" in done.stdout + done.stderr


TWICE = """
import torch
import meshwright as mw

def step():
    net = torch.nn.Linear(2, 1)
    return mw.parameter_server(net, lambda p: torch.optim.SGD(p, lr=0.1), loss=lambda net, x: net(x).sum())

if __name__ == "__main__":
    step().close()
    step()
"""


@pytest.mark.full
@pytest.mark.procs
@pytest.mark.timeout(300)
def test_a_second_model_does_not_get_the_values_of_the_first(tmp_path):
    script = tmp_path / "twice.py"
    script.write_text(TWICE)
    done = run("--servers", "1", str(script))
    assert done.returncode == 1
    assert "has made a step on the servers of this job before" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--servers", "65"), "--servers is 65"),
        (("--servers", "two"), "--servers is 'two'"),
        (("--servers", "1", "--replicas", "1"), "a copy is on another server, and there is one"),
    ],
)
def test_servers_that_cannot_be(words, what):
    done = run(*words, str(SCRIPT))
    assert done.returncode != 0
    assert what in done.stderr


def test_a_job_that_ends_while_it_is_looked_for_is_not_found(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    for name in ("stays", "ends"):
        (tmp_path / f"{PREFIX}{name}").mkdir()
        (tmp_path / f"{PREFIX}{name}" / LAUNCHER).write_text(name.replace("stays", "1").replace("ends", "2"))

    def alive(pid, _):
        if pid == 2:
            shutil.rmtree(tmp_path / f"{PREFIX}ends")

    monkeypatch.setattr(os, "kill", alive)
    assert running() == [tmp_path / f"{PREFIX}stays"]
