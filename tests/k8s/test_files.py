"""Manifests for other controllers, and jobs of MindSpore's operator."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.errors import LaunchError
from meshwright.k8s.convert import convert
from meshwright.k8s.manifests import CONTROLLERS, Asked, manifest

PUBLISHED: dict[str, dict[str, str]] = yaml.safe_load(
    Path(__file__).with_name("published_fields.yaml").read_text("utf-8")
)
TYPES = {
    "string": str,
    "boolean": bool,
    "integer": int,
    "int-or-string": int | str,
    "object": dict,
}
ASKED = Asked("demo", "image:1", ("train.py", "--epochs", "3"), workers=3, ranks=8, gpus=8)
MSJOB = yaml.safe_load("""
apiVersion: mindspore.gitee.com/v1
kind: MSJob
metadata: {name: wide-deep, namespace: jobs}
spec:
  runPolicy: {cleanPodPolicy: None, backoffLimit: 3}
  successPolicy: AllWorkers
  msReplicaSpecs:
    Scheduler:
      replicas: 1
      restartPolicy: Never
      template:
        spec:
          containers:
          - name: mindspore
            image: i:1
            command: [python, /root/train.py, --data_path=/data, --epochs=1]
            ports: [{containerPort: 2222, name: msjob-port}]
    Worker:
      replicas: 4
      restartPolicy: Never
      template:
        spec:
          volumes: [{name: data, hostPath: {path: /data}}]
          containers:
          - name: mindspore
            image: i:1
            imagePullPolicy: IfNotPresent
            command: [/bin/bash, -c, "python -s /root/train.py --data_path=/data --epochs=1"]
            ports: [{containerPort: 2222, name: msjob-port}, {containerPort: 9090, name: metrics}]
            volumeMounts: [{name: data, mountPath: /data}]
            env: [{name: GLOG_v, value: "1"}]
""")


def test_a_job_of_mindspore():
    assert convert(MSJOB) == {
        "apiVersion": "meshwright.dev/v1alpha1",
        "kind": "ParallelJob",
        "metadata": {"name": "wide-deep", "namespace": "jobs"},
        "spec": {
            "image": "i:1",
            "command": ["/root/train.py", "--data_path=/data", "--epochs=1"],
            "workers": {
                "replicas": 4,
                "restartPolicy": "Never",
                "container": {
                    "imagePullPolicy": "IfNotPresent",
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                    "env": [{"name": "GLOG_v", "value": "1"}, {"name": "PYTHONNOUSERSITE", "value": "1"}],
                    "ports": [{"containerPort": 9090, "name": "metrics"}],
                },
                "pod": {"volumes": [{"name": "data", "hostPath": {"path": "/data"}}]},
            },
            "cleanPodPolicy": "None",
            "backoffLimit": 3,
        },
    }


def test_labels_of_pods_stay():
    metadata = {"labels": {"team": "vision"}, "annotations": {"sidecar.istio.io/inject": "false"}}
    job = changed(f"{WORKER}.template.metadata", {**metadata, "creationTimestamp": None})
    assert convert(job)["spec"]["workers"]["metadata"] == metadata


def test_servers_of_mindspore_are_servers():
    job = copy.deepcopy(MSJOB)
    worker = job["spec"]["msReplicaSpecs"]["Worker"]
    job["spec"]["msReplicaSpecs"]["PS"] = {**worker, "replicas": 3}
    spec = convert(job)["spec"]
    assert spec["servers"] == {
        "replicas": 3,
        "container": spec["workers"]["container"],
        "pod": spec["workers"]["pod"],
    }
    other = copy.deepcopy(worker)
    other["template"]["spec"]["containers"][0]["image"] = "i:2"
    job["spec"]["msReplicaSpecs"]["PS"] = other
    with pytest.raises(LaunchError, match="another image or command than Worker"):
        convert(job)


def changed(path: str, value: Any) -> dict[str, Any]:
    job = copy.deepcopy(MSJOB)
    *parents, last = path.split(".")
    at = job
    for name in parents:
        at = at[name]
    at[last] = value
    return job


WORKER, SCHEDULER = (f"spec.msReplicaSpecs.{role}" for role in ("Worker", "Scheduler"))


def containers(image: str, *options: str) -> list[dict[str, Any]]:
    return [{"name": "mindspore", "image": image, "command": ["python", *options, "other.py"]}]


TEMPLATE = {
    "spec": {
        "containers": [{"name": "mindspore", "image": "i", "command": ["bash", "-c", "cd /x && python t.py"]}]
    }
}


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("kind", "Job", "not an MSJob but 'Job'"),
        ("metadata.name", "wide_deep", "'wide_deep' cannot name"),
        ("spec.msReplicaSpecs.Wroker", {}, "has Wroker\n.*\n.*did you mean 'Worker'"),
        ("spec.msReplicaSpecs.PS", {"replicas": 3}, "spec.msReplicaSpecs.PS.template is None"),
        ("spec.msReplicaSpecs.Worker.replicas", -1, "not a ParallelJob"),
        ("spec.msReplicaSpecs.Worker.template", TEMPLATE, "a shell script"),
        ("spec.runPolicy.schedulingPolicy", {"minAvailable": 3}, "schedulingPolicy"),
        ("spec.successPolicy", "Most", "successPolicy is 'Most'"),
        (f"{WORKER}.template.metadata", {"finalizers": ["a"]}, "template.metadata has finalizers"),
        (
            f"{WORKER}.template.metadata",
            {"labels": {"meshwright.dev/job": "b"}},
            "labels has meshwright.dev/job",
        ),
        (f"{WORKER}.template.spec.nodeSelectr", {}, "workers.pod has nodeSelectr\n.*of Kubernetes 1."),
        (f"{WORKER}.template.spec.hostname", "h", "template.spec has hostname"),
        (f"{WORKER}.template.spec.restartPolicy", "Always", "template.spec.restartPolicy is not"),
        (
            f"{SCHEDULER}.restartPolicy",
            "Always",
            "Scheduler.restartPolicy is 'Always', and that of Worker 'Never'",
        ),
        (f"{SCHEDULER}.replicas", 2, "Scheduler.replicas is not 1"),
        (
            f"{SCHEDULER}.template.spec.containers",
            containers("i:2"),
            "Scheduler has another image or command",
        ),
        (
            f"{SCHEDULER}.template.spec.containers",
            containers("i:1"),
            "Scheduler has another image or command",
        ),
        (f"{WORKER}.template.spec.containers", containers("i:1", "-E"), "has Python's option -E"),
        (f"{WORKER}.template.spec.containers", containers("i:1", "-c"), "option -c\n.*\n.*a file with"),
        (
            "spec.runPolicy.cleanPodPolicy",
            "none",
            "cleanPodPolicy is 'none'\\n.*must be one of 'Running', 'All', 'None'",
        ),
        ("metadata.finalizers", ["x"], "metadata has finalizers"),
        ("extra", 1, "the MSJob has extra"),
    ],
)
def test_what_has_no_counterpart_is_refused(path, value, says):
    with pytest.raises(LaunchError, match=says):
        convert(changed(path, value))


def test_manifests_for_every_controller():
    made = {name: manifest(ASKED, name) for name in CONTROLLERS}
    assert {m["kind"] for m in made.values()} == {"ParallelJob", *PUBLISHED}
    assert all(m["metadata"] == {"name": "demo"} for m in made.values())
    set_of = made["jobset"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    command = set_of["template"]["spec"]["containers"][0]["command"]
    assert (set_of["completions"], command[-4:]) == (3, ["demo-worker-0-0.demo:29400", *ASKED.command])
    roles = made["pytorchjob"]["spec"]["pytorchReplicaSpecs"]
    assert (roles["Master"]["replicas"], roles["Worker"]["replicas"]) == (1, 2)
    assert made["trainjob"]["spec"]["trainer"]["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 8}}
    groups = made["rayjob"]["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert [group["replicas"] for group in groups] == [3]
    served = manifest(Asked("demo", "i", ("t.py",), workers=2, servers=2), "meshwright")
    assert served["spec"]["servers"] == {"replicas": 2}
    queued = manifest(Asked("demo", "i", ("t.py",), workers=2, queue="team"), "meshwright")
    assert queued["spec"]["workers"]["queue"] == "team" and queued["metadata"] == {"name": "demo"}
    planned = manifest(Asked("demo", "i", ("t.py",), workers=2, gpus=8, plan="m.py:f"), "meshwright")
    assert planned["spec"]["plan"] == {"model": "m.py:f"}
    assert made["rayjob"]["spec"]["entrypoint"].endswith("--nnodes 3 --nproc 8 --gpus 8 train.py --epochs 3")


def at(value: Any, steps: list[str]) -> Iterator[tuple[bool, Any]]:
    """What a path leads to, with whether it is missing: name, [] for each item, {} for each value, * if required."""
    if not steps:
        yield False, value
        return
    first, *rest = steps
    name = first.rstrip("*[]{}")
    if name not in value:
        yield first.rstrip("[]{}").endswith("*"), None
        return
    below = value[name]
    items = below if "[]" in first else below.values() if "{}" in first else [below]
    for one in items:
        yield from at(one, rest)


def leaves(value: Any, path: str = "") -> Iterator[str]:
    match value:
        case dict() if value:
            for name, one in value.items():
                yield from leaves(one, f"{path}.{name}")
        case list() if value:
            for one in value:
                yield from leaves(one, path)
        case _:
            yield path[1:]


@pytest.mark.parametrize("controller", [name for name in CONTROLLERS if name != "meshwright"])
def test_a_manifest_has_the_fields_that_its_controller_has_published(controller):
    made = manifest(Asked("demo", "image:1", ("train.py",), workers=3, gpus=8, queue="team"), controller)
    assert made["metadata"] == {"name": "demo", "labels": {"kueue.x-k8s.io/queue-name": "team"}}
    fields, seen = PUBLISHED[made["kind"]], 0
    for path, kind in fields.items():
        for missing, value in at(made, path.split(".")):
            assert not missing, path
            assert value is None or isinstance(value, TYPES[kind]), path
            seen += value is not None
    assert seen == len(list(leaves({"spec": made["spec"]})))  # and no others


@pytest.mark.parametrize(
    ("asked", "controller", "says"),
    [
        (Asked("de_mo", "i", ("t.py",), 1), "meshwright", "de_mo"),
        (Asked("demo", "i", ("t.py",), 0), "pytorchjob", "not a ParallelJob"),
        (Asked("demo", "i", ("t.py",), 1), "job-set", "one of meshwright, jobset"),
        (Asked("demo", "i", ("t.py",), 1, queue="Team"), "jobset", "spec.workers.queue"),
        (Asked("demo", "i", ("t.py",), 1, servers=2), "jobset", "--servers is for our own resource"),
        (Asked("demo", "i", ("t.py",), 1, servers=-1), "meshwright", "not a ParallelJob"),
        (Asked("demo", "i", ("t.py",), 1, plan="m.py:f"), "rayjob", "--plan is for our own resource"),
        (Asked("demo", "i", ("t.py",), 1, plan="m.py:f"), "meshwright", "plan has no cluster"),
        (Asked("demo", "i", ("t.py",), 1, cluster="cpu"), "meshwright", "not a ParallelJob"),
    ],
)
def test_manifests_that_cannot_be(asked, controller, says):
    with pytest.raises(LaunchError, match=says):
        manifest(asked, controller)
