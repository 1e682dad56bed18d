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
      template: {spec: {containers: [{name: mindspore, image: i:1, command: [python, train.py]}]}}
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
            ports: [{containerPort: 2222, name: msjob-port}]
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
                    "env": [{"name": "GLOG_v", "value": "1"}],
                },
                "pod": {"volumes": [{"name": "data", "hostPath": {"path": "/data"}}]},
            },
            "cleanPodPolicy": "None",
            "backoffLimit": 3,
        },
    }


def test_servers_of_mindspore_run_beside_the_workers():
    job = copy.deepcopy(MSJOB)
    job["spec"]["msReplicaSpecs"]["PS"] = {**job["spec"]["msReplicaSpecs"]["Worker"], "replicas": 8}
    assert convert(job)["spec"]["command"][:3] == ["--servers", "2", "/root/train.py"]


def changed(path: str, value: Any) -> dict[str, Any]:
    job = copy.deepcopy(MSJOB)
    *parents, last = path.split(".")
    at = job
    for name in parents:
        at = at[name]
    at[last] = value
    return job


TEMPLATE = {
    "spec": {
        "containers": [{"name": "mindspore", "image": "i", "command": ["bash", "-c", "cd /x && python t.py"]}]
    }
}


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("kind", "Job", "no MSJob but 'Job'"),
        ("metadata.name", "wide_deep", "'wide_deep' cannot be"),
        ("spec.msReplicaSpecs.Wroker", {}, "has Wroker"),
        ("spec.msReplicaSpecs.PS", {"replicas": 3}, "3 PS beside 4 workers"),
        ("spec.msReplicaSpecs.Worker.replicas", -1, "no ParallelJob"),
        ("spec.msReplicaSpecs.Worker.template", TEMPLATE, "a program of a shell"),
        ("spec.runPolicy.schedulingPolicy", {"minAvailable": 3}, "schedulingPolicy"),
        ("spec.successPolicy", "Most", "successPolicy is 'Most'"),
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
        (Asked("demo", "i", ("t.py",), 0), "pytorchjob", "no ParallelJob"),
        (Asked("demo", "i", ("t.py",), 1), "job-set", "one of meshwright, jobset"),
        (Asked("demo", "i", ("t.py",), 1, queue="team"), "meshwright", "--queue"),
    ],
)
def test_manifests_that_cannot_be(asked, controller, says):
    with pytest.raises(LaunchError, match=says):
        manifest(asked, controller)
