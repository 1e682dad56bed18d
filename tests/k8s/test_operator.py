"""The operator against an API server in this process: what it makes, and of which job it is."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("kopf")

from meshwright.k8s.operator import Followed, Operator
from tests.k8s.one_job import JOB, PODS, start, started, with_job


def test_what_is_made_and_that_it_is_owned_by_the_job():
    async def do(server: Any, operator: Operator) -> None:
        await started(server, operator)
        assert server.names("pods") == ["demo-scheduler", "demo-worker-0", "demo-worker-1"]
        secret = f"demo-{server.objects[JOB]['metadata']['uid'][:8]}"
        assert (server.names("secrets"), server.names("services")) == ([secret], ["demo"])
        owned = [o for path, o in server.objects.items() if path != JOB]
        uids = {o["metadata"]["ownerReferences"][0]["uid"] for o in owned}
        assert uids == {server.objects[JOB]["metadata"]["uid"]}
        container = server.objects[f"{PODS}/demo-worker-1"]["spec"]["containers"][0]
        assert "10.0.0.7:29400" in container["command"] and container["command"][-1] == "t.py"
        assert server.objects[JOB]["status"]["state"] == "Running"
        before = len(server.requests)
        await operator.turn("default", "demo", Followed())
        assert {method for method, _ in server.requests[before:]} == {
            "GET"
        }  # nothing to do: nothing is written

    with_job(do)


@pytest.mark.parametrize(("given", "grace"), [(None, "25"), (120, "115"), (3, "1")])
def test_ranks_have_the_time_of_their_pod_to_stop(given, grace):
    async def do(server: Any, operator: Operator) -> None:
        await started(server, operator)
        command = server.objects[f"{PODS}/demo-worker-0"]["spec"]["containers"][0]["command"]
        assert command[command.index("--grace") + 1] == grace

    pod = {} if given is None else {"terminationGracePeriodSeconds": given}
    with_job(do, workers={"replicas": 2, "pod": pod})


def test_a_job_with_servers_and_their_number_is_changed():
    async def do(server: Any, operator: Operator) -> None:
        await started(server, operator)
        followed = await started(server, operator)
        names = ["demo-scheduler", "demo-server-0", "demo-server-1", "demo-worker-0", "demo-worker-1"]
        assert server.names("pods") == names
        server.objects[JOB]["spec"]["servers"]["replicas"] = 3
        for _ in range(2):
            await operator.turn("default", "demo", followed)
            start(server)
        assert server.names("pods") == sorted([*names, "demo-move", "demo-server-2"])
        path = f"{PODS}/demo-move"
        command = server.objects[path]["spec"]["containers"][0]["command"]
        assert command[:6] == ["meshwright", "ps", "spread", "3", "--master", "10.0.0.7:29400"]
        server.objects[path]["status"] = {"phase": "Succeeded"}
        await operator.turn("default", "demo", followed)
        assert server.names("pods") == [*names[:3], "demo-server-2", *names[3:]]
        assert server.objects[JOB]["status"]["servers"] == {"first": 2, "spread": 3, "moving": 0}

    with_job(do, workers={"replicas": 2, "independent": True}, servers={"replicas": 2})


def test_of_two_operators_the_second_to_write_does_nothing():
    async def do(server: Any, operator: Operator) -> None:
        other = dict(server.objects[JOB])
        server.before_write = lambda: server.put(JOB, other)  # somebody else was faster
        with pytest.raises(Exception, match="changed"):
            await operator.turn("default", "demo", Followed())
        assert not server.names("pods")
        await started(server, operator)
        assert len(server.names("pods")) == 3

    with_job(do)


def test_a_spec_that_cannot_be_makes_nothing():
    async def do(server: Any, operator: Operator) -> None:
        await operator.turn("default", "demo", Followed())
        assert "container has image" in str(server.objects[JOB]["status"]["conditions"])
        server.objects[JOB]["spec"]["workers"]["container"] = {"env": [{"name": "A", "value": 1}]}
        await operator.turn("default", "demo", Followed())
        assert 'value: "1"' in str(server.objects[JOB]["status"]["conditions"])
        assert not server.names("pods")

    with_job(do, workers={"replicas": 1, "container": {"image": "other"}})


def test_a_job_that_is_gone_or_on_its_way_is_left_alone():
    async def do(server: Any, operator: Operator) -> None:
        server.objects[JOB]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        assert await operator.turn("default", "demo", Followed()) is None
        del server.objects[JOB]
        assert await operator.turn("default", "demo", Followed()) is False
        assert not server.objects

    with_job(do)


def test_the_pods_of_a_deleted_job_are_deleted_unless_they_were_kept():
    async def do(server: Any, operator: Operator) -> None:
        followed = await started(server, operator)
        del server.objects[f"{PODS}/demo-worker-1"]["metadata"]["ownerReferences"]
        del server.objects[JOB]
        assert (
            await operator.turn("default", "demo", Followed()) is False
        )  # an operator that has not seen the job
        assert len(server.names("pods")) == 3
        assert await operator.turn("default", "demo", followed) is False
        assert server.names("pods") == ["demo-worker-1"]

    with_job(do)


@pytest.mark.parametrize("kept", [False, True])
def test_the_pods_of_an_earlier_job_of_the_same_name_are_not_those_of_this_one(kept):
    async def do(server: Any, operator: Operator) -> None:
        await started(server, operator)
        for name in server.names("pods") if kept else ():  # kubectl delete --cascade=orphan
            del server.objects[f"{PODS}/{name}"]["metadata"]["ownerReferences"]
        before = {server.objects[f"{PODS}/{name}"]["metadata"]["uid"] for name in server.names("pods")}
        again = {k: v for k, v in server.objects[JOB].items() if k != "status"}
        server.put(JOB, {**again, "metadata": {**again["metadata"], "uid": "another"}})
        server.log = "step 7 loss 1\n"
        await operator.turn("default", "demo", Followed())
        server.log = ""
        await started(server, operator)
        await started(server, operator)
        after = {server.objects[f"{PODS}/{name}"]["metadata"]["uid"] for name in server.names("pods")}
        assert len(after) == 3 and not before & after
        assert server.objects[JOB]["status"].get("restarts", 0) == 0
        assert server.objects[JOB]["status"].get("step") is None, "its log has no step"

    with_job(do)


def test_what_an_earlier_job_of_the_same_name_has_left_is_not_used():
    """The cluster deletes it some time later, and then it has to be there for pods that are replaced."""

    async def do(server: Any, operator: Operator) -> None:
        await started(server, operator)
        before = {path for path in server.objects if "/secrets/" in path}
        again = {k: v for k, v in server.objects[JOB].items() if k != "status"}
        server.put(JOB, {**again, "metadata": {**again["metadata"], "uid": "another"}})
        for _ in range(2):
            await started(server, operator)
        owned = [o for path, o in server.objects.items() if path != JOB and path not in before]
        assert {o["metadata"]["ownerReferences"][0]["uid"] for o in owned} == {"another"}
        env = server.objects[f"{PODS}/demo-worker-1"]["spec"]["containers"][0]["env"]
        key = next(e["valueFrom"]["secretKeyRef"]["name"] for e in env if e["name"] == "MESHWRIGHT_SECRET")
        assert key in server.names("secrets") and f"/secrets/{key}" not in " ".join(before)

    with_job(do)
