"""Fields of pods on a real API server, which drops those that it does not know: ``make k8s-test``."""

from __future__ import annotations

import json

import pytest

from tests.k8s.control_plane import Cluster, eventually
from tests.k8s.jobs import JOBS, MARKS, OURS, Job

pytestmark = MARKS


def refusal(cluster: Cluster, job: Job) -> str:
    """What the job and its event say."""
    job.is_in("Refused")
    said = next(c["message"] for c in job.status["conditions"] if c["type"] == "Valid")

    def event() -> str:
        shown = cluster.kubectl(
            "get", "events", "--field-selector", f"involvedObject.name={job.name}", "-o", "json"
        )
        found = [e for e in json.loads(shown.stdout)["items"] if e["involvedObject"]["kind"] == "ParallelJob"]
        return found[0]["message"] if found else ""

    assert eventually(event, "there is an event") == " ".join(said.split())
    assert not job.objects("pods")
    return said


def test_a_typing_error_is_refused_and_the_job_starts_when_it_is_mended(cluster, stepping):
    limits = {"cpu": "1"}
    container = {"resources": {"limit": limits}, "imagePulPolicy": "IfNotPresent"}
    job = stepping("typo", {"replicas": 2, "container": container, "pod": {"nodeSelectr": {"a": "b"}}})
    assert refusal(cluster, job) == (
        "workers.container has imagePulPolicy, workers.container.resources has limit, workers.pod has nodeSelectr\n"
        "  why:   pods of this cluster have no such field\n"
        "  try:   imagePulPolicy: did you mean 'imagePullPolicy'?; limit: did you mean 'limits'?; "
        "nodeSelectr: did you mean 'nodeSelector'?"
    )
    mended = {"resources": {"limits": limits, "limit": None}, "imagePulPolicy": None, "tty": False}
    workers = {"container": mended, "pod": {"nodeSelectr": None}}
    cluster.ask("PATCH", f"{JOBS}/typo", {"spec": {"workers": workers}})
    job.runs(2)
    assert job.pod("worker-0")["spec"]["containers"][0]["resources"]["limits"] == limits


@OURS
@pytest.mark.parametrize(
    ("container", "known"),
    [({"startupProbe": {"exec": {"command": ["true"]}}}, True), ({"resizePolicy": []}, False)],
)
def test_fields_are_those_of_this_version_of_kubernetes(cluster, stepping, container, known):
    """Kubernetes 1.20 has probes at the start, and 1.27 has `resizePolicy`."""
    job = stepping("newer", {"replicas": 1, "container": container})
    if known:
        job.runs(1)
    else:
        assert "workers.container has resizePolicy" in refusal(cluster, job)


def test_labels_and_annotations_of_pods(cluster, stepping):
    metadata = {"labels": {"team": "vision"}, "annotations": {"sidecar.istio.io/inject": "false"}}
    job = stepping(
        "labelled", {"replicas": 2, "metadata": metadata}, scheduler={"metadata": {"labels": {"team": "x"}}}
    )
    job.runs(2)
    for name, team in (("worker-0", "vision"), ("worker-1", "vision"), ("scheduler", "x")):
        found = job.pod(name)["metadata"]
        assert (found["labels"]["team"], found["labels"]["meshwright.dev/job"]) == (team, "labelled")
    assert job.pod("worker-1")["metadata"]["annotations"] == metadata["annotations"]
    assert cluster.kubectl("get", "pods", "-l", "team=vision", "-o", "name").stdout.count("pod/") == 2
