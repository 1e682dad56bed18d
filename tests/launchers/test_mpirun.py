"""Real launches by others' launchers: skipped where they are not installed."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from bench.machines import machines

pytestmark = pytest.mark.procs
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


@pytest.mark.parametrize("name", PROGRAMS)
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
