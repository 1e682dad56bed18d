"""Parameter servers as pods, on a real API server with nodes that run pods as processes: ``make k8s-test``."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.k8s import control_plane
from tests.k8s.control_plane import eventually
from tests.k8s.jobs import CORE, ENV, JOBS, MARKS, OURS, TRAINED, Job, hurried, trained
from tests.k8s.training import alone

pytestmark = [*MARKS, OURS]
ELASTIC = control_plane.ROOT / "tests/servers/elastic.py"


def change(job: Job, **roles: int) -> None:
    """Change the replicas of roles."""
    spec = {role: {"replicas": count} for role, count in roles.items()}
    assert job.cluster.ask("PATCH", f"{JOBS}/{job.name}", {"spec": spec})[0] == 200


def servers(job: Job) -> dict[str, Any]:
    return job.status.get("servers", {})


def equal_to_torch(folder: Path, steps: int = TRAINED) -> None:
    """The mean of the losses of both workers' shares is the loss of one device."""
    shares = [json.loads((folder / f"losses{rank}.json").read_text()) for rank in (0, 1)]
    means = [sum(pair) / 2 for pair in zip(*shares, strict=True)]
    assert means == pytest.approx(alone(steps), rel=1e-4) and len(means) == steps


def test_workers_and_servers_scale_while_training_goes_on_and_no_row_is_lost(cluster, figures, tmp_path):
    """Workers 2 → 4 → 2, servers 2 → 3 → 2; a server's process and a worker's are killed between."""
    command = [str(ELASTIC), "3000", "2", "0.3", str(tmp_path)]
    workers = {"replicas": 2, "independent": True, "container": {"env": ENV}}
    job = Job(cluster, "elastic", command, workers, servers={"replicas": 2, "container": {"env": ENV}})
    job.runs(2, servers=2)
    figures["apply to all pods running, with servers"] = time.monotonic() - job.applied
    job.steps()
    began = {name: job.uid(name) for name in ("worker-0", "worker-1", "server-0", "server-1")}
    start = time.monotonic()
    cluster.kubectl("scale", "paralleljob/elastic", "--replicas=4")
    job.runs(4, servers=2)
    figures["scale independent workers to 4 running"] = time.monotonic() - start
    eventually(lambda: all((tmp_path / f"worker{n}").exists() for n in range(4)), "all four train")
    figures["scale independent workers to 4 training"] = time.monotonic() - start
    start = time.monotonic()
    change(job, servers=3)
    eventually(lambda: servers(job).get("spread") == 3, "the parameters are on three servers")
    figures["scale servers to 3, parameters moved"] = time.monotonic() - start
    job.steps("servers 3")
    job.kill("server-1")
    eventually(
        lambda: job.pod("server-1")["status"]["containerStatuses"][0]["restartCount"] == 1, "it starts again"
    )
    start = time.monotonic()
    change(job, workers=2)
    job.runs(2, servers=3)
    figures["scale independent workers to 2 running"] = time.monotonic() - start
    change(job, servers=2)
    eventually(lambda: servers(job) == {"first": 2, "spread": 2, "moving": 0}, "they are on two again")
    job.runs(2, servers=2)
    job.steps("servers 2")
    assert {name: job.uid(name) for name in began} == began
    assert job.status.get("restarts", 0) == 0, job.status["conditions"]
    hurried(job, tmp_path)
    assert "each sample was trained 2 times: True" in job.log()
    eventually(lambda: len(job.objects("pods")) == 2, "servers and scheduler are deleted")
    job.delete()


def test_a_server_is_killed_and_training_goes_on_as_on_one_device(cluster, figures, tmp_path):
    job = trained(cluster, "killed", tmp_path, "parameter_server", servers={"replicas": 2})
    job.runs(2, servers=2)
    before = {p["metadata"]["name"]: p["metadata"]["uid"] for p in job.objects("pods")}
    for number, name in ((12, "server-1"), (24, "server-0")):
        job.reaches(number)
        start = time.monotonic()
        job.kill(name)
        last = job.log("--tail=1")
        eventually(lambda old=last: job.log("--tail=1") != old, "it goes on")
        figures[f"kill -9 of {name} to the next step"] = time.monotonic() - start
    assert {p["metadata"]["name"]: p["metadata"]["uid"] for p in job.objects("pods")} == before
    hurried(job, tmp_path)
    equal_to_torch(tmp_path)
    job.delete()


@pytest.mark.parametrize("kept", ["copies", "state"])
def test_a_server_s_pod_is_lost_and_training_goes_on_as_on_one_device(cluster, figures, tmp_path, kept):
    of: dict[str, Any] = {"replicas": 2, "copies": 1}
    if kept == "state":
        mount = {"volumeMounts": [{"name": "s", "mountPath": "/all-values"}]}
        volumes = [{"name": "s", "hostPath": {"path": str(tmp_path)}}]
        of = {"replicas": 2, "state": "/all-values/of-jobs", "container": mount, "pod": {"volumes": volumes}}
    job = trained(cluster, f"lost-{kept}", tmp_path, "parameter_server", servers=of)
    job.runs(2, servers=2)
    job.reaches(12)
    uid, start = job.uid("server-1"), time.monotonic()
    cluster.ask("DELETE", f"{CORE}/pods/lost-{kept}-server-1?gracePeriodSeconds=0")
    job.replaced("server-1", uid)
    figures[f"a server's pod deleted to its replacement running ({kept})"] = time.monotonic() - start
    hurried(job, tmp_path)
    assert job.status["round"] == 1
    equal_to_torch(tmp_path)
    job.delete()


def test_without_copies_a_lost_server_begins_another_round(cluster, tmp_path):
    job = trained(cluster, "anew", tmp_path, "parameter_server", servers={"replicas": 2})
    job.runs(2, servers=2)
    job.reaches(12)
    cluster.ask("DELETE", f"{CORE}/pods/anew-server-1")
    eventually(lambda: job.status.get("round") == 2, "another round begins")
    hurried(job, tmp_path)
    equal_to_torch(tmp_path)
    job.delete()


def test_a_paused_job_goes_on_with_the_values_of_its_servers(cluster, tmp_path):
    """No sample is lost or trained twice, though all pods were made anew."""
    mount = {"volumeMounts": [{"name": "s", "mountPath": "/all-values"}], "env": ENV}
    volumes = [{"name": "s", "hostPath": {"path": str(tmp_path)}}]
    of = {"replicas": 2, "state": "/all-values", "container": mount, "pod": {"volumes": volumes}}
    command = [str(ELASTIC), "1500", "2", "0.1", str(tmp_path)]
    workers = {"replicas": 2, "independent": True, "container": {"env": ENV}}
    job = Job(cluster, "pauses", command, workers, servers=of)
    job.runs(2, servers=2)
    job.reaches(20)
    for suspend in (True, False):
        cluster.ask("PATCH", f"{JOBS}/pauses", {"spec": {"suspend": suspend}})
        job.is_in("Suspended") if suspend else job.runs(2, servers=2)
        if suspend:
            eventually(lambda: not job.objects("pods"), "no pod is left")
    hurried(job, tmp_path)
    assert "each sample was trained 2 times: True" in job.log()
    job.delete()
