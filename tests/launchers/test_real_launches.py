"""Real launches by every launcher, of which others' are skipped where they are not installed: `examples/demo.py`, and
what mpirun leaves and how it numbers ranks."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench.machines import Machine, machines
from meshwright.launchers.rank_table import RankTable
from tests.breadth import first
from tests.launch.test_on_ray import CLUSTER
from tests.launchers.one_node_slurm import slurm, why_not
from tests.ranks import ROOT

pytestmark = [pytest.mark.procs, pytest.mark.timeout(400)]
SCRIPT = """
import os, sys
import torch
import meshwright as mw
from meshwright.launchers import launched

mine = launched()
world = mw.world({"node": 2, "gpu": 2} if mine.world == 4 else mine.world)
total = world.all_reduce(torch.tensor([2.0**world.rank]), "gpu" if mine.world == 4 else tuple(world.mesh.sizes))
sys.stdout.write(f"{sys.argv[1]}: rank {world.rank} local {mine.local_rank} of {mine.local_world} {total.item():g}\\n")
mw.shutdown()
"""
PROGRAMS = {"openmpi": ["--oversubscribe", "--allow-run-as-root", "-n"], "mpich": ["-n"]}


def started(
    folder: Path, *command: str, prefix: tuple[str, ...] = (), **env: str
) -> subprocess.CompletedProcess[str]:
    known = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "MASTER"))}
    (folder / "script.py").write_text(SCRIPT)
    return subprocess.run(
        [*prefix, *command],
        cwd=folder,
        env={**known, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def mpirun(name: str) -> list[str]:
    found = shutil.which(f"mpirun.{name}")
    if found is None:
        pytest.skip(f"mpirun.{name} is not installed: apt-get install openmpi-bin mpich")
    return [found, *PROGRAMS[name]]


@pytest.mark.parametrize("name", first(1, sorted(PROGRAMS)))
def test_mpirun_needs_no_option_and_a_second_program_meets_no_trace_of_the_first(
    name: str, tmp_path: Path
) -> None:
    both = f"{sys.executable} script.py a && {sys.executable} script.py b"
    done = started(tmp_path, *mpirun(name), "2", "sh", "-c", both)
    assert done.returncode == 0, done.stderr
    expected = [f"{x}: rank {r} local {r} of 2 3" for x in "ab" for r in range(2)]
    assert sorted(done.stdout.splitlines()) == expected
    assert not list(tmp_path.glob("meshwright-*/*"))


AGENT = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
case $host in
CASES
esac
"""


@pytest.mark.full
def test_mpirun_over_two_machines(tmp_path: Path) -> None:
    command = mpirun("openmpi")
    with machines(2) as found:
        if not found[0].prefix:
            pytest.skip("no network namespaces here")
        agent = tmp_path / "agent"
        cases = [f'{m.address}) exec {" ".join(m.prefix)} sh -c "$*";;' for m in found]
        agent.write_text(AGENT.replace("CASES", "\n".join(cases)))
        agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
        hosts = ",".join(f"{m.address}:2" for m in found)
        words = ["--mca", "plm_rsh_agent", str(agent), "--mca", "btl_tcp_if_include", "eth0"]
        done = started(
            tmp_path,
            *command[:-1],
            *("-H", hosts, *words, "-n", "4", sys.executable, "script.py", "x"),
            prefix=found[0].prefix,
        )
    assert done.returncode == 0, done.stderr
    # The inner axis stays on a machine: ranks 0 and 1 on one, 2 and 3 on the other.
    expected = [f"x: rank {r} local {r % 2} of 2 {3 if r < 2 else 12}" for r in range(4)]
    assert sorted(done.stdout.splitlines()) == expected


# ---- the demo, on two ranks

PYTHON = sys.executable
RUN = (PYTHON, "-m", "meshwright.cli", "run")
DEMO = (f"{ROOT}/examples/demo.py", *"--dp 1 --steps 2 --compared 2 --sample 1".split())
SECRET = {"MESHWRIGHT_SECRET": "the secret of a job that is tested"}


@dataclass(frozen=True)
class Start:
    """What is typed in one place. `env`: besides what is there."""

    words: Sequence[object]
    env: dict[str, str] = field(default_factory=dict)


Starts = Iterator[list[Start]]


def _there(machine: Machine, *words: object) -> Start:
    return Start((*machine.prefix, *words), SECRET)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def _run(folder: Path) -> Starts:
    yield [Start((*RUN, "--nproc", 2, *DEMO))]


@contextlib.contextmanager
def _over_machines(folder: Path) -> Starts:
    with machines(2) as two:
        at = ("--nnodes", 2, "--master", f"{two[0].address}:{_free_port()}")
        yield [_there(m, *RUN, *at, "--node-rank", place, *DEMO) for place, m in enumerate(two)]


@contextlib.contextmanager
def _own_scheduler(folder: Path) -> Starts:
    with machines(2) as two:
        at = f"{two[0].address}:{_free_port()}"
        begin = _there(two[0], *RUN[:-1], "scheduler", "--listen", at)
        command, env = list(map(str, begin.words)), {**os.environ, **begin.env}
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as scheduler:
            assert (
                scheduler.stdout is not None and scheduler.stdout.readline()
            )  # it listens: no other is started
            yield [_there(m, *RUN, "--nnodes", 2, "--master", at, *DEMO) for m in two]
            assert scheduler.wait(60) == 0


@contextlib.contextmanager
def _dynamic_cluster(folder: Path) -> Starts:
    place = {"MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(_free_port()), "MS_WORKER_NUM": "2", **SECRET}
    yield [
        Start((PYTHON, *DEMO), {**place, "MS_ROLE": f"MS_{role}"}) for role in ("WORKER", "SCHED", "WORKER")
    ]


@contextlib.contextmanager
def _rank_table(folder: Path) -> Starts:
    RankTable.of({"127.0.0.1": range(2)}).save(folder / "table.json")
    yield [Start((*RUN, "--rank-table", folder / "table.json", *DEMO), SECRET)]


@contextlib.contextmanager
def _open_mpi(folder: Path) -> Starts:
    yield [Start((*mpirun("openmpi"), 2, PYTHON, *DEMO))]


@contextlib.contextmanager
def _mpich(folder: Path) -> Starts:
    yield [Start((*mpirun("mpich"), 2, PYTHON, *DEMO))]


@contextlib.contextmanager
def _slurm(folder: Path) -> Starts:
    if reason := why_not():
        pytest.skip(reason)
    with slurm(folder, cpus=2) as env:
        yield [Start(("srun", "-n", 2, PYTHON, *DEMO), env)]


@contextlib.contextmanager
def _ray(folder: Path) -> Starts:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install ray")
    (folder / "cluster.py").write_text(CLUSTER)
    with tempfile.TemporaryDirectory() as short:  # in which Ray's sockets are
        yield [
            Start(
                (PYTHON, folder / "cluster.py", "--nnodes", 2, *DEMO), {"PYTHONPATH": ROOT, "TMPDIR": short}
            )
        ]


@pytest.mark.full
@pytest.mark.parametrize(
    "launcher",
    [_run, _over_machines, _own_scheduler, _dynamic_cluster, _rank_table, _open_mpi, _mpich, _slurm, _ray],
    ids=lambda launcher: launcher.__name__.strip("_"),
)
def test_the_demo(
    launcher: Callable[[Path], contextlib.AbstractContextManager[list[Start]]], tmp_path: Path
) -> None:
    known = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "MASTER", "MS_"))}
    known |= {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with launcher(tmp_path) as starts:
        running = [
            subprocess.Popen(
                [str(word) for word in start.words],
                cwd=tmp_path,
                env={**known, **start.env},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for start in starts
        ]
        try:
            said = [process.communicate(timeout=300)[0] for process in running]
        finally:
            for process in running:
                process.kill()
    assert [process.returncode for process in running] == [0] * len(running), said
    found = re.findall("largest difference of the loss, in float32: (.*)", "".join(said))
    assert len(found) == 1, said  # by rank 0 of one job
    assert float(found[0]) < 1e-5
    assert "dp=1 × tp=2" in "".join(said)
