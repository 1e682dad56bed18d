"""What the operator does when the API server refuses, or has no jobs yet, or cannot be reached at all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("kopf")

from meshwright.errors import LaunchError
from meshwright.k8s.api import message_of
from meshwright.k8s.operator import Followed, Operator, run
from tests.k8s.one_job import JOB, PODS, condition, start, started, with_job

NO_FILE = """
current-context: a
contexts: [{name: a, context: {cluster: a, user: a}}]
clusters: [{name: a, cluster: {server: "https://localhost:1", certificate-authority: /no/ca.pem}}]
users: [{name: a}]
"""


@pytest.mark.parametrize("code", [403, 409])  # 409: two writers of a quota
def test_pods_that_the_server_refuses_are_a_condition(code):
    async def do(server: Any, operator: Operator) -> None:
        server.refuses, followed = (code, "exceeded quota: gpus"), Followed()
        again = await operator.turn("default", "demo", followed)
        status, before = server.objects[JOB]["status"], len(server.requests)
        assert isinstance(again, float) and status["state"] == "Refused"
        assert "exceeded quota: gpus" in str(status["conditions"])
        assert await operator.turn("default", "demo", followed) == again  # the event of its own write
        # the job, its service and its pods
        assert sorted(server.requests[before:]) == [("GET", "demo"), ("GET", "demo"), ("GET", "pods")]
        followed.retry_at = 0.0
        await operator.turn("default", "demo", followed)
        assert "PUT" not in [method for method, _ in server.requests[before:]] and not server.names("pods")
        followed.retry_at, server.refuses = 0.0, None
        await operator.turn("default", "demo", followed)
        assert server.names("pods") == ["demo-scheduler"]
        await operator.turn("default", "demo", followed)
        assert server.objects[JOB]["status"]["state"] == "Starting"
        await started(server, operator)
        assert server.objects[JOB]["status"]["state"] == "Running"

    with_job(do)


@pytest.mark.parametrize(
    ("path", "name", "before"),
    [
        (PODS, "demo-worker-1", ["demo-scheduler", "demo-worker-0", "demo-worker-1"]),
        ("/api/v1/namespaces/default/services", "demo", []),
    ],
)
def test_a_foreign_pod_or_service_of_the_name_is_named_until_it_goes(path, name, before):
    foreign = {"metadata": {"name": name}, "spec": {"selector": {"app": "web"}}, "status": {}}

    async def do(server: Any, operator: Operator) -> None:
        server.put(f"{path}/{name}", foreign)
        followed = Followed()
        for _ in range(3):
            again = await operator.turn("default", "demo", followed)
            start(server)
            followed.retry_at = 0.0
        assert isinstance(again, float) and server.names("pods") == before
        assert server.objects[JOB]["status"]["state"] == "Refused"
        kind = path.rsplit("/", 1)[1].removesuffix("s")
        assert (
            f"the {kind} {name} is there already, and not of this job"
            in condition(server, "Valid")["message"]
        )
        assert server.objects[f"{path}/{name}"]["spec"] == foreign["spec"], "it is not touched"
        del server.objects[f"{path}/{name}"]
        for _ in range(5):
            await operator.turn("default", "demo", followed)
            start(server)
        assert server.objects[JOB]["status"]["state"] == "Running"
        assert condition(server, "Valid")["status"] == "True"

    with_job(do)


def test_jobs_are_found_when_their_definition_comes_after_the_operator(caplog):
    async def settled(server: Any, operator: Operator) -> None:
        """Wait until all turns are through: nothing is asked for a while."""
        asked = -1
        while asked != len(server.requests) or any(f.woken.is_set() for f in operator._jobs.values()):
            asked = len(server.requests)
            await asyncio.sleep(0.2)

    async def do(server: Any, operator: Operator) -> None:
        server.installed = False
        for _ in range(2):
            await operator.find()
        assert caplog.text.count("no paralleljobs.meshwright.dev: kubectl apply -f deploy/crd.yaml") == 1
        server.installed = True
        await operator.find()
        await settled(server, operator)
        assert server.names("pods") == ["demo-scheduler"]
        before = len(server.requests)
        await operator.find()  # nothing is new
        await settled(server, operator)
        assert server.requests[before:] == [("GET", "paralleljobs")]
        server.objects[JOB]["spec"]["suspend"] = True
        server.objects[JOB]["metadata"]["generation"] = 2
        await operator.find()
        await settled(server, operator)
        assert server.objects[JOB]["status"]["state"] == "Suspended"
        del server.objects[JOB]
        await operator.find()
        await settled(server, operator)
        assert not server.names("pods") and not operator._jobs

    with_job(do)


@pytest.mark.parametrize(
    "content", [None, "{}", "current-context: here\ncontexts: []\n", "a: [", "[1]", NO_FILE]
)
def test_an_operator_without_a_usable_configuration_says_so_and_ends(tmp_path, monkeypatch, content):
    file = tmp_path / "config"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("KUBECONFIG", str(file))
    with pytest.raises(LaunchError, match=f"cannot use KUBECONFIG {file}\n  why:   \\S"):
        run()
    monkeypatch.setenv("KUBECONFIG", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(LaunchError, match="knows no API server"):
        run()


PLUGIN = """
current-context: a
contexts: [{name: a, context: {cluster: a, user: a}}]
clusters: [{name: a, cluster: {server: "https://localhost:1"}}]
users: [{name: a, user: {exec: {apiVersion: client.authentication.k8s.io/v1, command: aws}}}]
"""


def test_a_configuration_whose_plugin_would_have_to_be_run_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "config"
    file.write_text(PLUGIN)
    monkeypatch.setenv("KUBECONFIG", str(file))
    with pytest.raises(LaunchError, match="no token and no certificate, and the operator runs no plugin"):
        run()


@pytest.mark.parametrize(
    ("major", "minor", "warns"),
    [("1", "19", True), ("1", "20+", False), ("1", "34", False), ("2", "0", False), ("", "", False)],
)
def test_an_api_server_that_is_too_old_is_named(major, minor, warns, caplog):
    async def do(server: Any, operator: Operator) -> None:
        server.version = {"major": major, "minor": minor, "gitVersion": "v1.x"}
        await operator.greet()
        assert ("is for Kubernetes 1.20 and newer" in caplog.text) == warns

    with_job(do)


def test_a_timeout_is_not_without_words():
    assert message_of(TimeoutError()) == "the API server has not answered within 30 s"
    assert (message_of(OSError()), message_of(ValueError("x"))) == ("OSError", "x")


def test_a_change_of_what_was_refused_is_tried_at_once():
    async def do(server: Any, operator: Operator) -> None:
        server.refuses, followed = (422, "no such field"), Followed()
        await operator.turn("default", "demo", followed)
        server.refuses = None
        server.objects[JOB]["metadata"]["generation"] = 2
        await operator.turn("default", "demo", followed)
        assert server.names("pods") == ["demo-scheduler"]
        assert condition(server, "Valid")["status"] == "True"

    with_job(do)
