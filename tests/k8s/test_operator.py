"""The operator against an API server in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("kopf")

from meshwright.core.mesh import Mesh
from meshwright.k8s import pods as p
from meshwright.k8s.operator import Followed, Operator
from meshwright.plan.plan import Plan
from tests.k8s import fake

JOB = "/apis/meshwright.dev/v1alpha1/namespaces/default/paralleljobs/demo"
PODS = "/api/v1/namespaces/default/pods"
MAPS = "/api/v1/namespaces/default/configmaps/"


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
        secret = f"demo-{server.objects[JOB]['metadata']['uid'][:8]}"
        assert (server.names("secrets"), server.names("services")) == ([secret], ["demo"])
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


def test_a_job_with_servers_and_their_number_is_changed():
    async def do(server: Any, operator: Operator) -> None:
        await started(server, operator)
        followed = await started(server, operator)
        names = ["demo-scheduler", "demo-server-0", "demo-server-1", "demo-worker-0", "demo-worker-1"]
        assert server.names("pods") == names
        server.objects[JOB]["spec"]["servers"]["replicas"] = 3
        for _ in range(2):
            await operator.turn("default", "demo", followed)
            start(server)
        assert server.names("pods") == sorted([*names, "demo-move", "demo-server-2"])
        path = f"{PODS}/demo-move"
        command = server.objects[path]["spec"]["containers"][0]["command"]
        assert command[:6] == ["meshwright", "ps", "spread", "3", "--master", "10.0.0.7:29400"]
        server.objects[path]["status"] = {"phase": "Succeeded"}
        await operator.turn("default", "demo", followed)
        assert server.names("pods") == [*names[:3], "demo-server-2", *names[3:]]
        assert server.objects[JOB]["status"]["servers"] == {"first": 2, "spread": 3, "moving": 0}

    with_job(do, workers={"replicas": 2, "independent": True}, servers={"replicas": 2})


GPUS = {"replicas": 2, "container": {"resources": {"limits": {"nvidia.com/gpu": 2}}}}


def ended(server: Any, name: str, code: int, log: str) -> None:
    """Be the kubelet of a pod that ends, after it has printed something."""
    path = f"{PODS}/{name}"
    state = [{"state": {"terminated": {"exitCode": code}}}]
    status = {"phase": "Failed" if code else "Succeeded", "containerStatuses": state}
    server.put(path, {**server.objects[path], "status": status})
    server.log = log


def planned(server: Any) -> dict[str, str]:
    conditions = server.objects[JOB]["status"]["conditions"]
    return next(c for c in conditions if c["type"] == "Planned")


def test_a_plan_is_made_for_the_gpu_of_the_nodes_and_becomes_a_file_of_workers():
    made = Plan(mesh=Mesh.of({"node": 2, "gpu": 2}), mode="auto", fingerprint="f", strategies={}, inputs={})
    log = f"searching\n{p.PLAN_BEGINS}\n{made.to_json()}{p.PLAN_ENDS}\n"

    async def do(server: Any, operator: Operator) -> None:
        again = await operator.turn("default", "demo", Followed())
        assert isinstance(again, float) and planned(server)["reason"] == "NoCluster"
        labels = {"nvidia.com/gpu.product": "NVIDIA-H200"}
        server.put("/api/v1/nodes/a", {"metadata": {"name": "a", "labels": labels}})
        await operator.turn("default", "demo", Followed())
        assert server.names("pods") == ["demo-plan"]
        command = server.objects[f"{PODS}/demo-plan"]["spec"]["containers"][0]["command"]
        assert command[4:] == ["m.py:build", "--cluster", "preset:h200:2x2", "--batch", "8"]
        ended(server, "demo-plan", 0, log)
        await started(server, operator)
        text = server.objects[MAPS + server.names("configmaps")[0]]["data"]["plan.json"]
        assert Plan.from_json(text) == made
        assert planned(server)["message"].startswith("4 ranks, ") and planned(server)["status"] == "True"
        volumes = server.objects[f"{PODS}/demo-worker-1"]["spec"]["volumes"]
        assert volumes[0]["configMap"]["name"] == server.names("configmaps")[0]
        server.log = ""
        await started(server, operator)  # the log is not read again
        assert server.objects[JOB]["status"]["state"] == "Running"

    with_job(do, workers={**GPUS, "ranks": 2}, plan={"model": "m.py:build", "options": ["--batch", "8"]})


def printed(ranks: int) -> str:
    """What the pod of a plan prints."""
    made = Plan(mesh=Mesh.of({"rank": ranks}), mode="auto", fingerprint="f", strategies={}, inputs={})
    return f"{p.PLAN_BEGINS}\n{made.to_json()}{p.PLAN_ENDS}\n"


def test_a_plan_for_more_workers_is_made_once_while_pods_are_made_for_the_old_number():
    def command(server: Any, name: str) -> list[str]:
        return server.objects[f"{PODS}/demo-{name}"]["spec"]["containers"][0]["command"]

    async def do(server: Any, operator: Operator) -> None:
        await operator.turn("default", "demo", Followed())
        ended(server, "demo-plan", 0, printed(2))
        await started(server, operator)
        server.objects[JOB]["spec"]["workers"]["replicas"] = 4
        ended(server, "demo-worker-1", 137, "")
        for _ in range(4):
            await operator.turn("default", "demo", Followed())
        assert command(server, "plan")[6] == "preset:cpu:4x1"
        uid = server.objects[f"{PODS}/demo-plan"]["metadata"]["uid"]
        assert command(server, "worker-1")[4:6] == ["--nnodes", "2"] and "demo-worker-2" not in server.names(
            "pods"
        )
        ended(server, "demo-plan", 0, printed(4))
        assert server.objects[f"{PODS}/demo-plan"]["metadata"]["uid"] == uid
        await started(server, operator)
        await started(server, operator)
        assert command(server, "worker-3")[4:6] == ["--nnodes", "4"] and len(server.names("configmaps")) == 2

    with_job(do, plan={"model": "m.py:build", "cluster": "cpu"})


@pytest.mark.parametrize(
    ("code", "log", "says"),
    [
        (
            2,
            "opening the model\nPlanError: there is no file m.py\n  try: another\n",
            "PlanError: there is no",
        ),
        (0, "no plan", "the log of the plan's pod has no plan"),
        (0, f"{p.PLAN_BEGINS}\n{{}}\n{p.PLAN_ENDS}\n", "the plan that its pod printed"),
        (0, printed(8), "the plan is for 8 ranks, and 2 workers have 2 ranks"),
    ],
)
def test_a_plan_that_fails_is_a_condition(code, log, says):
    async def do(server: Any, operator: Operator) -> None:
        await operator.turn("default", "demo", Followed())
        ended(server, "demo-plan", code, log)
        for _ in range(2):
            assert await operator.turn("default", "demo", Followed()) is None
        assert planned(server)["reason"] == "PlanFailed" and says in planned(server)["message"]
        assert server.objects[JOB]["status"]["state"] == "Refused"
        assert server.names("pods") == ["demo-plan"] and not server.names("configmaps")

    with_job(do, plan={"model": "m.py:build", "cluster": "cpu"})


def test_a_log_that_cannot_be_read_now_is_read_later():
    async def do(server: Any, operator: Operator) -> None:
        await operator.turn("default", "demo", Followed())
        ended(server, "demo-plan", 0, "")
        server.log = None
        with pytest.raises(Exception, match="no kubelet"):
            await operator.turn("default", "demo", Followed())
        assert planned(server)["reason"] == "Planning"

    with_job(do, plan={"model": "m.py:build", "cluster": "cpu"})


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


def test_the_pods_of_a_deleted_job_are_deleted_unless_they_were_kept():
    async def do(server: Any, operator: Operator) -> None:
        followed = await started(server, operator)
        del server.objects[f"{PODS}/demo-worker-1"]["metadata"]["ownerReferences"]
        del server.objects[JOB]
        assert (
            await operator.turn("default", "demo", Followed()) is False
        )  # an operator that has not seen the job
        assert len(server.names("pods")) == 3
        assert await operator.turn("default", "demo", followed) is False
        assert server.names("pods") == ["demo-worker-1"]

    with_job(do)


@pytest.mark.parametrize("kept", [False, True])
def test_the_pods_of_an_earlier_job_of_the_same_name_are_not_those_of_this_one(kept):
    async def do(server: Any, operator: Operator) -> None:
        await started(server, operator)
        for name in server.names("pods") if kept else ():  # kubectl delete --cascade=orphan
            del server.objects[f"{PODS}/{name}"]["metadata"]["ownerReferences"]
        before = {server.objects[f"{PODS}/{name}"]["metadata"]["uid"] for name in server.names("pods")}
        again = {k: v for k, v in server.objects[JOB].items() if k != "status"}
        server.put(JOB, {**again, "metadata": {**again["metadata"], "uid": "another"}})
        server.log = "step 7 loss 1\n"
        await operator.turn("default", "demo", Followed())
        server.log = ""
        await started(server, operator)
        await started(server, operator)
        after = {server.objects[f"{PODS}/{name}"]["metadata"]["uid"] for name in server.names("pods")}
        assert len(after) == 3 and not before & after
        assert server.objects[JOB]["status"].get("restarts", 0) == 0
        assert server.objects[JOB]["status"].get("step") is None, "its log has no step"

    with_job(do)


def test_what_an_earlier_job_of_the_same_name_has_left_is_not_used():
    """The cluster deletes it some time later, and then it has to be there for pods that are replaced."""

    async def do(server: Any, operator: Operator) -> None:
        await started(server, operator)
        before = {path for path in server.objects if "/secrets/" in path}
        again = {k: v for k, v in server.objects[JOB].items() if k != "status"}
        server.put(JOB, {**again, "metadata": {**again["metadata"], "uid": "another"}})
        for _ in range(2):
            await started(server, operator)
        owned = [o for path, o in server.objects.items() if path != JOB and path not in before]
        assert {o["metadata"]["ownerReferences"][0]["uid"] for o in owned} == {"another"}
        env = server.objects[f"{PODS}/demo-worker-1"]["spec"]["containers"][0]["env"]
        key = next(e["valueFrom"]["secretKeyRef"]["name"] for e in env if e["name"] == "MESHWRIGHT_SECRET")
        assert key in server.names("secrets") and f"/secrets/{key}" not in " ".join(before)

    with_job(do)


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


def condition(server: Any, kind: str) -> dict[str, str]:
    return next(c for c in server.objects[JOB]["status"]["conditions"] if c["type"] == kind)


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
