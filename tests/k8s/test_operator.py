"""The operator against an API server in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("kopf")

from meshwright.k8s.operator import Followed, Operator
from tests.k8s import fake

JOB = "/apis/meshwright.dev/v1alpha1/namespaces/default/paralleljobs/demo"
PODS = "/api/v1/namespaces/default/pods"


def with_job(do: Callable[[Any, Operator], Awaitable[None]], **spec: Any) -> None:
    """Run with a server that has a job of two workers."""

    async def run() -> None:
        server = fake.FakeServer()
        given = {"image": "i", "command": ["t.py"], "workers": {"replicas": 2}, **spec}
        metadata = {"name": "demo", "namespace": "default", "generation": 1}
        server.put(JOB, {"kind": "ParallelJob", "metadata": metadata, "spec": given})
        async with fake.served(server) as api:
            await do(server, Operator(api))

    asyncio.run(run())


def start(server: Any) -> None:
    """Be the kubelet: run what is there."""
    for path, pod in list(server.objects.items()):
        if path.startswith(PODS) and "status" not in pod:
            ready = [{"type": "Ready", "status": "True"}]
            server.put(
                path, {**pod, "status": {"phase": "Running", "podIP": "10.0.0.7", "conditions": ready}}
            )


async def started(server: Any, operator: Operator) -> Followed:
    followed = Followed()
    for _ in range(4):
        await operator.turn("default", "demo", followed)
        start(server)
    return followed


def test_what_is_made_and_that_it_is_owned_by_the_job():
    async def do(server: Any, operator: Operator) -> None:
        await started(server, operator)
        assert server.names("pods") == ["demo-scheduler", "demo-worker-0", "demo-worker-1"]
        assert (server.names("secrets"), server.names("services")) == (["demo"], ["demo"])
        owned = [o for path, o in server.objects.items() if path != JOB]
        uids = {o["metadata"]["ownerReferences"][0]["uid"] for o in owned}
        assert uids == {server.objects[JOB]["metadata"]["uid"]}
        container = server.objects[f"{PODS}/demo-worker-1"]["spec"]["containers"][0]
        assert "10.0.0.7:29400" in container["command"] and container["command"][-1] == "t.py"
        assert server.objects[JOB]["status"]["state"] == "Running"
        before = len(server.requests)
        await operator.turn("default", "demo", Followed())
        assert {method for method, _ in server.requests[before:]} == {
            "GET"
        }  # nothing to do: nothing is written

    with_job(do)


def test_workers_that_start_together_are_a_pod_group():
    async def do(server: Any, operator: Operator) -> None:
        await started(server, operator)
        path = "/apis/scheduling.x-k8s.io/v1alpha1/namespaces/default/podgroups/demo-1"
        assert server.objects[path]["spec"] == {"minMember": 2}
        labels = {
            name: server.objects[f"{PODS}/{name}"]["metadata"]["labels"] for name in server.names("pods")
        }
        members = [name for name, of in labels.items() if of.get("scheduling.x-k8s.io/pod-group") == "demo-1"]
        assert members == ["demo-worker-0", "demo-worker-1"]

    with_job(do, workers={"replicas": 2, "gang": True, "pod": {"schedulerName": "together"}})


def test_a_pod_that_is_killed_is_replaced_and_step_and_loss_are_read_from_its_log():
    async def do(server: Any, operator: Operator) -> None:
        followed = await started(server, operator)
        path = f"{PODS}/demo-worker-1"
        uid = server.objects[path]["metadata"]["uid"]
        ended = [{"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}]
        server.objects[path]["status"] = {"phase": "Failed", "containerStatuses": ended}
        server.log, followed.read_at = (
            'x\nstep 7 loss 2.5\n{"step": 8, "loss": 2.25, "time": 1}\nstep 9\n',
            0.0,
        )
        await operator.turn("default", "demo", followed)
        assert server.objects[path]["metadata"]["uid"] != uid
        status = server.objects[JOB]["status"]
        assert (status["restarts"], status["step"], status["loss"]) == (1, 8, "2.25")
        assert "exit code 137, signal 9 (OOMKilled)" in str(status["conditions"])

    with_job(do)


def test_of_two_operators_the_second_to_write_does_nothing():
    async def do(server: Any, operator: Operator) -> None:
        other = dict(server.objects[JOB])
        server.before_write = lambda: server.put(JOB, other)  # somebody else was faster
        with pytest.raises(Exception, match="changed"):
            await operator.turn("default", "demo", Followed())
        assert not server.names("pods")
        await started(server, operator)
        assert len(server.names("pods")) == 3

    with_job(do)


def test_pods_that_the_server_refuses_are_a_condition():
    async def do(server: Any, operator: Operator) -> None:
        server.refuses = (403, "exceeded quota: gpus")
        again = await operator.turn("default", "demo", Followed())
        status = server.objects[JOB]["status"]
        assert isinstance(again, float) and status["state"] == "Refused"
        assert "exceeded quota: gpus" in str(status["conditions"])
        server.refuses = None
        await started(server, operator)
        assert server.objects[JOB]["status"]["state"] == "Running"

    with_job(do)


def test_a_spec_that_cannot_be_makes_nothing():
    async def do(server: Any, operator: Operator) -> None:
        await operator.turn("default", "demo", Followed())
        assert "container has image" in str(server.objects[JOB]["status"]["conditions"])
        assert not server.names("pods")

    with_job(do, workers={"replicas": 1, "container": {"image": "other"}})


def test_a_job_that_is_gone_or_on_its_way_is_left_alone():
    async def do(server: Any, operator: Operator) -> None:
        server.objects[JOB]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        assert await operator.turn("default", "demo", Followed()) is None
        del server.objects[JOB]
        assert await operator.turn("default", "demo", Followed()) is False
        assert not server.objects

    with_job(do)
