"""The operator on a real API server, with nodes that run pods as processes: ``make k8s-test``.

Times are written to build/k8s.json; none of them is a bound here, since a busy machine has its own.
"""

from __future__ import annotations

import json
import re
import sys
import time
from typing import Any

import pytest
import yaml

from meshwright.k8s.schema import definition
from tests.k8s import control_plane, given_cluster
from tests.k8s.bad_jobs import bad_jobs
from tests.k8s.control_plane import NAMESPACE, eventually
from tests.k8s.jobs import CORE, JOBS, MARKS, OURS, Job, equal_to_torch, hurried, trained, with_script

pytestmark = MARKS


# ---------------------------------------------------------------- life and end of a job


def test_a_job_from_its_file_to_its_end(cluster, stepping, figures):
    job = stepping("life")
    job.runs(2)
    figures["apply to all pods running"] = time.monotonic() - job.applied
    job.steps()
    eventually(lambda: job.status.get("step"), "the status has a step")
    shown = cluster.kubectl("get", "paralleljobs").stdout.split("\n")
    assert shown[0].split() == ["NAME", "STATE", "WORKERS", "STEP", "LOSS", "RESTARTS", "ATTEMPT", "AGE"]
    assert next(line for line in shown if line.startswith("life")).split()[:3] == ["life", "Running", "2/2"]
    assert job.log("--tail=1").count("\n") == 1 and " loss " in job.log("--tail=1")


def test_a_job_that_has_ended_is_deleted_when_its_time_is_over(cluster, stepping):
    job = stepping("short", steps=2, ttlSecondsAfterFinished=1)
    eventually(lambda: cluster.get(f"{JOBS}/short") is None, "the job is deleted")
    job.nothing_is_left()


@OURS
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
    path = f"/apis/{group}/v1alpha1/namespaces/{NAMESPACE}/podgroups"
    eventually(lambda: cluster.get(path) is not None, "pod groups are known")
    job = stepping("gang", {"replicas": 2, "gang": True, "pod": {"schedulerName": "default-scheduler"}})
    job.runs(2)
    name = job.pod("worker-0")["metadata"]["labels"][f"{group}/pod-group"]
    assert cluster.get(f"{path}/{name}")["spec"] == {"minMember": 2}
    job.delete()
    eventually(lambda: cluster.get(f"{path}/{name}") is None, "the group is deleted with its job")


def test_a_script_that_fails_is_started_again_and_then_the_job_fails(cluster):
    script = "print('begins'); raise ValueError('no data')"
    job = with_script(cluster, "fails", script, [], 2, backoffLimit=1)
    job.is_in("Failed")
    failed = next(c for c in job.status["conditions"] if c["type"] == "Failed")
    assert failed["reason"] == "WorkerFailed" and "exit code 1: LaunchError: " in failed["message"]
    assert "ValueError: no data" in failed["message"] and job.status["ready"] == "0/2"
    log = cluster.kubectl("logs", failed["message"].partition(":")[0]).stdout  # of the pod that stays
    assert "ValueError: no data" in log and "attempt 2 of 2" in log
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


def test_a_job_is_deleted_and_made_again_under_its_name(cluster, stepping, figures):
    job = stepping("twin")
    job.runs(2)
    job.steps()
    began = time.monotonic()
    job.delete()
    figures["delete to nothing left, with an operator"] = time.monotonic() - began
    again = stepping("twin")
    again.runs(2)
    cluster.ask("DELETE", f"{JOBS}/twin")
    third = stepping("twin")  # while pods of the one before are still there
    third.runs(2)
    assert third.status.get("restarts", 0) == 0 and third.status["round"] == 1


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
    [("demo", ["--steps", "22", "--compared", "2", "--sample", "4"]), ("recommender", ["--steps", "20"])],
)
def test_the_examples_train(cluster, tmp_path, file, words):
    """With a folder in the place of the claim, and fewer steps, of which the last of a repeated option counts; the demo
    saves after 20. A given cluster may have no volume that all pods share, and so saves nothing."""
    path = control_plane.ROOT / f"examples/k8s/{file}.yaml"
    object = next(o for o in yaml.safe_load_all(path.read_text("utf-8")) if o["kind"] == "ParallelJob")
    spec = object["spec"]
    for volume in spec["workers"].get("pod", {}).get("volumes", []):
        del volume["persistentVolumeClaim"]
        volume |= {"emptyDir": {}} if given_cluster.IMAGE else {"hostPath": {"path": str(tmp_path)}}
    command, workers = [*spec["command"], *words], spec["workers"]
    if given_cluster.IMAGE and "--resume" in command:
        at = command.index("--resume")
        del command[at : at + 2]
    more = {"servers": spec["servers"]} if "servers" in spec else {}
    job = Job(cluster, object["metadata"]["name"], command, workers, cleanPodPolicy="None", **more)
    eventually(lambda: job.status.get("state") in ("Succeeded", "Failed"), "the job ends")
    assert job.status["state"] == "Succeeded", job.log()
    assert job.status["step"] == int(words[1]) and job.log().count("step ") >= 2
    job.delete()


# ---------------------------------------------------------------- what dies


def test_attempts_of_a_script_that_fails_again_and_again_are_in_the_status(cluster):
    script = "import os, sys, time\ntime.sleep(1)\nsys.exit(7 * int(os.environ['RANK']))"
    job = with_script(cluster, "loops", script, [], 2, backoffLimit=50)
    eventually(lambda: job.status.get("attempt") not in (None, "2/51"), "the status has a later attempt")
    said = next(c["message"] for c in job.status["conditions"] if c["type"] == "Running")
    assert re.match(r"attempt \d+ of 51, after: on node 1: rank 1 of 2 failed with exit code 7", said)
    assert job.status["state"] == "Running" and job.status.get("restarts", 0) == 0
    job.delete()


@OURS
def test_a_killed_worker_is_replaced_and_training_goes_on_as_on_one_device(cluster, figures, tmp_path):
    job = trained(cluster, "trains", tmp_path)
    job.runs(2)
    job.reaches(12)
    other = job.uid("worker-0")
    began = time.monotonic()
    uid = job.kill("worker-1")
    job.replaced("worker-1", uid)
    figures["kill -9 of a worker to its replacement running"] = time.monotonic() - began
    hurried(job, tmp_path)
    assert job.uid("worker-0") == other, "the other worker stays"
    assert job.status["restarts"] == 1
    equal_to_torch(tmp_path)
    job.delete()


@OURS
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


OLDER = """
from meshwright.k8s import operator, pods
pods.STOP_SECONDS = 5
operator.run()
"""


@OURS
def test_the_operator_and_the_resource_are_upgraded_under_a_running_job(cluster, stepping):
    """The older ones know no plans, and make pods with another grace."""
    older = definition()
    fields = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    for of, names in (("spec", ["plan"]), ("status", ["plan", "planner"])):
        for name in names:
            del fields[of]["properties"][name]
    cluster.kill("operator")
    cluster.apply(older)
    cluster.start("operator", sys.executable, "-c", OLDER, KUBECONFIG=str(cluster.config("operator")))
    job = stepping("upgraded")
    job.runs(2)
    before = {p["metadata"]["name"]: p["metadata"]["uid"] for p in job.objects("pods")}
    cluster.kill("operator")
    cluster.kubectl("apply", "-f", str(control_plane.ROOT / "deploy/crd.yaml"))
    cluster.start_operator()
    job.replaced("worker-1", job.kill("worker-1"))
    job.runs(2)
    after = {p["metadata"]["name"]: p["metadata"]["uid"] for p in job.objects("pods")}
    assert [name for name in before if before[name] != after[name]] == ["upgraded-worker-1"]
    commands = [job.pod(f"worker-{n}")["spec"]["containers"][0]["command"] for n in (0, 1)]
    assert [words[words.index("--grace") + 1] for words in commands] == ["5", "25"]
    assert job.status["round"] == 1


@OURS
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


@OURS
def test_the_pods_of_a_lost_node_go_elsewhere(cluster, stepping, figures):
    """Workers start on node-b, since nothing else may be scheduled elsewhere then."""

    def taints(node: str) -> bool:
        return bool(cluster.get(f"/api/v1/nodes/{node}")["spec"].get("taints"))

    cluster.ask("PATCH", "/api/v1/nodes/node-a", {"spec": {"unschedulable": True}})
    job = stepping("moves", nodeLossSeconds=1, scheduler={"pod": {"nodeName": "node-a"}})
    job.runs(2)
    cluster.ask("PATCH", "/api/v1/nodes/node-a", {"spec": {"unschedulable": None}})
    eventually(lambda: not taints("node-a"), "node-a may be used again")
    names = ("worker-0", "worker-1")
    assert [job.pod(name)["spec"]["nodeName"] for name in names] == ["node-b", "node-b"]
    uids = {name: job.uid(name) for name in names}
    began = time.monotonic()
    cluster.kill("node-b")
    job.replaced("worker-0", uids["worker-0"])
    figures["node lost (noticed after 4 s, given up after 1 s) to its pod elsewhere"] = (
        time.monotonic() - began
    )
    job.replaced("worker-1", uids["worker-1"])
    assert [job.pod(name)["spec"]["nodeName"] for name in names] == ["node-a", "node-a"]
    job.runs(2)
    assert job.status["restarts"] == 1, "one loss, of two pods"
    cluster.start_node("node-b")
    eventually(lambda: not taints("node-b"), "the node is back")


# ---------------------------------------------------------------- another size, two operators, bad resources


@OURS
def test_workers_scale_and_training_goes_on_as_on_one_device(cluster, figures, tmp_path):
    job = trained(cluster, "scales", tmp_path)
    job.runs(2)
    job.reaches(8)
    for workers in (4, 2):
        began = time.monotonic()
        cluster.kubectl("scale", "paralleljob/scales", f"--replicas={workers}")
        job.runs(workers)
        figures[f"scale to {workers} workers running"] = time.monotonic() - began
        job.steps(f" ranks {workers}")
        figures[f"scale to {workers} workers' first step"] = time.monotonic() - began
        first = int(next(line for line in job.log().splitlines() if line.startswith("step ")).split()[1])
        assert first > 8, "it goes on from a checkpoint"
        job.reaches(first + 5)
    hurried(job, tmp_path)
    assert job.status.get("restarts", 0) == 0
    equal_to_torch(tmp_path)
    job.delete()


def test_ranks_of_more_and_of_fewer_workers(stepping, cluster):
    job = stepping("resized")
    job.runs(2)
    for workers in (3, 2):
        cluster.kubectl("scale", "paralleljob/resized", f"--replicas={workers}")
        job.runs(workers)
        job.steps(f" of {workers}")


@OURS
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
    bad, taken = list(bad_jobs()), []
    for name, object in bad:
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
    assert len(bad) > 250 and len(taken) < len(bad) / 8, "most are refused before an operator sees them"
    assert not [p for p in cluster.get(f"{CORE}/pods") if p["metadata"]["name"].startswith("bad-")]


@pytest.mark.parametrize(
    "path", ["spec.workres", "spec.workers.replica", "spec.server", "spec.scheduler.ports", "sepc"]
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
    assert done.returncode and re.search(rf'unknown field "(\S*\.)?{last}"', done.stderr)
