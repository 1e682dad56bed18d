"""Workers that start all or none: as a pod group, or in a queue of Kueue."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("kopf")

from meshwright.k8s.operator import Followed, Operator
from tests.k8s.one_job import JOB, PODS, condition, ended, start, started, with_job


def test_workers_that_start_together_are_a_pod_group():
    async def do(server: Any, operator: Operator) -> None:
        await started(server, operator)
        group = f"demo-{server.objects[JOB]['metadata']['uid'][:8]}-1"
        path = f"/apis/scheduling.x-k8s.io/v1alpha1/namespaces/default/podgroups/{group}"
        assert server.objects[path]["spec"] == {"minMember": 2}
        labels = {
            name: server.objects[f"{PODS}/{name}"]["metadata"]["labels"] for name in server.names("pods")
        }
        members = [name for name, of in labels.items() if of.get("scheduling.x-k8s.io/pod-group") == group]
        assert members == ["demo-worker-0", "demo-worker-1"]

    with_job(do, workers={"replicas": 2, "gang": True, "pod": {"schedulerName": "together"}})


def queues(server: Any, *, admits: bool) -> None:
    """Be Kueue: its webhook, and then what it does with workers that it admits."""
    for path, pod in server.objects.items():
        labels = pod["metadata"].get("labels", {})
        if "kueue.x-k8s.io/queue-name" in labels and "status" not in pod:
            pod["metadata"].setdefault("finalizers", ["kueue.x-k8s.io/managed"])
            pod["spec"]["schedulingGates"] = [] if admits else [{"name": "kueue.x-k8s.io/admission"}]
            server.put(path, pod)


def test_workers_wait_in_a_queue_as_a_group():
    async def do(server: Any, operator: Operator) -> None:
        followed = Followed()
        for _ in range(3):
            await operator.turn("default", "demo", followed)
            queues(server, admits=False)
            for path, pod in server.objects.items():
                if "scheduler" in path:
                    pod.setdefault("status", {"phase": "Running", "podIP": "10.0.0.7"})
        status = server.objects[JOB]["status"]
        assert (status["state"], status["ready"], "startTime" in status) == ("Queued", "0/2", False)
        assert await operator.turn("default", "demo", followed) is None  # no deadline while they wait
        of = [server.objects[f"{PODS}/demo-{name}"]["metadata"] for name in ("worker-0", "worker-1")]
        group = f"demo-{server.objects[JOB]['metadata']['uid'][:8]}-1"
        for metadata in of:
            assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == "team"
            assert metadata["labels"]["kueue.x-k8s.io/pod-group-name"] == group
            assert metadata["annotations"] == {
                "kueue.x-k8s.io/pod-group-total-count": "2",
                "kueue.x-k8s.io/retriable-in-group": "false",
            }
        assert "annotations" not in server.objects[f"{PODS}/demo-scheduler"]["metadata"]
        queues(server, admits=True)
        start(server)
        assert isinstance(await operator.turn("default", "demo", followed), float)
        status = server.objects[JOB]["status"]
        assert (status["state"], status["ready"], "startTime" in status) == ("Running", "2/2", True)

    with_job(do, workers={"replicas": 2, "queue": "team"}, activeDeadlineSeconds=1)


def test_without_kueue_the_workers_of_a_queue_wait_until_it_is_installed():
    """They would start at once, and take the quota of others."""

    async def do(server: Any, operator: Operator) -> None:
        server.apis.clear()
        followed = Followed()
        again = await operator.turn("default", "demo", followed)
        assert isinstance(again, float) and not server.names("pods")
        assert server.objects[JOB]["status"]["state"] == "Refused"
        said = condition(server, "Valid")["message"]
        assert said.startswith("workers.queue is team, and the cluster has no API kueue.x-k8s.io: ")
        assert [o["message"] for path, o in server.objects.items() if "/events/" in path] == [said]
        server.apis.add("kueue.x-k8s.io")
        followed.retry_at = 0.0
        for _ in range(4):
            await operator.turn("default", "demo", followed)
            queues(server, admits=True)
            start(server)
        assert server.objects[JOB]["status"]["state"] == "Running"
        server.apis.clear()
        uid = server.objects[f"{PODS}/demo-worker-1"]["metadata"]["uid"]
        ended(server, "demo-worker-1", 137, "")
        await operator.turn("default", "demo", followed)
        assert "no API kueue.x-k8s.io" in condition(server, "Valid")["message"]
        assert server.objects[f"{PODS}/demo-worker-1"]["metadata"]["uid"] == uid

    with_job(do, workers={"replicas": 2, "queue": "team"})


def test_workers_that_kueue_did_not_hold_are_named():
    async def do(server: Any, operator: Operator) -> None:
        await started(server, operator)
        found = condition(server, "Running")
        assert (found["status"], found["reason"]) == ("True", "NotQueued")
        assert found["message"].startswith(
            "demo-worker-0 was in no queue: Kueue's integration of pods is off"
        )

    with_job(do, workers={"replicas": 2, "queue": "team"})
