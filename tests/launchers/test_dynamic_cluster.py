"""Processes that nobody but the user starts: workers in any order, and a scheduler that ends with the job."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.errors import LaunchError
from meshwright.launchers import launched
from meshwright.launchers.dynamic_cluster import Told, read

WORKER = {
    "MS_ROLE": "MS_WORKER",
    "MS_SCHED_HOST": "127.0.0.1",
    "MS_SCHED_PORT": "8118",
    "MS_WORKER_NUM": "2",
}
SCRIPT = """
import sys
import torch
import meshwright as mw

world = mw.world()
total = world.all_reduce(torch.tensor([2.0**world.rank]), tuple(world.mesh.sizes))
if world.rank == 1 and "fail" in sys.argv:
    raise ValueError("bad batch")
print(world.rank, total.item())
mw.shutdown()
"""


def test_what_is_read() -> None:
    told = Told("MS_WORKER", "127.0.0.1", 8118, 2, "3", 5, 20, True)
    assert read({**WORKER, "MS_SERVER_NUM": "2"}).servers == 2
    more = {"MS_NODE_ID": "3", "MS_TOPO_TIMEOUT": "5", "MS_NODE_TIMEOUT": "20", "MS_ENABLE_RECOVERY": "1"}
    assert read({**WORKER, **more}) == told


@pytest.mark.parametrize(
    ("environment", "what"),
    [
        ({**WORKER, "MS_ROLE": "MS_SERVER"}, "MS_ROLE is 'MS_SERVER'"),
        ({**WORKER, "MS_ROLE": "MS_PSERVER"}, "MS_ROLE is MS_PSERVER, and MS_SERVER_NUM is not set"),
        (
            {**WORKER, "MS_SERVER_NUM": "1", "MESHWRIGHT_REPLICAS": "1"},
            "MESHWRIGHT_REPLICAS is 1, and MS_SERVER",
        ),
        ({**WORKER, "MS_SCHED_HOST": ""}, "MS_ROLE is set, MS_SCHED_HOST is not"),
        ({**WORKER, "MS_WORKER_NUM": ""}, "MS_ROLE is set, MS_WORKER_NUM is not"),
        ({**WORKER, "MS_SCHED_PORT": "80"}, "MS_SCHED_PORT is 80"),
        ({**WORKER, "MS_WORKER_NUM": "two"}, "MS_WORKER_NUM is 'two'"),
        (WORKER, "MS_ROLE is set, and there is no secret"),
        (
            {**WORKER, "MS_SCHED_HOST": "nowhere.invalid", "MESHWRIGHT_INSECURE": "1"},
            "the host nowhere.invalid is unknown",
        ),
        ({"MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1"}, "MS_WORKER_NUM is set, MS_ROLE is not"),
        ({**WORKER, "RANK": "0", "WORLD_SIZE": "2"}, "two launchers at once: torchrun .* and MS_ROLE"),
    ],
)
def test_half_of_a_cluster_is_refused(
    environment: dict[str, str], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MESHWRIGHT_SECRET", "MESHWRIGHT_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LaunchError, match=what):
        launched(environment)


class Cluster:
    """Processes of one job, which are started by hand."""

    def __init__(self, folder: Path, script: str, **env: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        own = {
            "MS_SCHED_PORT": str(port),
            "MESHWRIGHT_SECRET": "a secret that is long enough",
            "OMP_NUM_THREADS": "1",
        }
        self.folder, self.script, self.env = folder, script, {**os.environ, **WORKER, **own, **env}
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *words: str, **env: str) -> subprocess.Popen[str]:
        made = subprocess.Popen(
            [sys.executable, self.script, *words],
            cwd=self.folder,
            env={**self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(made)
        return made

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


@pytest.mark.procs
def test_workers_come_in_any_order_and_again_after_a_failure(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    cluster = Cluster(tmp_path, "script.py", MS_ENABLE_RECOVERY="1")
    start = cluster.start
    workers = [start("fail", MS_NODE_ID=node) for node in ("1", "0")]
    scheduler = start(MS_ROLE="MS_SCHED")
    said = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [1, 1], said
    assert "rank 1 failed: ValueError: bad batch" in said[1][1]  # rank 0 says why, too
    workers = [start(MS_NODE_ID=node) for node in ("1", "0")]
    assert [worker.communicate(timeout=120)[0] for worker in workers] == ["1 3.0\n", "0 3.0\n"]
    assert scheduler.wait(60) == 0
    scheduler.communicate()


@pytest.mark.full
@pytest.mark.procs
def test_parameter_servers_are_processes_of_the_user(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    script = root / "tests/servers/same_script.py"
    cluster = Cluster(tmp_path, str(script), MS_SERVER_NUM="2", PYTHONPATH=str(root))
    mode = ("parameter_server", "all")
    try:
        workers = [cluster.start(*mode, MS_NODE_ID=node) for node in "01"]
        servers = [cluster.start(*mode, MS_ROLE="MS_PSERVER", MS_NODE_ID=node) for node in "01"]
        scheduler = cluster.start(*mode, MS_ROLE="MS_SCHED")
        for worker in workers:
            out, err = worker.communicate(timeout=120)
            assert "equal to one device: ServerStep" in out, err
        ends = [server.communicate(timeout=60) for server in servers]
        assert [server.returncode for server in servers] == [0, 0], ends
        assert {out.split(":")[0] for out, _ in ends} == {f"parameter server {n} of 2" for n in "01"}
        assert scheduler.wait(60) == 0
    finally:
        cluster.end()


@pytest.mark.procs
@pytest.mark.full
@pytest.mark.timeout(240)
def test_a_killed_server_begins_from_its_copy(tmp_path: Path) -> None:
    """Nothing is on a disk: it is started again under its name, as on another machine."""
    root = Path(__file__).parents[2]
    settings = {
        "MS_SERVER_NUM": "2",
        "MESHWRIGHT_REPLICAS": "1",
        "MS_WORKER_NUM": "1",
        "PYTHONPATH": str(root),
    }
    cluster = Cluster(tmp_path, str(root / "tests/servers/elastic.py"), **settings)
    words = ("600", "2", "0.2", str(tmp_path))
    try:
        cluster.start(*words, MS_ROLE="MS_SCHED")
        servers = [cluster.start(*words, MS_ROLE="MS_PSERVER", MS_NODE_ID=node) for node in "ab"]
        worker = cluster.start(*words, MS_NODE_ID="0")
        assert worker.stdout is not None
        said = [next(worker.stdout) for _ in range(8)]
        assert said[-1].startswith("step 8 "), said
        for killed, node in zip(servers, "ab", strict=True):
            killed.kill()
            killed.communicate()
            cluster.start(*words, MS_ROLE="MS_PSERVER", MS_NODE_ID=node)
            said += [next(worker.stdout) for _ in range(4)]
        (tmp_path / "fast").touch()
        out, err = worker.communicate(timeout=120)
        assert "each sample was trained 2 times: True" in out, err
    finally:
        cluster.end()


@pytest.mark.procs
@pytest.mark.full
def test_a_server_too_many_is_refused(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    cluster = Cluster(
        tmp_path, str(root / "tests/servers/same_script.py"), MS_SERVER_NUM="1", PYTHONPATH=str(root)
    )
    try:
        cluster.start("parameter_server", MS_ROLE="MS_SCHED")
        servers = [cluster.start("parameter_server", MS_ROLE="MS_PSERVER") for _ in range(2)]
        ended = []
        while not ended:
            ended = [server for server in servers if server.poll() is not None]
            time.sleep(0.05)
        _, err = ended[0].communicate()
        assert "is one too many" in err and "MS_SERVER_NUM" in err
    finally:
        cluster.end()
