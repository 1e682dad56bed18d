"""What the operator writes into the status: progress, and why pods wait, were replaced or have failed."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("kopf")

from meshwright.k8s.operator import Followed, Operator
from tests.k8s.one_job import JOB, PODS, condition, ended, started, with_job


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


def test_why_a_pod_was_replaced_and_ranks_begun_again_is_there_while_the_job_runs():
    told = (
        "rank 0 of 2 failed with exit code 7\n  why:   it wrote nothing\n  where: log /tmp/a/rank0.log\n"
        "attempt 2 of 7:\nstep 1 loss 2\non node demo-worker-1: rank 1 of 2 failed with exit code 7: E: no data\n"
        "  why:   its last words are on the terminal there\nattempt 3 of 7:\nstep 1 loss 2\n"
    )

    async def do(server: Any, operator: Operator) -> None:
        followed = await started(server, operator)
        assert "message" not in condition(server, "Running")
        ended(server, "demo-worker-1", 137, "")
        await started(server, operator)
        lost = "last restart: demo-worker-1: exit code 137, signal 9"
        assert (condition(server, "Running")["status"], condition(server, "Running")["message"]) == (
            "True",
            lost,
        )
        server.log, followed.read_at = told, 0.0
        await operator.turn("default", "demo", followed)
        after = (
            "attempt 3 of 7, after: on node demo-worker-1: rank 1 of 2 failed with exit code 7: E: no data"
        )
        assert condition(server, "Running")["message"] == f"{lost}; {after}"
        status = server.objects[JOB]["status"]
        assert (status["state"], status["attempt"], status["restarts"]) == ("Running", "3/7", 1)
        server.log, followed.read_at = "step 2 loss 1\n" * 200, 0.0  # the words are too far up
        await operator.turn("default", "demo", followed)
        assert server.objects[JOB]["status"]["attempt"] == "3/7"
        server.objects[JOB]["status"]["lastRestartTime"] = (
            "2026-01-01T00:00:00Z"  # so this one is replaced at once
        )
        ended(server, "demo-worker-0", 137, "")
        await started(server, operator)  # and its log begins anew
        assert condition(server, "Running")["message"] == lost.replace("worker-1", "worker-0")
        assert "attempt" not in server.objects[JOB]["status"]

    with_job(do)


def test_a_job_that_fails_says_why_its_script_did():
    async def do(server: Any, operator: Operator) -> None:
        await started(server, operator)
        ended(
            server,
            "demo-worker-1",
            1,
            "step 3 loss 1\nLaunchError: rank 1 failed: no data\n  where: t.py:3\n",
        )
        await operator.turn("default", "demo", Followed())
        said = "demo-worker-1: exit code 1: LaunchError: rank 1 failed: no data\n  where: t.py:3"
        assert condition(server, "Failed")["message"] == said
        status = server.objects[JOB]["status"]
        assert (status["ready"], status.get("workers", 0), status["replicaStatuses"]["Worker"]["active"]) == (
            "0/2",
            0,
            0,
        )

    with_job(do)


UNSCHEDULED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU"}


def waiting(**state: str) -> dict[str, Any]:
    return {"containerStatuses": [{"state": {"waiting": state}}]}


@pytest.mark.parametrize(
    ("status", "says"),
    [
        ({"conditions": [UNSCHEDULED]}, "Unschedulable: no GPU"),
        (waiting(reason="ErrImagePull", message="none"), "ErrImagePull: none"),
        (waiting(reason="ContainerCreating"), ""),
    ],
)
def test_what_a_pod_waits_for_is_a_condition(status, says):
    async def do(server: Any, operator: Operator) -> None:
        await started(server, operator)
        assert condition(server, "Running")["status"] == "True"
        path = f"{PODS}/demo-worker-1"
        server.put(path, {**server.objects[path], "status": {"phase": "Pending", **status}})
        await operator.turn("default", "demo", Followed())
        assert condition(server, "Running")["status"] == "False"
        assert condition(server, "Running").get("message", "") == (says and f"demo-worker-1: {says}")

    with_job(do)


def test_a_pod_that_somebody_deletes_is_replaced_and_not_counted():
    """However it is seen to end, and also where it is not: an operator cannot see each state between two others."""

    async def do(server: Any, operator: Operator) -> None:
        await started(server, operator)
        path = f"{PODS}/demo-worker-1"
        for seen in ("deleting", "ended", "gone"):
            uid = server.objects[path]["metadata"]["uid"]
            if seen == "ended":
                ended(server, "demo-worker-1", 143, "")
            if seen != "gone":
                server.objects[path]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
                await operator.turn("default", "demo", Followed())
            server.objects.pop(path, None)
            await started(server, operator)
            assert server.objects[path]["metadata"]["uid"] != uid
        status = server.objects[JOB]["status"]
        assert status.get("restarts", 0) == 0 and status["state"] == "Running" and status["round"] == 1
        assert not server.names("events")

    with_job(do)


def test_the_last_attempt_of_a_script_that_fails_is_there():
    async def do(server: Any, operator: Operator) -> None:
        followed = await started(server, operator)
        ended(
            server, "demo-worker-0", 1, "rank 0 of 2 failed with exit code 1: E: x\nattempt 2 of 2:\nE: x\n"
        )
        await operator.turn("default", "demo", followed)
        status = server.objects[JOB]["status"]
        assert (status["state"], status["attempt"]) == ("Failed", "2/2")

    with_job(do)


def test_a_service_that_is_deleted_is_made_again_and_a_secret_with_all_pods():
    async def do(server: Any, operator: Operator) -> None:
        await started(server, operator)
        service = "/api/v1/namespaces/default/services/demo"
        (secret,) = (path for path in server.objects if "/secrets/" in path)
        kept, pods = server.objects[secret], server.names("pods")
        del server.objects[service]
        await started(server, operator)
        assert service in server.objects and server.objects[secret] == kept
        assert server.names("pods") == pods and server.objects[JOB]["status"]["round"] == 1
        del server.objects[secret]
        await started(server, operator)
        assert secret not in server.objects, "running pods have it"
        path = f"{PODS}/demo-worker-1"
        message = f'secret "{secret.rsplit("/", 1)[1]}" not found'
        waits = {"phase": "Pending", **waiting(reason="CreateContainerConfigError", message=message)}
        server.put(path, {**server.objects[path], "status": waits})
        for _ in range(2):
            await started(server, operator)
        status = server.objects[JOB]["status"]
        assert (status["state"], status["round"], status["restarts"]) == ("Running", 2, 1)
        assert "was deleted" in status["lastRestart"] and server.objects[secret] != kept

    with_job(do)
