"""Workers in a queue, on a real API server: ``make k8s-test``.

The queue is of `tests.k8s.kueue`. Kubernetes 1.20 has no scheduling gates: here, workers name a scheduler that does not
exist, and to admit them is to bind them to a node. The finalizer comes a moment after a pod, and not by a webhook.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.k8s.control_plane import Cluster, eventually
from tests.k8s.jobs import CORE, JOBS, MARKS, OURS, Job
from tests.k8s.kueue import Kueue, Seen

pytestmark = [*MARKS, OURS]
FINALIZER = "kueue.x-k8s.io/managed"
COUNT, GROUP = "kueue.x-k8s.io/pod-group-total-count", "kueue.x-k8s.io/pod-group-name"
HELD = {"schedulerName": "none"}  # the scheduler that workers wait for


class InCluster:
    """The queue `team`, in a thread. `kueue`: what it knows."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.kueue, self.over = cluster, Kueue(room=4), threading.Event()
        self.made: dict[str, int] = {}
        self.lock = threading.Lock()

    def run(self) -> None:
        while not self.over.wait(0.05):
            with self.lock:
                self.look()

    def look(self) -> None:
        pods = self.cluster.get(f"{CORE}/pods?labelSelector=kueue.x-k8s.io/queue-name=team")
        for pod in pods:
            metadata = pod["metadata"]
            new = metadata["uid"] not in self.made
            self.made.setdefault(metadata["uid"], len(self.made))
            if new and "deletionTimestamp" not in metadata:
                self.keep(pod, [FINALIZER])
                metadata["finalizers"] = [FINALIZER]
        released, admitted = self.kueue.look([self.seen(pod) for pod in pods])
        nodes = itertools.cycle(("node-a", "node-b"))
        for pod in pods:
            if pod["metadata"]["uid"] in released:
                self.keep(pod, [])
            elif pod["metadata"]["uid"] in admitted and not pod["spec"].get("nodeName"):
                target = {"apiVersion": "v1", "kind": "Node", "name": next(nodes)}
                body = {"apiVersion": "v1", "kind": "Binding", "metadata": pod["metadata"], "target": target}
                self.cluster.ask("POST", f"{CORE}/pods/{pod['metadata']['name']}/binding", body)

    def seen(self, pod: Any) -> Seen:
        metadata, placed = pod["metadata"], bool(pod["spec"].get("nodeName"))
        deleting, phase = "deletionTimestamp" in metadata, pod["status"]["phase"]
        return Seen(
            metadata["uid"], metadata["labels"].get(GROUP, ""), int(metadata.get("annotations", {}).get(COUNT, 1)),
            self.made[metadata["uid"]], "Failed" if deleting and not placed else phase, deleting,
            bool(metadata.get("finalizers")), placed,
        )  # fmt: skip

    def keep(self, pod: Any, finalizers: list[str]) -> None:
        metadata = {"uid": pod["metadata"]["uid"], "finalizers": finalizers}
        self.cluster.ask("PATCH", f"{CORE}/pods/{pod['metadata']['name']}", {"metadata": metadata})

    def evict(self, job: Job) -> None:
        """End the workers of a job, to make room."""
        with self.lock:
            for pod in job.objects("pods"):
                metadata = pod["metadata"]
                if GROUP in metadata["labels"]:
                    self.kueue.state[metadata["labels"][GROUP]] = "queued"
                    path = f"{CORE}/pods/{metadata['name']}"
                    ended = [*pod["status"]["conditions"], {"type": "TerminationTarget", "status": "True"}]
                    self.cluster.ask("PATCH", f"{path}/status", {"status": {"conditions": ended}})
                    self.cluster.ask("DELETE", path)


def definition() -> dict[str, Any]:
    """Of queues, as far as an API server shows that Kueue is there."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1beta1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"kind": "LocalQueue", "plural": "localqueues"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": "localqueues.kueue.x-k8s.io",
            "annotations": {"api-approved.kubernetes.io": "unapproved"},
        },
        "spec": {"group": "kueue.x-k8s.io", "scope": "Namespaced", "names": names, "versions": [version]},
    }


@pytest.fixture
def queue(cluster: Cluster) -> Iterator[InCluster]:
    cluster.apply(definition())
    eventually(lambda: cluster.get("/apis/kueue.x-k8s.io"), "the API of Kueue is there")
    made = InCluster(cluster)
    thread = threading.Thread(target=made.run)
    thread.start()
    yield made
    made.over.set()
    thread.join()


def groups(job: Job) -> set[str]:
    return {
        pod["metadata"]["labels"][GROUP] for pod in job.objects("pods") if GROUP in pod["metadata"]["labels"]
    }


def test_without_kueue_a_job_waits_until_it_is_installed(cluster, stepping, request):
    cluster.kubectl("delete", "--ignore-not-found", "crd", "localqueues.kueue.x-k8s.io")
    eventually(lambda: cluster.get("/apis/kueue.x-k8s.io") is None, "there is no Kueue")
    job = stepping("early", {"replicas": 2, "queue": "team", "pod": HELD})
    job.is_in("Refused")
    said = next(c["message"] for c in job.status["conditions"] if c["type"] == "Valid")
    assert "the cluster has no API kueue.x-k8s.io" in said and not job.objects("pods")
    request.getfixturevalue("queue")
    job.runs(2)
    assert job.pod("worker-0")["metadata"]["finalizers"] == [FINALIZER]
    job.delete()


def test_workers_wait_as_a_group_and_their_job_goes_through_all_it_may(cluster, queue, stepping):
    queue.kueue.room = 1
    job = stepping("queued", {"replicas": 2, "queue": "team", "pod": HELD})
    eventually(lambda: len(job.objects("pods")) == 3, "workers are made")
    time.sleep(1)
    assert [pod["status"]["phase"] for pod in job.objects("pods")].count("Running") == 1, "the scheduler"
    queue.kueue.room = 4
    job.runs(2)
    job.steps()
    first = groups(job)

    job.kill("worker-1")
    eventually(lambda: not job.pod("worker-1"), "the failed pod goes when another one is in its group")
    job.runs(2)
    assert job.pod("worker-1-1")["spec"]["hostname"] == "queued-worker-1" and groups(job) == first
    eventually(lambda: job.log().count("step 1 ") == 2, "both ranks have begun again")
    cluster.ask("DELETE", f"{CORE}/pods/queued-worker-1-1")  # as a drained node does
    eventually(lambda: not job.pod("worker-1-1"), "the drained pod goes, too")
    job.runs(2)
    assert (job.status["restarts"], job.status["round"], groups(job)) == (1, 1, first), (
        "to be drained is no failure"
    )

    cluster.kubectl("scale", "paralleljob/queued", "--replicas=3")
    job.runs(3)
    assert len(groups(job) | first) == 2

    restarts = job.status["restarts"]
    queue.evict(job)
    eventually(lambda: job.status["ready"] != "3/3", "they have ended")
    job.runs(3)
    assert job.status["restarts"] == restarts, "to be ended for others is no failure"

    for suspend in (True, False):
        cluster.ask("PATCH", f"{JOBS}/queued", {"spec": {"suspend": suspend}})
        if suspend:
            eventually(lambda: not job.objects("pods"), "no pod is left")
            eventually(lambda: not queue.kueue.state, "the quota is given back")
    job.runs(3)
    assert not queue.kueue.excess
    job.delete()


def test_a_job_that_waits_is_suspended_and_deleted(cluster, queue, stepping):
    queue.kueue.room = 1
    job = stepping("waits", {"replicas": 2, "queue": "team", "pod": HELD})
    for suspend in (True, False):
        eventually(lambda: len(job.objects("pods")) == 3, "workers are made")
        eventually(lambda: queue.kueue.state, "they wait as a group")
        if suspend:
            cluster.ask("PATCH", f"{JOBS}/waits", {"spec": {"suspend": True}})
            eventually(lambda: not job.objects("pods"), "no pod is left")
            cluster.ask("PATCH", f"{JOBS}/waits", {"spec": {"suspend": False}})
    job.delete()
