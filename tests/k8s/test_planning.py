"""A job that waits for its plan: what is decided, the GPU that labels name, and what is read from a log."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from meshwright.errors import ClusterError, LaunchError
from meshwright.k8s import checks, observed
from meshwright.k8s import pods as p
from meshwright.k8s import resource as r
from meshwright.k8s.gpus import preset_of
from meshwright.k8s.records import PlanFacts
from tests.k8s.test_decide import OWNER, Cluster, spec

WRITTEN = PlanFacts(written=True, about="2 ranks, auto")


def planned(**more: Any) -> Cluster:
    """A job of two workers that has its plan, and runs."""
    cluster = Cluster(spec(plan=r.Planning(model="m.py:build", cluster="cpu"), **more))
    cluster.settle()
    end_plan(cluster)
    assert (cluster.status.state, cluster.status.ready) == ("Running", "2/2")
    cluster.made.clear()
    return cluster


def end_plan(cluster: Cluster, problem: str = "") -> None:
    cluster.end("demo-plan", 2 if problem else 0)
    cluster.plan = PlanFacts(problem=problem) if problem else WRITTEN
    cluster.settle()
    cluster.plan = PlanFacts()
    cluster.settle()


def scale(cluster: Cluster, replicas: int) -> None:
    cluster.spec = replace(cluster.spec, workers=replace(cluster.spec.workers, replicas=replicas))
    cluster.settle()


def test_workers_wait_for_the_plan():
    cluster = Cluster(spec(plan=r.Planning(model="m.py:build", cluster="cpu")))
    cluster.settle()
    assert (cluster.made, cluster.status.state) == (["demo-plan"], "Planning")
    assert (cluster.condition("Planned").status, cluster.condition("Planned").reason) == (
        "Unknown",
        "Planning",
    )
    end_plan(cluster)
    assert cluster.made == ["demo-plan", "demo-scheduler", "demo-worker-0", "demo-worker-1"]
    assert (cluster.status.state, cluster.condition("Planned").message) == ("Running", "2 ranks, auto")
    assert "demo-plan" in cluster.pods, "its log stays"
    cluster.end("demo-worker-1", 137)
    cluster.settle()
    assert cluster.made[4:] == ["demo-worker-1"]
    assert cluster.status.round == 1


def test_another_number_of_workers_is_planned_while_the_others_go_on():
    cluster = planned()
    scale(cluster, 4)
    assert cluster.made == ["demo-plan"] and cluster.status.ready == "2/2"
    cluster.end("demo-worker-1", 137)
    cluster.settle()
    assert cluster.made == ["demo-plan", "demo-worker-1"], "replaced in its round, of two workers"
    assert (cluster.status.round, cluster.status.state) == (1, "Running")
    end_plan(cluster)
    assert (cluster.status.round, cluster.status.ready) == (2, "4/4")


def test_workers_end_well_while_another_plan_is_made():
    cluster = planned()
    scale(cluster, 4)
    for worker in ("demo-worker-0", "demo-worker-1"):
        cluster.end(worker, 0)
    cluster.settle()
    assert cluster.status.state == "Succeeded" and "demo-worker-2" not in cluster.pods


def test_a_plan_that_fails_is_a_condition_until_the_job_is_changed():
    cluster = Cluster(spec(plan=r.Planning(model="m.py:build", cluster="cpu")))
    cluster.settle()
    end_plan(cluster, "PlanError: over how many ranks?")
    found = cluster.condition("Planned")
    assert (cluster.status.state, found.status, found.reason) == ("Refused", "False", "PlanFailed")
    assert found.message == "PlanError: over how many ranks?" and cluster.made == ["demo-plan"]
    scale(cluster, 3)
    assert cluster.made == ["demo-plan", "demo-plan"] and cluster.status.state == "Planning"
    end_plan(cluster)
    assert cluster.status.ready == "3/3" and cluster.condition("Planned").status == "True"


def test_a_plan_for_another_number_that_fails_leaves_what_runs():
    cluster = planned()
    scale(cluster, 3)
    end_plan(cluster, "DoesNotFit: 9 GB")
    assert (cluster.status.ready, cluster.status.round, cluster.status.state) == ("2/2", 1, "Running")
    assert cluster.condition("Planned").message == "DoesNotFit: 9 GB"
    cluster.end("demo-worker-0", 137)
    cluster.settle()
    assert cluster.made == ["demo-plan", "demo-worker-0"]
    scale(cluster, 2)
    assert cluster.condition("Planned").status == "True" and "demo-plan" not in cluster.pods
    assert cluster.status.round == 1


def test_a_planner_that_was_deleted_or_evicted_or_lost_its_node_is_made_again():
    cluster = Cluster(spec(plan=r.Planning(model="m.py:build", cluster="cpu")))
    cluster.settle()
    del cluster.pods["demo-plan"]
    cluster.settle()
    assert len(cluster.made) == 2
    cluster.pods["demo-plan"] = replace(cluster.pods["demo-plan"], phase="Failed", reason="Evicted")
    cluster.settle()
    assert cluster.condition("Planned").message == "demo-plan: Evicted" and len(cluster.made) == 2
    assert cluster.again is not None
    cluster.now = cluster.again
    cluster.settle()
    assert len(cluster.made) == 3
    cluster.pods["demo-plan"] = replace(cluster.pods["demo-plan"], phase="Failed", exit_code=137)
    cluster.settle()
    assert cluster.condition("Planned").message == "demo-plan: exit code 137, signal 9"
    assert cluster.again is not None
    cluster.now = cluster.again
    cluster.settle()
    assert len(cluster.made) == 4
    cluster.lost, cluster.node = {"a": 0.0}, "b"
    cluster.settle()
    assert "node a is lost" in cluster.condition("Planned").message and cluster.again is not None
    cluster.now = cluster.again
    cluster.settle()
    assert len(cluster.made) == 5 and cluster.status.restarts == 0


def test_a_planner_that_needs_too_much_memory_is_not_made_again():
    cluster = Cluster(spec(plan=r.Planning(model="m.py:build", cluster="cpu")))
    cluster.settle()
    pod = cluster.pods["demo-plan"]
    cluster.pods["demo-plan"] = replace(pod, phase="Failed", exit_code=137, reason="OOMKilled")
    cluster.plan = PlanFacts(problem="killed")
    cluster.settle()
    cluster.plan, cluster.now = PlanFacts(), cluster.now + 100
    cluster.settle()
    assert len(cluster.made) == 1 and cluster.condition("Planned").reason == "PlanFailed"


def test_a_job_waits_for_nodes_that_say_their_gpu():
    cluster = Cluster(spec(plan=r.Planning(model="m.py:build", cluster="cpu")))
    cluster.plan = PlanFacts(problem="no label of a node names its GPU")
    cluster.settle()
    assert (cluster.status.state, cluster.condition("Planned").reason) == ("Refused", "NoCluster")
    assert not cluster.made and cluster.again == cluster.now + 15
    cluster.plan = PlanFacts(cluster="h100")
    cluster.settle()
    assert (cluster.made, cluster.status.state) == (["demo-plan"], "Planning")


def test_a_deadline_and_suspension_end_the_planning():
    cluster = Cluster(spec(plan=r.Planning(model="m.py:build", cluster="cpu"), active_deadline_seconds=100))
    cluster.settle()
    cluster.spec = replace(cluster.spec, suspend=True)
    cluster.settle()
    assert not cluster.pods and cluster.status.state == "Suspended"
    cluster.spec = replace(cluster.spec, suspend=False)
    cluster.settle()
    assert list(cluster.pods) == ["demo-plan"] and cluster.again == pytest.approx(cluster.now + 100)
    cluster.now += 101
    cluster.settle()
    assert (cluster.status.state, cluster.condition("Failed").reason) == ("Failed", "DeadlineExceeded")
    assert not cluster.pods


def test_a_job_without_a_plan_any_more_starts_without_one():
    cluster = planned()
    cluster.spec = replace(cluster.spec, plan=None)
    cluster.settle()
    assert cluster.status.plan == "" and "demo-plan" not in cluster.pods and cluster.status.round == 2
    assert not [c for c in cluster.status.conditions if c.type == "Planned"]


# ---------------------------------------------------------------- objects


def words(given: r.Spec, preset: str = "") -> list[str]:
    return p.planner(OWNER, given, preset)["spec"]["containers"][0]["command"][4:]


@pytest.mark.parametrize(
    ("cluster", "preset", "wanted"),
    [
        ("cpu", "", "preset:cpu:3x8"),
        ("H100:eager", "", "preset:H100:3x8:eager"),
        ("", "h200", "preset:h200:3x8"),
        ("/clusters/ours.yaml", "", "/clusters/ours.yaml"),
    ],
)
def test_what_the_planner_plans_for(cluster, preset, wanted):
    plan = r.Planning(model="m.py:build", cluster=cluster, options=["--memory", "70GB"])
    given = replace(spec(plan=plan), workers=r.Workers(replicas=3, ranks=8))
    assert words(given, preset) == ["m.py:build", "--cluster", wanted, "--memory", "70GB"]


def test_the_planner_has_no_secret_and_workers_have_the_file():
    given = spec(plan=r.Planning(model="m.py:build", cluster="cpu"))
    pod = p.planner(OWNER, given, "")
    assert "MESHWRIGHT_SECRET" not in str(pod) and pod["spec"]["automountServiceAccountToken"] is False
    worker = p.worker(OWNER, given, 1, 0, p.Place(address="10.0.0.1"))["spec"]
    map_of = p.plan_map(OWNER, given, "{}")
    assert worker["volumes"][0]["configMap"]["name"] == map_of["metadata"]["name"]
    assert worker["containers"][0]["env"][-1] == {
        "name": "MESHWRIGHT_PLAN",
        "value": "/etc/meshwright/plan/plan.json",
    }
    assert map_of["data"] == {"plan.json": "{}"} and map_of["metadata"]["ownerReferences"][0]["uid"] == "u"


def test_a_plan_depends_on_ranks_and_its_settings_and_on_nodes_where_these_say_the_gpu():
    given = spec(plan=r.Planning(model="m.py:build", cluster="cpu"))
    same = replace(given, command=["other.py"], backoff_limit=1)
    assert p.plan_revision(same) == p.plan_revision(given)
    workers = r.Workers(replicas=2, pod={"nodeSelector": {"pool": "a"}})
    elsewhere = replace(given, workers=workers)
    assert p.plan_revision(elsewhere) == p.plan_revision(given)
    by_labels = replace(given, plan=r.Planning(model="m.py:build"))
    assert p.plan_revision(replace(by_labels, workers=workers)) != p.plan_revision(by_labels)
    assert p.plan_revision(replace(given, workers=r.Workers(replicas=2, ranks=2))) != p.plan_revision(given)


# ---------------------------------------------------------------- labels and logs


def node(unschedulable: bool = False, **labels: str) -> dict[str, Any]:
    names = {"nvidia": "nvidia.com/gpu.product", "google": "cloud.google.com/gke-accelerator"}
    names["amd"] = "amd.com/gpu.product-name"
    spec = {"unschedulable": True} if unschedulable else {}
    return {"metadata": {"labels": {names[k]: v for k, v in labels.items()}}, "spec": spec}


@pytest.mark.parametrize(
    ("nodes", "preset"),
    [
        ([node(nvidia="NVIDIA-H100-80GB-HBM3"), node()], "h100"),
        ([node(google="nvidia-tesla-a100")], "a100-40"),
        ([node(nvidia="NVIDIA-H200", google="nvidia-h200-141gb"), node(google="nvidia-h200-141gb")], "h200"),
        ([node(amd="AMD_Instinct_MI300X_OAM"), node(unschedulable=True, nvidia="NVIDIA-B200")], "mi300x"),
    ],
)
def test_the_gpu_that_labels_name(nodes, preset):
    assert preset_of(nodes) == preset


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ([], "no label of a node names its GPU"),
        ([node()], "no label of a node names its GPU"),
        ([node(nvidia="NVIDIA-H100-PCIe")], "no preset of NVIDIA-H100-PCIe"),
        ([node(nvidia="NVIDIA-H100-80GB-HBM3-MIG-1g.10gb")], "no preset of"),
        (
            [node(nvidia="NVIDIA-H200"), node(nvidia="NVIDIA-B200")],
            "different GPUs: NVIDIA-B200, NVIDIA-H200",
        ),
        ([node(nvidia="NVIDIA-H200"), node(nvidia="Tesla-T4")], "different GPUs"),
    ],
)
def test_labels_that_do_not_say_the_machine(nodes, says):
    with pytest.raises(ClusterError, match=says):
        preset_of(nodes)


def test_the_plan_is_what_stands_between_its_marks_at_the_end():
    log = f"capturing\n{p.PLAN_BEGINS}\nearlier\n{p.PLAN_ENDS}\n{p.PLAN_BEGINS}\n{{\n}}\n{p.PLAN_ENDS}\n"
    assert observed.plan_in(log) == "{\n}\n"
    assert observed.plan_in(log[: log.rindex(p.PLAN_ENDS)]) is None
    assert observed.plan_in("") is None


@pytest.mark.parametrize(
    ("log", "says"),
    [
        (
            "searching\nDoesNotFit: no plan fits\n  why: 9 GB\n\n  try: more ranks\n",
            "DoesNotFit: no plan fits\n  why: 9 GB\n  try: more ranks",
        ),
        ("Traceback\n  File x\nModuleNotFoundError: No module named 'block'\n", "ModuleNotFoundError: No"),
        ("\n".join(f"line {n}" for n in range(20)), "line 12\nline 13"),
        ("", ""),
    ],
)
def test_the_message_of_a_failed_plan(log, says):
    assert observed.last_lines(log).startswith(says)


@pytest.mark.parametrize(
    ("plan", "workers", "says"),
    [
        ({"model": "m.py:f", "options": ["--cluster=h100"]}, {}, "plan.options has --cluster=h100"),
        (
            {"model": "m.py:f", "cluster": "cpu", "options": ["-oplan.json"]},
            {},
            "plan.options has -oplan.json",
        ),
        ({"model": "m.py:f"}, {}, "no cluster, and workers ask for no GPU"),
        ({"model": "m.py:f", "cluster": "h1000"}, {}, "neither a preset nor a cluster file"),
        ({"model": "m.py:f", "cluster": "cpu"}, {"independent": True}, "both set"),
        ({"model": "m.py:f", "cluster": "cpu", "container": {"command": ["x"]}}, {}, "plan.container has"),
        ({"cluster": "cpu"}, {}, "required field `model`"),
    ],
)
def test_plans_that_cannot_be(plan, workers, says):
    servers = {"servers": {"replicas": 1}} if workers else {}
    given = {
        "image": "i",
        "command": ["t.py"],
        "workers": {"replicas": 2, **workers},
        "plan": plan,
        **servers,
    }
    with pytest.raises(LaunchError) as refused:
        checks.read_spec(given)
    assert says in f"{refused.value.what} {refused.value.why}"


def test_workers_that_ask_for_gpus_need_no_cluster():
    limits = {"resources": {"limits": {"nvidia.com/gpu": 8}}}
    workers = {"replicas": 2, "container": limits}
    checks.read_spec({"image": "i", "command": ["t.py"], "workers": workers, "plan": {"model": "m.py:f"}})
