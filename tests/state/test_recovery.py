"""Killed at any moment, a job goes on from its last checkpoint, and its losses are those of a job that nobody killed,
bit for bit. Asked to stop, it saves first."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

import meshwright as mw
from bench.recovery import Kill, curve, killed
from bench.recovery_run import EVERY
from meshwright.errors import CheckpointError, DamagedError
from meshwright.examples import mlp
from tests.launch.conftest import Launches, eventually, launches

__all__ = ["launches"]
ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("recovery.py")


def start(
    launches: Launches, folder: Path, steps: int, *more: str, restarts: int = 0
) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    found = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    arguments = ("--nproc", 2, "--max-restarts", restarts, "--grace", 60, SCRIPT, folder, steps, *more)
    return launches.start(*arguments, env={"PYTHONPATH": found})


def undisturbed(launches: Launches, steps: int) -> dict[int, set[str]]:
    folder = launches.folder / "undisturbed"
    process = start(launches, folder, steps)
    assert process.wait(200) == 0, process.communicate()
    assert sorted(curve(folder)) == list(range(1, steps + 1))
    return curve(folder)


@pytest.mark.procs
@pytest.mark.full  # test_processes.py kills a rank that saves
def test_a_kill_in_the_middle_of_a_save_costs_the_steps_since_the_one_before(launches: Launches) -> None:
    folder = launches.folder / "killed"
    process = start(launches, folder, 16, "save", restarts=1)  # one failure takes one restart
    assert process.wait(250) == 0, process.communicate()
    assert (folder / "killed").exists()
    assert curve(folder) == undisturbed(launches, 16)
    assert sorted(p.name for p in (folder / "ckpt").iterdir()) == ["latest", "step-00000012", "step-00000015"]


@pytest.mark.procs
@pytest.mark.slow
def test_asked_to_stop_it_saves_first(launches: Launches) -> None:
    folder = launches.folder / "stopped"
    process = start(launches, folder, 400)
    eventually(lambda: (folder / "losses0").exists() and len(curve(folder)) > 4, "some steps are done")
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 128 + signal.SIGTERM
    last = max(curve(folder))
    assert last < 400
    assert (folder / "ckpt" / "latest").read_text().startswith(f"step-{last:08d}")
    assert not list((folder / "ckpt").glob(".s*"))
    process = start(launches, folder, last + 3)
    assert process.wait(200) == 0, process.communicate()
    assert curve(folder) == undisturbed(launches, last + 3)


@pytest.mark.procs
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_kills_at_random_moments(launches: Launches) -> None:
    kills, steps = 20, 400
    folder = launches.folder / "killed"
    process = start(launches, folder, steps, restarts=kills)
    seen: list[Kill] = []
    killed(process, folder, kills, ranks=2, seed=5, told=lambda _, kill: seen.append(kill))
    assert process.wait(400) == 0, process.communicate()
    assert curve(folder) == undisturbed(launches, steps)
    assert len(seen) == kills and all(kill.step - kill.from_step <= 2 * EVERY for kill in seen)


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import torch

    model, batch, loss = mlp.build()
    step = mw.train_step(model, torch.optim.AdamW, batch, loss=loss, mesh=1)
    assert step.resume(tmp_path) is None
    for _ in range(3):
        step(batch)
        made = step.save(tmp_path, keep=3)
    for damaged in (made, tmp_path / "step-00000002"):
        data = (damaged / "rank00000.safetensors").read_bytes()
        (damaged / "rank00000.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    found = step.resume(tmp_path)
    assert found is not None and found.step == 1
    told = capfd.readouterr().err
    assert "step-00000003 is damaged" in told and "step-00000002 is damaged" in told
    (tmp_path / "step-00000001" / "rank00000.safetensors").unlink()
    with pytest.raises(DamagedError, match="lacks rank00000"):
        step.resume(tmp_path)


def test_autosave_alone(tmp_path: Path) -> None:
    import torch

    model, batch, loss = mlp.build()
    before = signal.getsignal(signal.SIGTERM)
    step = mw.train_step(model, torch.optim.AdamW, batch, loss=loss, mesh=1)
    with pytest.raises(CheckpointError, match="every=0"):
        mw.Autosave(step, tmp_path, every=0)
    autosave = mw.Autosave(step, tmp_path, every=2)
    assert autosave.loaded is None
    for _ in range(5):
        step(batch)
        autosave()
    assert sorted(p.name for p in tmp_path.glob("[!.]*")) == ["latest", "step-00000002", "step-00000004"]
    os.kill(os.getpid(), signal.SIGTERM)
    step(batch)
    step(batch)
    with pytest.raises(SystemExit) as ended:
        autosave()
    assert ended.value.code == 0
    assert (tmp_path / "latest").read_text() == "step-00000007\n"
    assert signal.getsignal(signal.SIGTERM) == before
    again = mw.Autosave(step, tmp_path, every=2)
    assert again.loaded is not None and again.loaded.step == 7
    again.close()
    assert signal.getsignal(signal.SIGTERM) == before
