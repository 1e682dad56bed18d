"""`meshwright calibrate` with real ranks: a file that loads, and what it says when a rank fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.machines import machines
from meshwright.calibrate.plan import WAITED
from meshwright.core.collectives import PRICED
from meshwright.cost.cluster import Cluster
from tests.breadth import quick

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240)]

# Rank 1 goes away before it has done anything.
FAILING = "import os, sys\nif os.environ.get('RANK') == '1':\n    sys.exit('rank 1 has no memory left')\n"


def calibrate(folder: Path, *arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "meshwright.cli", "calibrate", "--quick", *arguments]
    environment = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "PYTHONPATH")}
    environment |= {"PYTHONPATH": path} if path else {}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)


def test_two_ranks_measure_this_machine(tmp_path: Path) -> None:
    done = calibrate(tmp_path, "--nproc", "2", "-o", "here.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    cluster = Cluster.load(tmp_path / "here.yaml")
    assert cluster.ranks == 2 and [level.name for level in cluster.levels] == ["rank"]
    rates = cluster.measured.rates
    assert set(rates) >= {
        "matmul f32",
        "matmul bf16",
        "attention f32",
        "causal f32",
        "conv f32",
        "memory",
        "elements",
        "update",
    }
    assert all(work > 0 and rate > 0 for curve in rates.values() for work, rate in curve)
    assert cluster.device.flops["f32"] == max(rate for _, rate in rates["matmul f32"])
    # No processor core computes slower than this or faster than that, whatever else it does meanwhile.
    assert 1e8 < cluster.device.flops["f32"] < 1e13
    assert 1e-7 < cluster.device.launch_seconds < 1e-3
    links = cluster.measured.collectives["rank"]
    assert set(links) == set(PRICED)
    assert all(latency > 0 and 1e4 < rate < 1e12 for latency, rate in links.values())
    waited = cluster.measured.waited["rank"]
    assert set(waited) == set(PRICED) - {"send"}
    assert all(latency > 0 and 1e4 < rate < 1e12 for latency, rate in waited.values())
    assert set(cluster.measured.slowdown) == {"compute", "collective"}
    assert all(factor >= 1 for factor in cluster.measured.slowdown.values())
    for name in (*rates, *PRICED, *WAITED):
        assert name in done.stdout
    assert "here.yaml written after" in done.stdout
    assert "not for planning" in (tmp_path / "here.yaml").read_text()


@pytest.mark.full
def test_two_machines_measure_the_link_between_them(tmp_path: Path) -> None:
    with machines(2) as found:
        command = [
            sys.executable,
            "-m",
            "meshwright.cli",
            "calibrate",
            "--quick",
            "--nproc",
            "1",
            "--nnodes",
            "2",
        ]
        at = ["--master", f"{found[0].address}:29400", "--insecure"]
        started = [
            subprocess.Popen(
                [*machine.prefix, *command, *at, "--node-rank", str(n), "-o", f"{n}.yaml"],
                cwd=tmp_path,
                stdout=subprocess.DEVNULL,
            )
            for n, machine in enumerate(found)
        ]
        assert [process.wait(200) for process in started] == [0, 0]
    cluster = Cluster.load(tmp_path / "0.yaml")
    assert [(level.name, level.size) for level in cluster.levels] == [("node", 2)]
    assert set(cluster.measured.collectives["node"]) == set(PRICED)
    assert not (tmp_path / "1.yaml").exists()


def test_a_rank_that_fails_ends_it_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(FAILING)
    done = calibrate(tmp_path, "--nproc", "2", "-o", "c.yaml", path=str(tmp_path / "path"))
    assert done.returncode == 1
    assert "rank 1" in done.stderr and "rank 1 has no memory left" in done.stderr
    assert "nothing was written to c.yaml" in done.stderr
    assert not (tmp_path / "c.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--nproc", "0"), "--nproc is 0"),
        (("--nproc", "two"), "--nproc is 'two'"),
        (("--nproc", "100000"), "more than 8 ranks on a core"),
        (("-o", "no/such/folder/c.yaml"), "cannot be written to no/such/folder/c.yaml"),
        (("-o", "."), "it is a folder"),
    ],
)
@quick(lambda arguments, says: arguments[1] not in ("two", "."))  # wrong in other ways than these
def test_mistakes_are_told_before_anything_is_measured(tmp_path: Path, arguments, says: str) -> None:
    done = calibrate(tmp_path, *arguments)
    assert done.returncode == 2
    assert says in done.stderr and "Traceback" not in done.stderr
