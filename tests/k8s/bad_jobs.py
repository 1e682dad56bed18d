"""Some 200 ParallelJobs that cannot be, each wrong in one place."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from tests.k8s.control_plane import NAMESPACE

Object = dict[str, Any]
NAMES = ("de_mo", "Demo", "-demo", "demo-", "1demo", "de.mo", "de mo", "d" * 46, "", "démo", "demo/x", "_")
NO_COUNTS: tuple[Any, ...] = (
    -1,
    0,
    -4096,
    0.5,
    1.5,
    "2",
    "0x2",
    None,
    True,
    [],
    [2],
    {},
    {"n": 2},
    1 << 40,
    "many",
)
NO_WORDS: tuple[Any, ...] = (1, None, [], [""], {}, True, "", " ", "NONE", "sometimes")
NO_RECORDS: tuple[Any, ...] = (1, 0.5, "text", [], [{}], True)
VALUES: dict[str, tuple[Any, ...]] = {
    "spec.image": (1, None, "", "a b", " ", [], {}, True, "x" * 2000),
    "spec.command": (
        "train.py",
        [],
        None,
        [1],
        [None],
        {},
        [["a"]],
        1,
        True,
        [" "],
        ["--nnodes", "4", "t.py"],
        ["--master=10.0.0.1:29400", "t.py"],
        ["-n4", "t.py"],
    ),
    "spec.workers": (*NO_RECORDS, None, {}, {"replica": 2}),
    "spec.workers.replicas": (*NO_COUNTS, 5000),
    "spec.workers.ranks": (*(c for c in NO_COUNTS if c is not None), 5000),
    "spec.workers.restartPolicy": (
        *(w for w in NO_WORDS if w is not None),
        "Always",
        "onfailure",
        "ExitCode",
    ),
    "spec.workers.gang": ("true", 1, [], {}, True),  # True: with no scheduler that knows it
    "spec.workers.container": (
        *NO_RECORDS,
        {"image": "y"},
        {"name": "y"},
        {"command": []},
        {"args": ["x"]},
        {"volumeMount": []},
        {"env": [{"name": "A", "valeu": "x"}]},
    ),
    "spec.workers.metadata": (
        *NO_RECORDS,
        {"labels": {"a": 1}},
        {"annotations": ["a"]},
        {"labels": {"meshwright.dev/job": "other"}},
    ),
    "spec.workers.pod": (
        *NO_RECORDS,
        {"containers": []},
        {"restartPolicy": "Always"},
        {"hostname": "h"},
        {"tolerance": []},
    ),
    "spec.workers.independent": ("true", 1, [], {}, True),  # True: without servers
    "spec.servers": (
        *NO_RECORDS,
        {},
        {"replicas": 1, "copies": 1},
        {"replicas": 2, "state": "/in/no/volume"},
        {"replicas": 2, "state": "not/from/the/root"},
        {"replicas": 2, "copies": 2},
        {"replicas": 2, "copies": "1"},
        {"replicas": 65},
        *({"replicas": count} for count in NO_COUNTS),
        {"replicas": 2, "container": {"image": "y"}},
        {"replicas": 2, "pod": {"restartPolicy": "Always"}},
    ),
    "spec.workers.queue": ("Team", "a_b", "-a", "a.b", "a" * 64, 1, True, []),
    "spec.plan": (
        *NO_RECORDS,
        {},
        {"cluster": "cpu"},
        {"model": ""},
        {"model": "a b", "cluster": "cpu"},
        {"model": "m.py:f"},  # no cluster, and no GPU
        {"model": "m.py:f", "cluster": "h1000"},
        {"model": "m.py:f", "cluster": "cpu", "options": "--batch 8"},
        {"model": "m.py:f", "cluster": "cpu", "options": ["--output", "x"]},
        {"model": "m.py:f", "cluster": "cpu", "container": {"image": "y"}},
    ),
    "spec.scheduler": NO_RECORDS,
    "spec.scheduler.port": (0, 80, 1023, 65536, -1, "29400", 1.5, True, []),
    "spec.scheduler.container": (*NO_RECORDS, {"image": "y"}),
    "spec.scheduler.pod": (*NO_RECORDS, {"subdomain": "y"}),
    "spec.successPolicy": (*(w for w in NO_WORDS if w is not None), "All", "allworkers", "None"),
    "spec.cleanPodPolicy": (*(w for w in NO_WORDS if w is not None), "all", "Never", "Pods"),
    "spec.backoffLimit": (-1, 1001, 1.5, "6", True, []),
    "spec.activeDeadlineSeconds": (-1, 0, 1.5, "60", True, [], 1 << 40),
    "spec.ttlSecondsAfterFinished": (-1, 1.5, "60", True, [], 1 << 40),
    "spec.nodeLossSeconds": (-1, 1.5, "60", True, [], 1 << 40),
    "spec.suspend": ("true", 1, 0, [], {}),
    "spec": (*NO_RECORDS, None, {}),
}
MISSING = ("spec", "spec.image", "spec.command", "spec.workers", "spec.workers.replicas")
PODS_REFUSED: tuple[tuple[str, Any], ...] = (
    ("container", {"resources": {"limits": {"cpu": "much"}}}),
    ("container", {"resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}}),
    ("container", {"volumeMounts": [{"name": "none", "mountPath": "/x"}]}),
    ("container", {"env": [{"name": "A=B", "value": "x"}]}),
    ("pod", {"volumes": [{"name": "a"}, {"name": "a"}]}),
)


def good() -> Object:
    return {
        "apiVersion": "meshwright.dev/v1alpha1",
        "kind": "ParallelJob",
        "metadata": {"name": "good", "namespace": NAMESPACE},
        "spec": {"image": "x", "command": ["t.py"], "workers": {"replicas": 1}, "scheduler": {}},
    }


def bad_jobs() -> Iterator[tuple[str, Object]]:
    """What is wrong, and the job."""
    for name in NAMES:
        object = good()
        object["metadata"]["name"] = name
        yield f"name {name!r}", object
    for path in MISSING:
        at, last, object = _at(path)
        del at[last]
        yield f"no {path}", object
    for path, values in VALUES.items():
        for value in values:
            at, last, object = _at(path)
            at[last] = copy.deepcopy(value)
            yield f"{path} {value!r:.40}", object
    for field, value in PODS_REFUSED:
        object = good()
        object["spec"]["scheduler"][field] = value
        yield f"spec.scheduler.{field} {value!r:.60}", object


def _at(path: str) -> tuple[Object, str, Object]:
    object = good()
    *parents, last = path.split(".")
    at = object
    for name in parents:
        at = at[name]
    return at, last, object
