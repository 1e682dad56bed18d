"""The operator makes a plan in the cluster, and gives it to workers."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("kopf")

from meshwright.core.mesh import Mesh
from meshwright.k8s import pods as p
from meshwright.k8s.operator import Followed, Operator
from meshwright.plan.plan import Plan
from tests.k8s.one_job import JOB, PODS, ended, started, with_job

MAPS = "/api/v1/namespaces/default/configmaps/"

GPUS = {"replicas": 2, "container": {"resources": {"limits": {"nvidia.com/gpu": 2}}}}


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
