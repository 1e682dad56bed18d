"""Plans that are made in the cluster, on a real API server with nodes that run pods as processes: ``make k8s-test``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.k8s.control_plane import Cluster, eventually
from tests.k8s.jobs import CORE, ENV, JOBS, MARKS, OURS, Job, equal_to_torch, hurried, trained

pytestmark = MARKS
MODEL = "meshwright/examples/mlp.py:build"
CPU = {"model": MODEL, "cluster": "cpu", "container": {"env": ENV}}


def planned(job: Job, reason: str) -> str:
    """Wait for a reason of the condition Planned, and return its message."""

    def found() -> list[str]:
        conditions = job.status.get("conditions", [])
        return [
            c.get("message", "") for c in conditions if c["type"] == "Planned" and c.get("reason") == reason
        ]

    return eventually(found, f"{job.name} is {reason}")[0]


@OURS
def test_a_planned_job_trains_as_one_device_and_is_planned_again_for_more_workers(
    cluster: Cluster, figures: dict[str, float], tmp_path: Any
) -> None:
    plan = {**CPU, "options": ["--mode", "data_parallel"]}
    job = trained(cluster, "planned", tmp_path, "planned", seconds=2.0, plan=plan)
    assert planned(job, "Planned").startswith("2 ranks, ")
    figures["apply to plan"] = time.monotonic() - job.applied
    eventually(lambda: job.status.get("ready") == "2/2", "both workers run")
    job.reaches(4)
    before = job.uid("worker-0")
    began = time.monotonic()
    cluster.kubectl("scale", "paralleljob/planned", "--replicas=4")
    planned(job, "Planning")
    assert job.uid("worker-0") == before and job.status["state"] == "Running", "workers go on"
    assert planned(job, "Planned").startswith("4 ranks, ")
    figures["scale to plan"] = time.monotonic() - began
    job.steps(" ranks 4")
    hurried(job, tmp_path)
    equal_to_torch(tmp_path)
    plans = [json.loads(m["data"]["plan.json"])["mode"] for m in job.objects("configmaps")]
    assert plans == ["data_parallel", "data_parallel"]
    job.delete()


def test_a_plan_that_fails_says_why_and_another_one_is_made(cluster: Cluster, stepping: Any) -> None:
    job = stepping("unplanned", plan={**CPU, "model": "zoo:mlp", "options": ["--memory", "1kB"]})
    assert planned(job, "PlanFailed").startswith("DoesNotFit: ")
    assert job.status["state"] == "Refused" and not job.uid("scheduler")
    described = cluster.kubectl("describe", "paralleljob/unplanned").stdout
    assert "DoesNotFit" in described
    plan = {"plan": {"options": ["--mode", "data_parallel"]}}
    assert cluster.ask("PATCH", f"{JOBS}/unplanned", {"spec": plan})[0] == 200
    planned(job, "Planned")
    job.steps()


@pytest.fixture
def gpus(cluster: Cluster) -> Iterator[None]:
    """Nodes with two GPUs each, as the device plugin and feature discovery of NVIDIA show them."""
    nodes = ("node-a", "node-b")
    for node in nodes:
        more = {"nvidia.com/gpu": "2"}
        path = f"/api/v1/nodes/{node}"
        cluster.ask("PATCH", f"{path}/status", {"status": {"capacity": more, "allocatable": more}})
        cluster.kubectl("label", "node", node, "nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3")
    yield
    for node in nodes:
        cluster.kubectl("label", "node", node, "nvidia.com/gpu.product-")


@OURS
@pytest.mark.usefixtures("gpus")
def test_the_labels_of_nodes_say_for_which_machine(cluster: Cluster, stepping: Any) -> None:
    limits = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
    plan = {"model": MODEL, "container": {"env": ENV}}
    job = stepping("labelled", {"replicas": 2, "container": {**limits, "env": ENV}}, plan=plan)
    planned(job, "Planned")
    command = cluster.get(f"{CORE}/pods/labelled-plan")["spec"]["containers"][0]["command"]
    assert command[5:7] == ["--cluster", "preset:h100:2x1"]
    job.steps()
