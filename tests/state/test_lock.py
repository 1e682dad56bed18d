"""One job saves into a folder, and a checkpoint is read from below its own path."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright import heartbeat
from meshwright.checkpoint.folder import own
from meshwright.checkpoint.lock import LOCK
from meshwright.errors import CheckpointError
from meshwright.examples import mlp

ROOT = Path(__file__).parents[2]
OTHER = """
import os, sys, time
from pathlib import Path
from meshwright.checkpoint.folder import own

if sys.argv[3:]:
    os.environ["MESHWRIGHT_STORE"] = f"{os.getpid()}:{sys.argv[3]}"
held = own(Path(sys.argv[1]))
print("owned", flush=True)
time.sleep(600 if sys.argv[2:] else 0)
"""


@pytest.fixture
def step() -> Any:
    model, batch, loss = mlp.build()
    return mw.train_step(model, torch.optim.AdamW, batch, loss=loss, mesh=1)


def another_job(folder: Path, *more: str) -> subprocess.Popen[str]:
    job = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(folder), *more],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert job.stdout is not None and job.stdout.readline() == "owned\n"
    return job


@pytest.mark.procs
def test_a_folder_of_another_job_is_refused_until_that_has_ended(step: Any, tmp_path: Path) -> None:
    job = another_job(tmp_path, "stays")
    unfinished = tmp_path / ".saving-step-00000007-other"
    unfinished.mkdir()
    with pytest.raises(CheckpointError, match=rf"-c \(process {job.pid} on .* saves into") as refused:
        step.save(tmp_path)
    assert "another folder" in refused.value.hint
    with pytest.raises(CheckpointError, match="saves into"):
        mw.Autosave(step, tmp_path, every=1)
    assert unfinished.exists()
    job.send_signal(signal.SIGKILL)
    job.communicate()
    assert (tmp_path / LOCK).exists()
    step.save(tmp_path, async_=True)  # what a killed job has left is no lock
    step.wait()
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert step.resume(tmp_path) is not None and not unfinished.exists()


@pytest.mark.procs
def test_a_rank_takes_the_lock_from_one_that_its_job_has_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one may still run, behind a link that is cut, or its machine may never be heard of again."""
    folder = tmp_path / "ckpt"
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / heartbeat.JOB).write_text(name)
    folder.mkdir()
    lost = another_job(folder, "stays", str(tmp_path / "ours" / "store"))
    monkeypatch.setenv(heartbeat.STORE, f"{os.getpid()}:{tmp_path / 'theirs' / 'store'}")
    with pytest.raises(CheckpointError, match="saves into"):
        own(folder)
    monkeypatch.setenv(heartbeat.STORE, f"{os.getpid()}:{tmp_path / 'ours' / 'store'}")
    held = own(folder)
    assert json.loads((folder / LOCK).read_text())["pid"] == os.getpid()
    lost.kill()
    lost.communicate()
    assert held.stands()
    owner = {"host": f"not-{socket.gethostname()}", "pid": 1, "of": "ours"}
    (folder / LOCK).unlink()
    (folder / LOCK).write_text(json.dumps(owner))
    held = own(folder)
    assert held.stands() and json.loads((folder / LOCK).read_text())["pid"] == os.getpid()


@pytest.mark.procs
def test_a_job_that_ends_leaves_no_lock(tmp_path: Path) -> None:
    another_job(tmp_path).communicate()
    assert not (tmp_path / LOCK).exists()


def test_several_steps_of_one_process_save_into_one_folder(step: Any, tmp_path: Path) -> None:
    model, batch, loss = mlp.build()
    other = mw.train_step(model, torch.optim.AdamW, batch, loss=loss, mesh=1)
    step.save(tmp_path)
    other.save(tmp_path)
    shutil.rmtree(tmp_path)
    step.save(tmp_path)
    assert (tmp_path / LOCK).exists()


def test_a_lock_of_another_host_stays(step: Any, tmp_path: Path) -> None:
    owner = {"host": f"not-{socket.gethostname()}", "pid": 1, "job": "train.py", "since": "yesterday"}
    (tmp_path / LOCK).write_text(json.dumps(owner))
    with pytest.raises(
        CheckpointError, match=r"train.py \(process 1 on not-.*, since yesterday\)"
    ) as refused:
        step.save(tmp_path)
    assert f"rm {str(tmp_path / LOCK)!r}" in refused.value.hint
    (tmp_path / LOCK).write_text('{"host": "cut sho')  # its writer was killed
    step.save(tmp_path)


@pytest.mark.parametrize("named", ["../there", "{there}", "..", "a/../../there", "link"])
def test_latest_is_not_followed_outside_the_folder(step: Any, tmp_path: Path, named: str) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    step.save(tmp_path / "other").rename(there)
    here.mkdir()
    (here / "link").symlink_to(there)
    (here / "latest").write_text(named.format(there=there))
    for load in (step.load, step.resume):
        with pytest.raises(CheckpointError, match=r"latest names .* which is not in the folder"):
            load(here)


def test_links_out_of_a_checkpoint_are_not_followed(
    step: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = step.save(tmp_path / "here")
    file = made / "rank00000.safetensors"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"rank00000\.safetensors is a link to"):
        step.load(tmp_path / "here")
    (tmp_path / "here" / "step-00000009").symlink_to(step.save(tmp_path / "other"))
    assert step.load(tmp_path / "here" / "step-00000009").step == 0  # named by the user
    made.rename(tmp_path / "gone")
    assert step.resume(tmp_path / "here") is None
    assert f"step-00000009 is a link out of {tmp_path / 'here'}" in capfd.readouterr().err
