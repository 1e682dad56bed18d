"""The operator refuses fields that pods do not have, and says so where people look."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("kopf")

from meshwright.k8s.operator import Followed, Operator
from tests.k8s.one_job import JOB, PODS, condition, ended, started, with_job

TYPO = {"replicas": 2, "container": {"resources": {"limit": {"nvidia.com/gpu": 8}}}}


def events(server: Any) -> list[dict[str, Any]]:
    return [o for path, o in server.objects.items() if "/events/" in path]


def test_a_typing_error_makes_no_pod_and_is_a_condition_and_an_event():
    async def do(server: Any, operator: Operator) -> None:
        followed = Followed()
        for _ in range(3):
            await operator.turn("default", "demo", followed)
        assert server.objects[JOB]["status"]["state"] == "Refused" and not server.names("pods")
        said = condition(server, "Valid")["message"]
        assert said.startswith("workers.container.resources has limit\n") and "did you mean 'limits'?" in said
        (event,) = events(server)
        assert (event["type"], event["reason"], event["message"]) == (
            "Warning",
            "Refused",
            " ".join(said.split()),
        )
        about = event["involvedObject"]
        assert (about["kind"], about["name"]) == ("ParallelJob", "demo")
        assert about["uid"] == server.objects[JOB]["metadata"]["uid"]
        assert [name for _, name in server.requests].count("v2") == 1, "the document is read once"
        await operator.greet()
        await operator.turn("default", "demo", followed)
        assert [name for _, name in server.requests].count("v2") == 2, "or before a job comes"
        limits = {"limits": {"nvidia.com/gpu": 8}}
        server.objects[JOB]["spec"]["workers"]["container"]["resources"] = limits
        server.objects[JOB]["metadata"]["generation"] = 2
        await started(server, operator)
        assert server.objects[JOB]["status"]["state"] == "Running"
        assert condition(server, "Valid")["status"] == "True"

    with_job(do, workers=TYPO)


def test_pods_that_run_when_the_operator_learns_of_a_field_go_on():
    """An operator of an older version has let it through."""

    async def do(server: Any, operator: Operator) -> None:
        await started(server, operator)
        del server.types["Container"]["tty"]
        newer = Operator(operator.api)
        ended(server, "demo-worker-1", 137, "")
        await started(server, newer)
        assert server.objects[JOB]["status"]["state"] == "Running"
        server.objects[JOB]["spec"]["workers"]["ranks"] = 2  # but their next settings are looked at
        await newer.turn("default", "demo", Followed())
        assert "workers.container has tty" in condition(server, "Valid")["message"]
        assert len(server.names("pods")) == 3

    with_job(do, workers={"replicas": 2, "container": {"tty": True}})


def test_a_field_of_a_cluster_that_was_upgraded_is_known_a_minute_later():
    async def do(server: Any, operator: Operator) -> None:
        known = server.types["ResourceRequirements"]
        await operator.turn("default", "demo", Followed())
        server.types["ResourceRequirements"] = {**known, "limit": ""}
        await operator.turn("default", "demo", Followed())
        assert condition(server, "Valid")["status"] == "False"
        operator._fields = 0.0, operator._fields[1]
        await operator.turn("default", "demo", Followed())
        assert condition(server, "Valid")["status"] == "True" and server.names("pods") == ["demo-scheduler"]

    with_job(do, workers=TYPO)


def test_without_a_document_the_published_fields_count(caplog):
    async def do(server: Any, operator: Operator) -> None:
        server.types = {}
        await operator.turn("default", "demo", Followed())
        assert "has limit" in condition(server, "Valid")["message"]
        assert "the OpenAPI document of the API server has no pods" in caplog.text

    with_job(do, workers=TYPO)


def test_each_restart_and_the_end_are_events():
    async def do(server: Any, operator: Operator) -> None:
        await started(server, operator)
        assert not events(server)
        ended(server, "demo-worker-1", 137, "")
        await started(server, operator)
        ended(server, "demo-worker-0", 3, "ValueError: no data\n")
        await operator.turn("default", "demo", Followed())
        assert [(e["reason"], e["message"]) for e in events(server)] == [
            ("Restarting", "demo-worker-1: exit code 137, signal 9"),
            ("WorkerFailed", "demo-worker-0: exit code 3: ValueError: no data"),
        ]

    with_job(do)


def test_an_operator_that_may_make_no_events_goes_on():
    async def do(server: Any, operator: Operator) -> None:
        server.no_events = True
        await operator.turn("default", "demo", Followed())
        assert "has limit" in condition(server, "Valid")["message"] and not events(server)

    with_job(do, workers=TYPO)


def test_labels_and_annotations_of_pods_beside_those_of_the_operator():
    async def do(server: Any, operator: Operator) -> None:
        await started(server, operator)
        found = {name: server.objects[f"{PODS}/{name}"]["metadata"] for name in server.names("pods")}
        for metadata in found.values():
            assert metadata["labels"]["meshwright.dev/job"] == "demo"
        assert found["demo-worker-1"]["labels"]["team"] == "vision"
        annotations = found["demo-worker-1"]["annotations"]
        assert annotations["sidecar.istio.io/inject"] == "false"
        assert annotations["kueue.x-k8s.io/pod-group-total-count"] == "2"
        assert found["demo-server-0"]["labels"]["team"] == "platform"
        assert "annotations" not in found["demo-server-0"] and "team" not in found["demo-scheduler"]["labels"]

    workers = {
        "replicas": 2,
        "queue": "team",
        "metadata": {"labels": {"team": "vision"}, "annotations": {"sidecar.istio.io/inject": "false"}},
    }
    with_job(do, workers=workers, servers={"replicas": 1, "metadata": {"labels": {"team": "platform"}}})


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"labels": {"meshwright.dev/job": "x"}}, "workers.metadata.labels has meshwright.dev/job"),
        ({"annotations": {"meshwright.dev/new": "x"}}, "workers.metadata.annotations has meshwright.dev/new"),
        ({"labels": {"kueue.x-k8s.io/queue-name": "x"}}, "workers.queue"),
        ({"label": {"a": "b"}}, "unknown field `label`"),
        ({"labels": {"a": 1}}, "Expected `str`, got `int`"),
    ],
)
def test_labels_that_cannot_be(metadata, says):
    async def do(server: Any, operator: Operator) -> None:
        await operator.turn("default", "demo", Followed())
        assert says in condition(server, "Valid")["message"] and not server.names("pods")

    with_job(do, workers={"replicas": 2, "metadata": metadata})
