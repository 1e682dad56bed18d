"""A job on a Ray cluster of two nodes, which are processes of this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.full]
ROOT = Path(__file__).parents[2]
CLUSTER = """
import sys
import ray
from ray.cluster_utils import Cluster
from meshwright.launch.on_ray import main

cluster = Cluster()
for _ in range(2):
    cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
ray.init(address=cluster.address)
sys.exit(main(sys.argv[1:]))
"""
SCRIPT = """
import os
import sys
import meshwright as mw

world = mw.world()
print(f"rank {world.rank} of {os.environ['WORLD_SIZE']}, node {os.environ['GROUP_RANK']}", flush=True)
mw.shutdown()
sys.exit(int(sys.argv[1]) if world.rank == 3 else 0)
"""


@pytest.mark.parametrize("code", [0, 3])
def test_a_job_on_two_nodes_of_ray(tmp_path, code):
    pytest.importorskip("ray", reason="Ray is no dependency")
    files = {"cluster.py": CLUSTER, "train.py": SCRIPT}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    words = ["--nnodes", 2, "--nproc", 2, tmp_path / "train.py", code]
    command = [sys.executable, tmp_path / "cluster.py", *words]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=240, cwd=ROOT, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "rank 0 of 4, node 0" in done.stdout + done.stderr
