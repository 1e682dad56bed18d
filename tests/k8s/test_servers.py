"""What the operator decides for parameter servers and for workers that are independent of each other."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from meshwright.errors import LaunchError
from meshwright.k8s import checks
from meshwright.k8s import pods as p
from meshwright.k8s import resource as r
from tests.k8s.test_decide import OWNER, Cluster, spec

NAMES = {"demo-scheduler", "demo-server-0", "demo-server-1", "demo-worker-0", "demo-worker-1"}
STATE: dict[str, Any] = {
    "state": "/state/all",
    "container": {"volumeMounts": [{"name": "state", "mountPath": "/state"}]},
}


def served(independent: bool = True, servers: int = 2, **more: Any) -> Cluster:
    """A job of two workers and two servers, which runs."""
    workers = r.Workers(replicas=2, independent=independent)
    cluster = Cluster(replace(spec(), workers=workers, servers=r.Servers(replicas=servers, **more)))
    cluster.settle()
    assert cluster.status.state == "Running"
    cluster.made.clear()
    return cluster


def resize(cluster: Cluster, **roles: int) -> None:
    """Change the replicas of roles."""
    for role, count in roles.items():
        of = getattr(cluster.spec, role)
        cluster.spec = replace(cluster.spec, **{role: replace(of, replicas=count)})
    cluster.settle()


def test_servers_come_before_the_workers_and_end_after_them():
    cluster = Cluster(served().spec, slow=True)
    cluster.settle()
    assert cluster.made == [
        "demo-scheduler",
        *(f"demo-{x}-{n}" for x in ("server", "worker") for n in (0, 1)),
    ]
    assert cluster.status.replica_statuses["Server"] == r.RoleStatus(replicas=2, active=2)
    assert not any(cluster.fresh.values())
    cluster.spec = replace(cluster.spec, suspend=True)
    cluster.settle()
    assert {n for n, pod in cluster.pods.items() if pod.deleting} == {"demo-worker-0", "demo-worker-1"}
    for name in ("demo-worker-0", "demo-worker-1"):
        del cluster.pods[name]
    cluster.settle()
    assert all(pod.deleting for pod in cluster.pods.values())


def test_independent_workers_come_and_go_and_no_other_pod_notices():
    cluster = served()
    before = {name: pod.uid for name, pod in cluster.pods.items()}
    resize(cluster, workers=4)
    assert cluster.made == ["demo-worker-2", "demo-worker-3"] and cluster.status.ready == "4/4"
    resize(cluster, workers=2)
    assert {name: pod.uid for name, pod in cluster.pods.items()} == before
    assert (cluster.status.round, cluster.status.restarts, cluster.status.state) == (1, 0, "Running")


def test_a_worker_that_ends_as_it_goes_is_no_failure():
    cluster = served()
    cluster.slow = True
    resize(cluster, workers=1)
    assert cluster.pods["demo-worker-1"].deleting
    cluster.end("demo-worker-1", 143)
    cluster.settle()
    assert (cluster.status.restarts, cluster.status.state) == (0, "Running")


def test_workers_that_need_each_other_begin_another_round():
    cluster = served(independent=False)
    resize(cluster, workers=3)
    assert (cluster.status.round, cluster.status.ready, len(cluster.pods)) == (2, "3/3", 6)


@pytest.mark.parametrize("independent", [True, False])
def test_parameters_move_to_another_number_of_servers(independent):
    cluster = served(independent)
    resize(cluster, servers=3)
    assert cluster.made == ["demo-server-2", "demo-move"] and cluster.fresh["demo-server-2"]
    assert cluster.status.servers == r.ServersStatus(first=2, spread=2, moving=3)
    assert cluster.pods["demo-move"].index == 3
    cluster.end("demo-move", 0)
    cluster.settle()
    assert cluster.status.servers == r.ServersStatus(first=2, spread=3)
    assert set(cluster.pods) == {*NAMES, "demo-server-2"}
    resize(cluster, servers=1)  # all of the first ones stay: workers that come look for them
    cluster.end("demo-move", 0)
    cluster.settle()
    assert set(cluster.pods) == NAMES and cluster.status.servers == r.ServersStatus(first=2, spread=1)
    assert (cluster.status.round, cluster.status.restarts) == (1, 0)


def test_a_server_that_ends_as_it_goes_is_no_failure():
    cluster = served()
    for count in (3, 2):
        resize(cluster, servers=count)
        cluster.slow = True
        cluster.end("demo-move", 0)
        cluster.settle()
    assert cluster.pods["demo-server-2"].deleting
    cluster.end("demo-server-2", 143)
    cluster.settle()
    assert (cluster.status.restarts, cluster.status.state) == (0, "Running")


def test_a_move_is_one_after_another_and_begins_again_when_its_pod_is_lost():
    cluster = served()
    resize(cluster, servers=3)
    resize(cluster, servers=2)  # too late
    assert "demo-server-2" in cluster.pods and cluster.status.servers.moving == 3
    cluster.end("demo-move", 137)
    cluster.settle()
    assert cluster.made.count("demo-move") == 2 and cluster.pods["demo-move"].index == 3
    for count in (3, 2):
        assert cluster.pods["demo-move"].index == count
        cluster.end("demo-move", 0)
        cluster.settle()
    assert set(cluster.pods) == NAMES and cluster.status.servers == r.ServersStatus(first=2, spread=2)


@pytest.mark.parametrize("how", ["gone", "failed", "drained", "node"])
@pytest.mark.parametrize(("kept", "round"), [({}, 2), ({"copies": 1}, 1), (STATE, 1)])
def test_a_lost_server_is_replaced_where_something_has_its_values(how, kept, round):
    cluster = served(**kept)
    pod = cluster.pods["demo-server-1"]
    if how == "gone":
        del cluster.pods["demo-server-1"]
    elif how == "failed":
        cluster.end("demo-server-1", 137)
    elif how == "drained":
        cluster.pods["demo-server-1"] = replace(pod, deleting=True)
        cluster.settle()
        cluster.pods.pop("demo-server-1", None)
    else:
        cluster.pods["demo-server-1"] = replace(pod, node="b")
        cluster.lost = {"b": 0.0}
    cluster.settle()
    assert (cluster.status.round, cluster.status.state, set(cluster.pods)) == (round, "Running", NAMES)
    assert not cluster.fresh["demo-server-1"]  # it has had values: if nobody has them now, it says so
    assert cluster.pods["demo-server-1"].uid != pod.uid
    assert cluster.status.restarts == (1 if round == 2 or how in ("failed", "node") else 0)
    if round == 2:
        message = "server 1 is lost: neither servers.copies nor servers.state is set"
        assert cluster.made[0] == "demo-scheduler" and message in cluster.restarted


def test_two_lost_servers_are_more_than_one_copy_has():
    cluster = served(copies=1)
    for name in ("demo-server-0", "demo-server-1"):
        del cluster.pods[name]
    cluster.settle()
    assert (cluster.status.round, cluster.status.state) == (2, "Running")


@pytest.mark.parametrize(("kept", "first"), [({}, 3), (STATE, 2)])
def test_after_a_pause_there_are_as_many_servers_as_the_values_are_on(kept, first):
    cluster = served(**kept)
    resize(cluster, servers=3)
    cluster.end("demo-move", 0)
    cluster.settle()
    for suspend in (True, False):
        cluster.spec = replace(cluster.spec, suspend=suspend)
        cluster.settle()
    assert cluster.status.servers == r.ServersStatus(first=first, spread=3)
    assert set(cluster.pods) == {*NAMES, "demo-server-2"} and not cluster.fresh["demo-server-2"]


@pytest.mark.parametrize("policy", ["Running", "All", "None"])
def test_servers_end_with_the_job(policy):
    cluster = served()
    cluster.spec = replace(cluster.spec, clean_pod_policy=policy)
    for name in ("demo-worker-0", "demo-worker-1"):
        cluster.end(name, 0)
    cluster.settle()
    assert cluster.status.state == "Succeeded"
    assert set(cluster.pods) == (set() if policy == "All" else {"demo-worker-0", "demo-worker-1"})


def test_an_older_operator_s_job_without_servers_goes_on():
    """Its revision is what it was before there were servers."""
    cluster = Cluster(spec())
    cluster.settle()
    assert cluster.status.revision == "6e19b240d211"


def test_what_pods_of_servers_run():
    of = r.Servers(replicas=2, **STATE)
    job = replace(spec(), servers=of, workers=r.Workers(replicas=2, ranks=4, independent=True))
    place = p.Place(address="fd00::1", servers=2)
    container = p.server(OWNER, job, 1, 1, place, fresh=False)["spec"]["containers"][0]
    assert container["command"][:4] == ["python", "-P", "-m", "meshwright.launch.server_by_hand"]
    assert '"state": "/state/all/demo-u"' in container["command"][4]
    container = p.worker(OWNER, job, 1, 1, place)["spec"]["containers"][0]
    words = " ".join(container["command"])
    assert words.startswith(
        "meshwright run --nproc 4 --add-to [fd00::1]:29400 --node-rank 1 --on-failure continue"
    )
    assert {"name": "MS_SERVER_NUM", "value": "2"} in container["env"]
    container = p.move(OWNER, job, 1, 3, place)["spec"]["containers"][0]
    assert " ".join(container["command"]) == "meshwright ps spread 3 --master [fd00::1]:29400 --mover u"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"servers": {"replicas": 0}}, "`int` >= 1 - at `spec.servers.replicas`"),
        ({"servers": {"replicas": 65}}, "`int` <= 64"),
        ({"servers": {"replicas": 2, "copies": 2}}, "at `spec.servers.copies`"),
        ({"servers": {"replicas": 1, "copies": 1}}, "a copy is on another server, and there is one"),
        ({"servers": {"replicas": 2, "state": "state"}}, "at `spec.servers.state`"),
        ({"servers": {"replicas": 2, "state": "/state"}}, "servers.state /state is in no volume"),
        ({"servers": {"replicas": 2, **STATE, "state": "/states"}}, "volumeMounts has /state"),
        ({"servers": {"replicas": 2, "pod": {"containers": []}}}, "servers.pod has containers"),
        ({"servers": {"replicas": 2}, "command": ["--servers", "1", "t.py"]}, "command has --servers"),
        ({"servers": {"replicas": 2}, "command": ["--server-state=x", "t.py"]}, "command has --server-state"),
        ({"workers": {"replicas": 1, "independent": True}}, "workers.independent is set without servers"),
        (
            {
                "servers": {"replicas": 1},
                "workers": {"replicas": 1, "independent": True, "gang": True, "pod": {"schedulerName": "x"}},
            },
            "workers.gang are both set",
        ),
    ],
)
def test_servers_that_cannot_be(change, says):
    good = {"image": "i", "command": ["train.py", "--servers", "2"], "workers": {"replicas": 2}}
    checks.read_spec({**good, "servers": {"replicas": 2}})  # a word of the script
    with pytest.raises(LaunchError) as refused:
        checks.read_spec({**good, **change})
    assert says in f"{refused.value.what} {refused.value.why}"
