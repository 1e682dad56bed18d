"""The operator on a real API server, with nodes that run pods as processes: ``make k8s-test``.

Times are written to build/k8s.json; none of them is a bound here, since a busy machine has its own.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s import control_plane
from tests.k8s.bad_jobs import bad_jobs
from tests.k8s.control_plane import Cluster, eventually
from tests.k8s.training import alone

pytestmark = [
    pytest.mark.slow,
    pytest.mark.procs,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(control_plane.MISSING), reason=control_plane.MISSING),
]
JOBS = "/apis/meshwright.dev/v1alpha1/namespaces/default/paralleljobs"
CORE = "/api/v1/namespaces/default"
FIGURES = control_plane.ROOT / "build/k8s.json"
STEPS = """
import os, pathlib, sys, time
end, n = pathlib.Path(sys.argv[1]), 0
while not end.exists():
    n += 1
    if os.environ["RANK"] == "0":
        print(f"step {n} loss {10 / n:.3f} of {os.environ['WORLD_SIZE']}", flush=True)
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with control_plane.running(tmp_path_factory.mktemp("k8s")) as found:
        found.start_operator()
        yield found


@pytest.fixture(scope="module")
def figures() -> Iterator[dict[str, float]]:
    """Seconds, by what was measured."""
    found: dict[str, float] = {}
    yield found
    FIGURES.parent.mkdir(exist_ok=True)
    FIGURES.write_text(json.dumps({name: round(value, 3) for name, value in found.items()}, indent=2) + "\n")


class Job:
    """A job of this test, and what the API server says of it."""

    def __init__(self, cluster: Cluster, name: str, command: list[str], workers: Any, **spec: Any) -> None:
        self.cluster, self.name = cluster, name
        workers = {"replicas": workers} if isinstance(workers, int) else workers
        version = {"apiVersion": "meshwright.dev/v1alpha1", "kind": "ParallelJob"}
        spec = {"image": "x", "command": command, "workers": workers, **spec}
        self.applied = time.monotonic()
        status, answer = cluster.ask("POST", JOBS, {**version, "metadata": {"name": name}, "spec": spec})
        assert status == 201, answer

    @property
    def status(self) -> dict[str, Any]:
        return (self.cluster.get(f"{JOBS}/{self.name}") or {}).get("status", {})

    def objects(self, kind: str) -> list[dict[str, Any]]:
        return self.cluster.get(f"{CORE}/{kind}?labelSelector=meshwright.dev/job={self.name}")

    def pod(self, name: str) -> dict[str, Any]:
        return self.cluster.get(f"{CORE}/pods/{self.name}-{name}") or {}

    def uid(self, name: str) -> str:
        return self.pod(name).get("metadata", {}).get("uid", "")

    def runs(self, workers: int) -> None:
        """Wait until so many workers, and only these, run."""

        def all_run() -> bool:
            phases = [p["status"].get("phase") for p in self.objects("pods")]
            return (
                phases == ["Running"] * (workers + 1) and self.status.get("ready") == f"{workers}/{workers}"
            )

        eventually(all_run, f"{self.name} has {workers} running workers")

    def is_in(self, state: str) -> None:
        eventually(lambda: self.status.get("state") == state, f"{self.name} is {state}")

    def replaced(self, name: str, uid: str) -> None:
        """Wait for another pod under the name of one."""

        def other() -> bool:
            pod = self.pod(name)
            return bool(pod) and pod["metadata"]["uid"] != uid and pod["status"].get("phase") == "Running"

        eventually(other, f"{name} of {self.name} is replaced")

    def kill(self, name: str) -> str:
        """Kill the process of a pod; returns the pod's uid."""
        uid = self.uid(name)
        os.kill(self.cluster.pid(f"{self.name}-{name}"), signal.SIGKILL)
        return uid

    def log(self, *words: str) -> str:
        return self.cluster.kubectl("logs", f"{self.name}-worker-0", *words, check=False).stdout

    def steps(self, text: str = "step ") -> None:
        """Wait until the first worker prints a line with a text."""
        eventually(lambda: text in self.log("--tail=20"), f"{self.name} prints {text!r}")

    def nothing_is_left(self) -> None:
        eventually(
            lambda: not any(self.objects(kind) for kind in ("pods", "secrets", "services")),
            f"nothing of {self.name} is left",
        )

    def delete(self) -> None:
        self.cluster.ask("DELETE", f"{JOBS}/{self.name}")
        self.nothing_is_left()


@pytest.fixture
def stepping(cluster: Cluster, tmp_path: Path) -> Iterator[Any]:
    """Makes jobs that print steps until the file `end` is there."""
    script, made = tmp_path / "steps.py", []
    script.write_text(STEPS)

    def make(name: str, workers: int = 2, **spec: Any) -> Job:
        made.append(Job(cluster, name, [str(script), str(tmp_path / "end")], workers, **spec))
        return made[-1]

    yield make
    for job in made:
        job.delete()


def trained(cluster: Cluster, name: str, folder: Path, steps: int, workers: int = 2) -> Job:
    """A job that trains and saves; see `training.py`."""
    command = [str(Path(__file__).with_name("training.py")), str(folder), str(steps), "0.1"]
    one_thread = {
        "env": [
            {"name": "OMP_NUM_THREADS", "value": "1"},
            {"name": "PYTHONPATH", "value": str(control_plane.ROOT)},
        ]
    }
    return Job(cluster, name, command, {"replicas": workers, "container": one_thread})


def equal_to_torch(folder: Path, steps: int) -> None:
    found = json.loads((folder / "losses.json").read_text())
    assert found == pytest.approx(alone(steps), rel=1e-4) and len(found) == steps


# ---------------------------------------------------------------- life and end of a job


def test_a_job_from_its_file_to_its_end(cluster, stepping, figures, tmp_path):
    job = stepping("life", ttlSecondsAfterFinished=1)
    job.runs(2)
    figures["apply to all pods running"] = time.monotonic() - job.applied
    job.steps()
    eventually(lambda: job.status.get("step"), "the status has a step")
    shown = cluster.kubectl("get", "paralleljobs").stdout.split("\n")
    assert shown[0].split() == ["NAME", "STATE", "WORKERS", "STEP", "LOSS", "RESTARTS", "AGE"]
    assert next(line for line in shown if line.startswith("life")).split()[:3] == ["life", "Running", "2/2"]
    assert job.log("--tail=1").count("\n") == 1 and " loss " in job.log("--tail=1")
    (tmp_path / "end").touch()
    job.is_in("Succeeded")
    eventually(lambda: cluster.get(f"{JOBS}/life") is None, "the job is deleted when its time is over")
    job.nothing_is_left()


def test_workers_that_start_together_are_a_pod_group(cluster, stepping):
    """With the resource of scheduler-plugins, without its scheduler."""
    group, schema = "scheduling.x-k8s.io", {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1alpha1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"kind": "PodGroup", "plural": "podgroups"}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"podgroups.{group}",
            "annotations": {"api-approved.kubernetes.io": "unapproved"},
        },
        "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [version]},
    }
    cluster.apply(definition)
    path = f"/apis/{group}/v1alpha1/namespaces/default/podgroups"
    eventually(lambda: cluster.get(path) is not None, "pod groups are known")
    job = stepping("gang", {"replicas": 2, "gang": True, "pod": {"schedulerName": "default-scheduler"}})
    job.runs(2)
    assert cluster.get(f"{path}/gang-1")["spec"] == {"minMember": 2}
    job.delete()
    eventually(lambda: cluster.get(f"{path}/gang-1") is None, "the group is deleted with its job")


def test_a_script_that_fails_is_started_again_and_then_the_job_fails(cluster, tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("print('begins'); raise ValueError('no data')")
    job = Job(cluster, "fails", [str(script)], 2, backoffLimit=1)
    job.is_in("Failed")
    failed = next(c for c in job.status["conditions"] if c["type"] == "Failed")
    assert failed["reason"] == "WorkerFailed" and "exit code 1" in failed["message"]
    assert "ValueError: no data" in job.log() and "attempt 2 of 2" in job.log()
    job.delete()


def test_a_job_is_deleted_with_all_it_has_while_no_operator_runs(cluster, stepping, figures):
    job = stepping("gone")
    job.runs(2)
    job.steps()
    cluster.kill("operator")
    began = time.monotonic()
    cluster.kubectl("delete", "paralleljob", "gone")
    job.nothing_is_left()
    figures["delete to nothing left"] = time.monotonic() - began
    cluster.start_operator()


def test_suspended_and_resumed(cluster, stepping):
    job = stepping("rests")
    job.runs(2)
    for suspend in (True, False):
        cluster.ask("PATCH", f"{JOBS}/rests", {"spec": {"suspend": suspend}})
        job.is_in("Suspended") if suspend else job.runs(2)
        if suspend:
            eventually(lambda: not job.objects("pods"), "no pod is left")
    assert job.status.get("restarts", 0) == 0


@pytest.mark.parametrize(
    ("file", "words"),
    [("demo", ["--steps", "12", "--compared", "2", "--sample", "4"]), ("recommender", ["--steps", "20"])],
)
def test_the_examples_train(cluster, tmp_path, file, words):
    """With a folder in the place of the claim, and fewer steps: the last of a repeated option counts."""
    path = control_plane.ROOT / f"examples/k8s/{file}.yaml"
    object = next(o for o in yaml.safe_load_all(path.read_text("utf-8")) if o["kind"] == "ParallelJob")
    spec = object["spec"]
    for volume in spec["workers"].get("pod", {}).get("volumes", []):
        del volume["persistentVolumeClaim"]
        volume["hostPath"] = {"path": str(tmp_path)}
    command, workers = [*spec["command"], *words], spec["workers"]
    job = Job(cluster, object["metadata"]["name"], command, workers, cleanPodPolicy="None")
    eventually(lambda: job.status.get("state") in ("Succeeded", "Failed"), "the job ends")
    assert job.status["state"] == "Succeeded", job.log()
    assert job.status["step"] == int(words[1]) and job.log().count("step ") >= 2
    job.delete()


# ---------------------------------------------------------------- what dies


def test_a_killed_worker_is_replaced_and_training_goes_on_as_on_one_device(cluster, figures, tmp_path):
    job = trained(cluster, "trains", tmp_path, 40)
    job.runs(2)
    job.steps("step 12 ")
    other = job.uid("worker-0")
    began = time.monotonic()
    uid = job.kill("worker-1")
    job.replaced("worker-1", uid)
    figures["kill -9 of a worker to its replacement running"] = time.monotonic() - began
    job.steps("step 40 ")
    job.is_in("Succeeded")
    assert job.uid("worker-0") == other, "the other worker stays"
    assert job.status["restarts"] == 1
    equal_to_torch(tmp_path, 40)
    job.delete()


def test_a_worker_dies_while_no_operator_runs(cluster, stepping, figures):
    job = stepping("repaired")
    job.runs(2)
    cluster.kill("operator")
    uid = job.kill("worker-1")
    eventually(lambda: job.pod("worker-1")["status"]["phase"] == "Failed", "the pod has failed")
    time.sleep(1)
    assert job.uid("worker-1") == uid
    began = time.monotonic()
    cluster.start_operator()
    job.replaced("worker-1", uid)
    figures["operator started to worker replaced"] = time.monotonic() - began
    job.runs(2)


def test_another_operator_takes_over_and_no_pod_notices(cluster, stepping):
    job = stepping("stays")
    job.runs(2)
    before = {p["metadata"]["uid"] for p in job.objects("pods")}
    cluster.kill("operator")
    cluster.start_operator()
    time.sleep(3)
    assert {p["metadata"]["uid"] for p in job.objects("pods")} == before


def test_a_killed_scheduler_goes_on_in_its_pod(cluster, stepping):
    job = stepping("schedules")
    job.runs(2)
    job.steps()
    before = {p["metadata"]["uid"] for p in job.objects("pods")}
    job.kill("scheduler")
    eventually(
        lambda: job.pod("scheduler")["status"]["containerStatuses"][0]["restartCount"] == 1, "it starts again"
    )
    job.runs(2)
    assert {p["metadata"]["uid"] for p in job.objects("pods")} == before and job.status.get("round") == 1
    uid = job.kill("worker-1")  # and it still knows its job: all begin again
    job.replaced("worker-1", uid)
    eventually(lambda: job.log().count("step 1 ") == 2, "both ranks have begun again")


def test_a_drained_worker_comes_again_and_the_others_wait(cluster, stepping):
    job = stepping("drained")
    job.runs(2)
    job.steps()
    uid, other = job.uid("worker-1"), job.uid("worker-0")
    cluster.ask("DELETE", f"{CORE}/pods/drained-worker-1")
    job.replaced("worker-1", uid)
    eventually(lambda: job.log().count("step 1 ") == 2, "both ranks have begun again")
    assert job.uid("worker-0") == other


def test_the_pods_of_a_lost_node_go_elsewhere(cluster, stepping, figures):
    job = stepping("moves", nodeLossSeconds=1)
    job.runs(2)
    where = {name: job.pod(name)["spec"]["nodeName"] for name in ("worker-0", "worker-1", "scheduler")}
    lost = "node-b" if where["scheduler"] == "node-a" else "node-a"
    moved = [name for name, node in where.items() if node == lost]
    assert moved, "the scheduler spreads pods over nodes"
    uid = job.uid(moved[0])
    began = time.monotonic()
    cluster.kill(lost)
    job.replaced(moved[0], uid)
    figures["node lost (noticed after 4 s, given up after 1 s) to its pod elsewhere"] = (
        time.monotonic() - began
    )
    assert job.pod(moved[0])["spec"]["nodeName"] != lost
    job.runs(2)
    cluster.start_node(lost)
    eventually(lambda: not cluster.get(f"/api/v1/nodes/{lost}")["spec"].get("taints"), "the node is back")


# ---------------------------------------------------------------- another size, two operators, bad resources


def test_workers_scale_and_training_goes_on_as_on_one_device(cluster, figures, tmp_path):
    job = trained(cluster, "scales", tmp_path, 60)
    job.runs(2)
    job.steps("step 8 ")
    for workers in (4, 2):
        began = time.monotonic()
        cluster.kubectl("scale", "paralleljob/scales", f"--replicas={workers}")
        job.runs(workers)
        figures[f"scale to {workers} workers running"] = time.monotonic() - began
        job.steps(f" ranks {workers}")
        figures[f"scale to {workers} workers' first step"] = time.monotonic() - began
        first = int(next(line for line in job.log().splitlines() if line.startswith("step ")).split()[1])
        assert first > 8, "it goes on from a checkpoint"
        time.sleep(1)
    job.is_in("Succeeded")
    assert job.status.get("restarts", 0) == 0
    equal_to_torch(tmp_path, 60)
    job.delete()


def test_two_operators_at_once_do_no_harm(cluster, stepping):
    cluster.start_operator("second")
    try:
        jobs = [stepping(f"twice-{n}") for n in range(4)]
        for job in jobs:
            job.runs(2)
        for killed in (1, 2):
            uids = [job.kill("worker-1") for job in jobs]
            for job, uid in zip(jobs, uids, strict=True):
                job.replaced("worker-1", uid)
                job.runs(2)
                assert (job.status["restarts"], job.status["round"]) == (killed, 1)
    finally:
        cluster.kill("second")


def test_bad_resources_are_refused(cluster):
    """By the schema, or by a condition that says why; and none of them makes a pod."""
    taken = []
    for name, object in bad_jobs():
        status, answer = cluster.ask("POST", f"{JOBS}?dryRun=All", object)
        if status < 400:
            taken.append((name, object))
        else:
            assert status == 422 and "invalid" in answer["message"].lower(), (name, answer["message"])
    for number, (name, object) in enumerate(taken):
        object["metadata"]["name"] = f"bad-{number}"
        assert cluster.ask("POST", JOBS, object)[0] == 201
        reason = eventually(
            lambda n=number: [
                c["message"]
                for c in (cluster.get(f"{JOBS}/bad-{n}").get("status") or {}).get("conditions", [])
                if c["type"] == "Valid" and c["status"] == "False"
            ],
            f"a condition says what is wrong with {name}",
        )
        assert reason[0], name
        cluster.ask("DELETE", f"{JOBS}/bad-{number}")
    assert len(taken) < 20, "most are refused before an operator sees them"
    assert not [p for p in cluster.get(f"{CORE}/pods") if p["metadata"]["name"].startswith("bad-")]


@pytest.mark.parametrize(
    "path", ["spec.workres", "spec.workers.replica", "spec.servers", "spec.scheduler.ports", "sepc"]
)
def test_a_field_that_is_none_is_refused_by_kubectl(cluster, path):
    object: Any = next(bad_jobs())[1]
    object = json.loads(json.dumps(object)) | {"metadata": {"name": "typo"}}
    object["spec"] = {"image": "x", "command": ["t.py"], "workers": {"replicas": 1}, "scheduler": {}}
    at = object
    *parents, last = path.split(".")
    for name in parents:
        at = at[name]
    at[last] = {"replicas": 1}
    done = cluster.apply(object, check=False)
    assert done.returncode and f'unknown field "{last}"' in done.stderr
