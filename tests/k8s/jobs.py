"""Jobs of the tests that run on a real API server, and the marks of these tests."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.k8s import control_plane, given_cluster
from tests.k8s.control_plane import NAMESPACE, Cluster, eventually
from tests.k8s.training import alone

MARKS = [
    pytest.mark.slow,
    pytest.mark.procs,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(control_plane.MISSING) and not given_cluster.IMAGE, reason=control_plane.MISSING),
]
OURS = pytest.mark.skipif(bool(given_cluster.IMAGE), reason="pods have to be processes of this machine")
JOBS = f"/apis/meshwright.dev/v1alpha1/namespaces/{NAMESPACE}/paralleljobs"
CORE = f"/api/v1/namespaces/{NAMESPACE}"
TRAINED = 150  # steps of a job that trains
STEPS = """
import os, sys, time
for n in range(1, int(sys.argv[1]) + 1):
    if os.environ["RANK"] == "0":
        print(f"step {n} loss {10 / n:.3f} of {os.environ['WORLD_SIZE']}", flush=True)
    time.sleep(0.02)
"""


class Job:
    """A job of this test, and what the API server says of it."""

    def __init__(self, cluster: Cluster, name: str, command: list[str], workers: Any, **spec: Any) -> None:
        self.cluster, self.name = cluster, name
        workers = {"replicas": workers} if isinstance(workers, int) else workers
        version = {"apiVersion": "meshwright.dev/v1alpha1", "kind": "ParallelJob"}
        spec = {"image": cluster.image, "command": command, "workers": workers, **spec}
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

    def runs(self, workers: int, servers: int = 0) -> None:
        """Wait until so many workers and servers, and only these, run."""

        def all_run() -> bool:
            phases = [p["status"].get("phase") for p in self.objects("pods")]
            all_there = phases == ["Running"] * (1 + workers + servers)
            return all_there and self.status.get("ready") == f"{workers}/{workers}"

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

    def reaches(self, step: int) -> None:
        """Wait until the first worker has printed a step, or one after it."""

        def there() -> bool:
            found = re.findall(r"^step (\d+) ", self.log("--tail=20"), re.MULTILINE)
            return bool(found) and int(found[-1]) >= step

        eventually(there, f"{self.name} is at step {step}")

    def nothing_is_left(self) -> None:
        eventually(
            lambda: not any(self.objects(kind) for kind in ("pods", "secrets", "services", "configmaps")),
            f"nothing of {self.name} is left",
        )

    def delete(self) -> None:
        self.cluster.ask("DELETE", f"{JOBS}/{self.name}")
        self.nothing_is_left()


ENV = [
    {"name": "OMP_NUM_THREADS", "value": "1"},
    {"name": "PYTHONPATH", "value": str(control_plane.ROOT)},
]


def with_script(cluster: Cluster, name: str, script: str, words: list[str], workers: Any, **spec: Any) -> Job:
    """A job whose script is in a ConfigMap, and so in every cluster."""
    metadata = {"name": f"script-of-{name}"}
    cluster.ask("POST", f"{CORE}/configmaps", {"metadata": metadata, "data": {"run.py": script}})
    given = {"replicas": workers} if isinstance(workers, int) else workers
    container, pod = given.get("container", {}), given.get("pod", {})
    mount = {"name": "script", "mountPath": "/script-of-job"}
    workers = {
        **given,
        "container": {**container, "volumeMounts": [mount]},
        "pod": {**pod, "volumes": [{"name": "script", "configMap": metadata}]},
    }
    return Job(cluster, name, ["/script-of-job/run.py", *words], workers, **spec)


def trained(
    cluster: Cluster,
    name: str,
    folder: Path,
    mode: str = "data_parallel",
    steps: int = TRAINED,
    seconds: float = 0.2,
    **spec: Any,
) -> Job:
    """A job of two workers that trains and saves, with a pause after each step until it is `hurried`; see
    `training.py`."""
    command = [str(Path(__file__).with_name("training.py")), str(folder), str(steps), str(seconds), mode]
    return Job(cluster, name, command, {"replicas": 2, "container": {"env": ENV}}, **spec)


def hurried(job: Job, folder: Path) -> None:
    """Let a job train to its end without pauses."""
    (folder / "fast").touch()
    job.is_in("Succeeded")


def equal_to_torch(folder: Path, steps: int = TRAINED) -> None:
    found = json.loads((folder / "losses.json").read_text())
    assert found == pytest.approx(alone(steps), rel=1e-4) and len(found) == steps
