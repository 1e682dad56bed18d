"""Ranks on two machines that another launcher has started meet under a secret, without an option."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.machines import Machine, machines
from meshwright.errors import LaunchError
from meshwright.launchers import Launched, own_scheduler
from tests.ranks import ROOT

PORT = 29461
SCRIPT = """
import sys
import torch
import meshwright as mw

world = mw.world(2)
total = world.all_reduce(torch.tensor([2.0**world.rank]), tuple(world.mesh.sizes))
sys.stdout.write(f"rank {world.rank} {total.item():g}\\n")
mw.shutdown()
"""


@pytest.fixture
def two() -> Iterator[list[Machine]]:
    with machines(2) as found:
        yield found


def run(folder: Path, two: list[Machine], *more: dict[str, str]) -> list[tuple[int, str, str]]:
    """Run a rank on each machine, as a step of Slurm would; how each has ended, and what it said. `more`: of the
    environment of each."""
    (folder / "script.py").write_text(SCRIPT)
    processes = []
    for rank, machine in enumerate(two):
        step = {
            "SLURM_JOB_ID": "7",
            "SLURM_STEP_ID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": str(rank),
            "SLURM_PROCID": str(rank),
            "SLURM_STEP_NODELIST": "n[0-1]",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
            "MASTER_ADDR": two[0].address,
            "MASTER_PORT": str(PORT),
        }
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **step, **more[rank]}
        command = [*machine.prefix, sys.executable, "script.py"]
        processes.append(
            subprocess.Popen(command, cwd=folder, env=env, stdout=-1, stderr=-1, text=True)  # pipes
        )
    # rank 0 waits for the other one, which may have been refused
    said = [process.communicate(timeout=200) for process in processes[:0:-1]]
    if processes[1].returncode:
        processes[0].kill()
    said.append(processes[0].communicate(timeout=200))
    return [(process.returncode, *texts) for process, texts in zip(processes, said[::-1], strict=True)]


@pytest.mark.procs
@pytest.mark.parametrize(
    "how", ["own", *(pytest.param(how, marks=pytest.mark.full) for how in ("given", "insecure"))]
)
def test_ranks_meet_under_a_secret(how: str, tmp_path: Path, two: list[Machine]) -> None:
    more = {"XDG_CONFIG_HOME": str(tmp_path / "home")}
    more |= {
        "given": {"MESHWRIGHT_SECRET": "long enough to be a secret"},
        "insecure": {"MESHWRIGHT_INSECURE": "1"},
    }.get(how, {})
    ends = run(tmp_path, two, more, more)
    assert [end[:2] for end in ends] == [(0, "rank 0 3\n"), (0, "rank 1 3\n")], ends
    key = tmp_path / "home/meshwright/key"
    assert key.exists() == (how == "own")
    if how == "own":
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        assert len(list(key.parent.iterdir())) == 1


@pytest.mark.full  # tests/launch/test_machines.py has that
@pytest.mark.procs
def test_another_secret_is_refused(tmp_path: Path, two: list[Machine]) -> None:
    ends = run(tmp_path, two, *({"MESHWRIGHT_SECRET": f"a secret of its own, number {n}"} for n in range(2)))
    assert ends[1][0] == 1
    assert "is not trusted" in ends[1][2]


def mine(rank: int) -> Launched:
    return Launched("Slurm", rank, 2, 0, 1, "localhost", PORT, job="7.0")


def test_a_key_that_does_not_come_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MESHWRIGHT_SECRET", "MESHWRIGHT_SECRET_FILE", "MESHWRIGHT_INSECURE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(own_scheduler, "SHARED_SECONDS", 0.0)
    with pytest.raises(LaunchError, match="several machines, and no secret") as found:
        own_scheduler.place_of(mine(1), 1.0)
    assert "whose home folder is another one" in found.value.why
    assert "MESHWRIGHT_SECRET=$(openssl rand -hex 32)" in found.value.hint
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match="several machines, and no secret") as found:
        own_scheduler.place_of(mine(0), 1.0)
    assert "cannot be written" in found.value.why


def test_without_a_secret_if_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MESHWRIGHT_SECRET", "MESHWRIGHT_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MESHWRIGHT_INSECURE", "1")
    assert own_scheduler.place_of(mine(0), 1.0) is None
