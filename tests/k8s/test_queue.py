"""Workers in a queue of Kueue: what the operator decides when pods fail that Kueue keeps."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from meshwright.k8s import resource as r
from tests.k8s.test_decide import Cluster, spec


def admitted(replicas: int = 2, **more: Any) -> Cluster:
    """A job whose workers have waited in a queue, and run."""
    of = spec(replicas, **more)
    cluster = Cluster(replace(of, workers=replace(of.workers, queue="team")))
    cluster.settle()
    assert (cluster.status.state, cluster.status.ready) == ("Queued", f"0/{replicas}")
    ready(cluster)
    cluster.made.clear()
    return cluster


def wait(cluster: Cluster) -> None:
    """Let Kueue and the operator look a few times."""
    for _ in range(4):
        cluster.queue()
        cluster.settle()


def ready(cluster: Cluster) -> None:
    wait(cluster)
    assert cluster.status.state == "Running" and not cluster.kueue.excess


def workers(cluster: Cluster) -> list[str]:
    return sorted(pod.name for pod in cluster.pods.values() if pod.role == "worker")


def test_who_replaces_a_worker_is_in_its_group_under_another_name():
    cluster = admitted()
    for name, after in (
        ("demo-worker-1", ["demo-worker-0", "demo-worker-1-1"]),
        ("demo-worker-1-1", ["demo-worker-0", "demo-worker-1"]),
    ):
        cluster.now += 1000
        cluster.end(name, 137)
        cluster.settle()
        assert name in cluster.pods, "Kueue keeps it until another one is there"
        ready(cluster)
        assert workers(cluster) == after
    assert (cluster.status.round, cluster.status.restarts) == (1, 2)


def test_a_script_that_fails_is_seen_beside_its_replaced_pod():
    cluster = admitted()
    cluster.end("demo-worker-1", 137)
    cluster.settle()
    cluster.end("demo-worker-1-1", 1)
    cluster.settle()
    assert (cluster.status.state, cluster.condition("Failed").message) == (
        "Failed",
        "demo-worker-1-1: exit code 1",
    )


def test_a_group_that_is_over_is_followed_by_another_one():
    cluster = admitted()
    for name in ("demo-worker-0", "demo-worker-1"):
        cluster.end(name, 137)
    cluster.queue()  # before the operator looks
    cluster.settle()
    ready(cluster)
    assert (cluster.status.round, cluster.status.restarts, len(workers(cluster))) == (2, 1, 2)


def test_workers_that_kueue_ends_are_no_failures_and_wait_again():
    cluster = admitted(backoff_limit=0)
    never = replace(cluster.spec.workers, restart_policy="Never")
    for _ in range(3):
        cluster.now += 1000
        for name in workers(cluster):
            pod = cluster.pods[name]
            cluster.pods[name] = replace(pod, phase="Failed", deleting=True, evicted=True, exit_code=143)
        cluster.settle()
        assert cluster.status.state == "Queued"
        ready(cluster)
    assert cluster.status.restarts == 0
    cluster = Cluster(replace(cluster.spec, workers=never))
    cluster.settle()
    ready(cluster)
    pod = cluster.pods["demo-worker-0"]
    cluster.pods[pod.name] = replace(pod, phase="Failed", deleting=True, evicted=True)
    cluster.settle()
    assert cluster.status.state != "Failed"


def test_a_worker_of_a_lost_node_is_replaced_in_another_group():
    cluster = admitted()
    pod = cluster.pods["demo-worker-1"]
    cluster.pods["demo-worker-1"] = replace(pod, node="b", ready=False)
    cluster.lost = {"b": cluster.now}
    cluster.now += 30
    cluster.settle()
    ready(cluster)
    assert cluster.status.round == 2 and not cluster.kueue.excess
    assert [name for name in workers(cluster) if cluster.pods[name].round == 2] == [
        "demo-worker-0-1",
        "demo-worker-1-1",
    ]
    cluster.lost = {}
    cluster.pods["demo-worker-1"] = replace(cluster.pods["demo-worker-1"], phase="Failed")
    wait(cluster)
    assert workers(cluster) == ["demo-worker-0-1", "demo-worker-1-1"]


def test_another_number_of_workers_is_another_group_and_a_pause_gives_quota_back():
    cluster = admitted()
    cluster.spec = replace(cluster.spec, workers=replace(cluster.spec.workers, replicas=3))
    cluster.settle()
    ready(cluster)
    assert cluster.sizes == {1: 2, 2: 3} and cluster.kueue.state == {"2": "admitted"}
    cluster.spec = replace(cluster.spec, suspend=True)
    cluster.settle()
    wait(cluster)
    assert not cluster.pods and not cluster.kueue.state
    cluster.spec = replace(cluster.spec, suspend=False)
    cluster.settle()
    ready(cluster)
    assert cluster.status.restarts == 0


def test_the_deadline_counts_from_the_start_of_workers():
    of = spec(2, active_deadline_seconds=100)
    cluster = Cluster(replace(of, workers=replace(of.workers, queue="team")))
    cluster.settle()
    cluster.now += 1000
    cluster.settle()
    assert (cluster.status.state, cluster.again) == ("Queued", None)
    cluster.queue()
    cluster.settle()
    assert cluster.status.state == "Running" and cluster.again is not None
    cluster.now += 101
    cluster.settle()
    assert cluster.condition("Failed").reason == "DeadlineExceeded"


def test_independent_workers_wait_one_by_one():
    of = spec(2, servers=r.Servers(replicas=2, copies=1))
    cluster = Cluster(replace(of, workers=replace(of.workers, queue="team", independent=True)))
    cluster.kueue.room = 1
    cluster.settle()
    cluster.queue()
    cluster.settle()
    assert cluster.status.ready == "1/2"
    cluster.kueue.room = 2
    ready(cluster)
    cluster.end("demo-worker-0", 137)
    cluster.settle()
    ready(cluster)
    assert (cluster.status.round, len(workers(cluster))) == (1, 2)
