"""What the operator decides, without a cluster: a fake one that does what is decided, and things that happen to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from msgspec.structs import replace

from meshwright.k8s import checks, records
from meshwright.k8s import decide as d
from meshwright.k8s import pods as p
from meshwright.k8s import resource as r
from tests.k8s.kueue import Kueue, Seen

OWNER = p.Owner(name="demo", namespace="default", uid="u")


def spec(replicas: int = 2, **more: Any) -> r.Spec:
    return r.Spec(image="image", command=["train.py"], workers=r.Workers(replicas=replicas), **more)


@dataclass
class Cluster:
    """Starts what is created at once, on the node `node`. `crashes`: how many actions are done before the operator ends
    in the middle of a decision."""

    spec: r.Spec
    status: r.Status = field(default_factory=r.Status)
    pods: dict[str, d.Pod] = field(default_factory=dict)
    lost: dict[str, float] = field(default_factory=dict)
    now: float = 1e9
    node: str = "a"
    slow: bool = False  # pods take until `stopped` to end
    deleted: bool = False
    shared: int = 0
    made: list[str] = field(default_factory=list)
    uids: Any = field(default_factory=lambda: count(1))
    again: float | None = None
    restarted: str = ""  # why, at any time
    began: bool = False  # workers were created
    fresh: dict[str, bool] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)  # of groups, by their round
    plan: records.PlanFacts = field(default_factory=records.PlanFacts)
    kueue: Kueue = field(default_factory=lambda: Kueue(room=100))

    def queue(self) -> None:
        """Be Kueue, once."""

        def seen(pod: d.Pod) -> Seen:
            group = "" if self.spec.workers.independent else f"{pod.round}"
            placed = not pod.gated and pod.phase not in d.DONE
            return Seen(
                pod.uid, group, self.sizes.get(pod.round, 1) if group else 1, int(pod.uid), pod.phase, pod.deleting,
                pod.held, placed,
            )  # fmt: skip

        released, admitted = self.kueue.look(
            [seen(pod) for pod in self.pods.values() if pod.role == "worker" and self.spec.workers.queue]
        )
        for name, pod in list(self.pods.items()):
            if pod.uid in released:
                self.pods[name] = replace(pod, held=False)
                if pod.deleting and pod.phase in d.DONE:
                    del self.pods[name]
            elif pod.uid in admitted and pod.gated:
                self.pods[name] = replace(pod, gated=False, phase="Running")

    def settle(self, crash_after: int | None = None) -> None:
        """Decide until there is nothing left to do."""
        for _ in range(20):
            job = d.Job(owner=OWNER, spec=self.spec, status=self.status, plan=self.plan)
            decision = d.decide(job, list(self.pods.values()), self.lost, self.now)
            self.restarted += "".join(
                c.message for c in decision.status.conditions if c.reason == "Restarting"
            )
            same, self.status, self.again = decision.status == self.status, decision.status, decision.again
            for action in decision.actions[:crash_after]:
                self._do(action)
            crash_after = None
            waits = all(isinstance(a, d.Delete) and a.name in self.pods for a in decision.actions)
            if same and waits:
                return
        raise AssertionError("it never comes to rest")

    def _do(self, action: d.Action) -> None:
        match action:
            case d.CreateShared():
                self.shared += 1
            case records.CreatePlanner():
                self._start("demo-plan", "plan", 0, 0, plan=p.plan_revision(self.spec), phase="Pending")
            case d.CreateScheduler():
                self._start("demo-scheduler", "scheduler", action.round, 0)
            case records.CreateServer():
                assert not any(pod.role == "worker" for pod in self.pods.values()) or self.began
                self._start(f"demo-server-{action.index}", "server", action.round, action.index)
                self.fresh[f"demo-server-{action.index}"] = action.fresh
            case records.CreateMove():
                self._start("demo-move", "move", action.round, action.count)
            case d.CreateWorker():
                assert action.place.address == self.pods["demo-scheduler"].address
                assert action.place.servers == self.status.servers.first
                self.began = True
                name = p.worker_name("demo", action.index, action.again)
                queued = {"held": True, "gated": True, "phase": "Pending"} if self.spec.workers.queue else {}
                self.sizes[action.round] = self.status.replica_statuses["Worker"].replicas
                self._start(name, "worker", action.round, action.index, **queued)
            case d.Delete():
                pod = self.pods.get(action.name)
                if pod is None or pod.uid != action.uid:
                    return
                if pod.held:
                    lives = pod.phase not in d.DONE and (pod.node in self.lost or self.slow)
                    phase = pod.phase if lives or pod.phase in d.DONE else "Failed"
                    self.pods[action.name] = replace(pod, deleting=True, phase=phase)
                elif action.now or pod.phase in d.DONE or not (self.slow or pod.node in self.lost):
                    del self.pods[action.name]
                else:
                    self.pods[action.name] = replace(pod, deleting=True)
            case records.DeleteJob():
                self.deleted = True

    def _start(self, name: str, role: str, round: int, index: int, **more: Any) -> None:
        if name in self.pods:  # as the API server: a name is there once
            return
        self.made.append(name)
        self.pods[name] = d.Pod(
            name=name, uid=f"{next(self.uids)}", role=role, index=index, round=round,
            address="10.0.0.1", node=self.node, ready=True, **{"phase": "Running"} | more,
        )  # fmt: skip

    def end(self, name: str, code: int) -> None:
        pod = self.pods[name]
        self.pods[name] = replace(pod, phase="Failed" if code else "Succeeded", exit_code=code)

    def condition(self, kind: str) -> r.Condition:
        return next(c for c in self.status.conditions if c.type == kind)


def running(replicas: int = 2, **more: Any) -> Cluster:
    cluster = Cluster(spec(replicas, **more))
    cluster.settle()
    assert (cluster.status.state, cluster.status.ready) == ("Running", f"{replicas}/{replicas}")
    cluster.made.clear()
    return cluster


def test_the_scheduler_comes_first_and_workers_when_it_has_an_address():
    cluster = Cluster(spec(3))
    job = d.Job(owner=OWNER, spec=cluster.spec, status=cluster.status)
    first = d.decide(job, [], {}, cluster.now)
    assert first.actions == (d.CreateShared(1), d.CreateScheduler(1))
    starting = d.Pod(name="demo-scheduler", uid="1", role="scheduler", round=1)
    second = d.decide(replace(job, status=first.status), [starting], {}, cluster.now)
    assert (second.actions, second.status.state) == ((), "Starting")
    cluster.settle()
    assert cluster.made == ["demo-scheduler", *(f"demo-worker-{n}" for n in range(3))]
    assert cluster.status.replica_statuses["Worker"].active == 3
    assert cluster.status.selector == "meshwright.dev/job=demo"


def test_a_killed_worker_is_replaced_at_once_and_then_later_and_later():
    cluster = running()
    waits = []
    for _ in range(4):
        cluster.end("demo-worker-1", 137)
        cluster.settle()
        if "demo-worker-1" not in cluster.pods:
            assert cluster.again is not None and cluster.status.state == "Restarting"
            assert "demo-worker-1: exit code 137, signal 9" in cluster.condition("Running").message
            waits.append(round(cluster.again - cluster.now, 3))
            cluster.now = cluster.again
            cluster.settle()
    assert waits == [1, 2, 4]
    assert cluster.made == ["demo-worker-1"] * 4
    assert (cluster.status.restarts, cluster.status.round, cluster.status.state) == (4, 1, "Running")
    cluster.now += 1000
    cluster.end("demo-worker-0", 137)
    cluster.settle()
    assert cluster.status.in_a_row == 1 and cluster.status.state == "Running"


@pytest.mark.parametrize("done", [0, 1, 2])
def test_an_operator_that_ends_in_the_middle_counts_a_failure_once(done):
    cluster = running()
    cluster.end("demo-worker-1", 137)
    cluster.settle(crash_after=done)
    assert (cluster.status.restarts, cluster.made) == (1, ["demo-worker-1"])


def test_restarts_end_with_the_limit():
    cluster = running(backoff_limit=1)
    cluster.end("demo-worker-1", 137)
    cluster.settle()
    cluster.end("demo-worker-1", 139)
    cluster.settle()
    failed = cluster.condition("Failed")
    assert (cluster.status.state, failed.reason) == ("Failed", "BackoffLimitExceeded")
    assert failed.message == "no restart is left, backoffLimit is 1; demo-worker-1: exit code 139, signal 11"
    assert cluster.status.restarts == 1
    assert list(cluster.pods) == ["demo-worker-1"]  # the log of the failed one stays


@pytest.mark.parametrize(("code", "policy"), [(1, "OnFailure"), (137, "Never")])
def test_a_script_that_fails_and_a_policy_of_never_end_the_job(code, policy):
    cluster = Cluster(replace(spec(), workers=r.Workers(replicas=2, restart_policy=policy)))
    cluster.settle()
    cluster.end("demo-worker-0", code)
    cluster.settle()
    assert (cluster.status.state, cluster.condition("Failed").reason) == ("Failed", "WorkerFailed")
    assert set(cluster.pods) == {"demo-worker-0"} and cluster.status.restarts == 0


@pytest.mark.parametrize(("policy", "left"), [("Running", 2), ("All", 0), ("None", 3)])
def test_success_and_what_is_cleaned_up(policy, left):
    cluster = running(clean_pod_policy=policy, ttl_seconds_after_finished=60)
    cluster.end("demo-worker-0", 0)
    cluster.settle()
    assert cluster.status.state == "Running"
    cluster.end("demo-worker-1", 0)
    cluster.settle()
    assert (cluster.status.state, len(cluster.pods), cluster.again) == ("Succeeded", left, cluster.now + 60)
    cluster.now += 61
    assert not cluster.deleted
    decision = d.decide(d.Job(owner=OWNER, spec=cluster.spec, status=cluster.status), [], {}, cluster.now)
    assert decision.actions == (records.DeleteJob(),)


def test_any_worker_is_enough_where_that_is_the_policy():
    cluster = running(success_policy="AnyWorker")
    cluster.end("demo-worker-1", 0)
    cluster.settle()
    assert (cluster.status.state, list(cluster.pods)) == ("Succeeded", ["demo-worker-1"])


def test_a_deadline_ends_the_job():
    cluster = running(active_deadline_seconds=100)
    assert cluster.again == pytest.approx(cluster.now + 100)
    cluster.now += 101
    cluster.settle()
    assert (cluster.status.state, cluster.condition("Failed").reason) == ("Failed", "DeadlineExceeded")
    assert not cluster.pods


def test_another_number_of_workers_is_another_round():
    cluster = running()
    cluster.slow = True
    for replicas in (4, 2):
        cluster.spec = replace(cluster.spec, workers=replace(cluster.spec.workers, replicas=replicas))
        cluster.settle()
        assert not cluster.made
        stopping = {name for name, pod in cluster.pods.items() if pod.deleting}
        assert stopping == set(cluster.pods) - {
            "demo-scheduler"
        }  # which workers need for their last checkpoint
        for name in stopping:
            del cluster.pods[name]
        cluster.settle()
        assert [pod.deleting for pod in cluster.pods.values()] == [True] and not cluster.made
        cluster.pods.clear()
        cluster.settle()
        assert len(cluster.made) == replicas + 1 and cluster.status.ready == f"{replicas}/{replicas}"
        assert {pod.round for pod in cluster.pods.values()} == {cluster.status.round}
        cluster.made.clear()
    assert (cluster.status.round, cluster.status.restarts) == (3, 0)


def test_suspended_and_resumed():
    cluster = running()
    for suspend, state, pods in ((True, "Suspended", 0), (False, "Running", 3)):
        cluster.spec = replace(cluster.spec, suspend=suspend)
        cluster.settle()
        assert (cluster.status.state, len(cluster.pods)) == (state, pods)
        assert cluster.condition("Suspended").status == str(suspend)
    assert cluster.status.restarts == 0


def test_pods_of_a_lost_node_go_elsewhere_by_force_after_a_while():
    cluster = running()
    cluster.pods["demo-worker-1"] = replace(cluster.pods["demo-worker-1"], node="b", ready=False)
    cluster.lost = {"b": cluster.now}
    cluster.settle()
    assert not cluster.made and cluster.again == cluster.now + 30
    cluster.now += 30
    cluster.settle()
    assert cluster.made == ["demo-worker-1"] and cluster.pods["demo-worker-1"].node == "a"
    assert cluster.status.restarts == 1


def on_a_lost_node(cluster: Cluster, *names: str) -> None:
    for name in names:
        cluster.pods[name] = replace(cluster.pods[name], node="b", ready=False)
    cluster.lost = {"b": cluster.now}


def test_a_lost_node_is_one_restart_however_many_pods_it_had():
    cluster = running(4, backoff_limit=1)
    on_a_lost_node(cluster, "demo-worker-2", "demo-worker-3")
    cluster.now += 30
    cluster.settle()
    assert cluster.made == ["demo-worker-2", "demo-worker-3"]
    assert (cluster.status.state, cluster.status.restarts) == ("Running", 1)
    for name in cluster.made:  # that fail within one look
        cluster.end(name, 137)
    cluster.settle()
    assert (cluster.status.state, cluster.status.restarts) == ("Failed", 1)


def test_the_pods_of_a_lost_node_are_deleted_by_force_after_the_end_too():
    cluster = running(4, backoff_limit=0)
    on_a_lost_node(cluster, "demo-worker-2", "demo-worker-3")
    cluster.now += 30
    cluster.settle()
    assert (cluster.status.state, set(cluster.pods)) == ("Failed", set())


@pytest.mark.parametrize("ends", [{"suspend": True}, {"active_deadline_seconds": 1}])
def test_a_job_that_stops_looks_again_when_its_lost_node_is_given_up(ends):
    cluster = running()
    on_a_lost_node(cluster, "demo-worker-1")
    cluster.spec, cluster.now = replace(cluster.spec, **ends), cluster.now + 10
    cluster.settle()
    assert set(cluster.pods) == {"demo-worker-1", "demo-scheduler"} and cluster.again == cluster.now + 20
    cluster.now += 20
    cluster.settle()
    assert not cluster.pods


@pytest.mark.parametrize("how", ["gone", "failed", "node"])
def test_a_lost_scheduler_begins_another_round(how):
    cluster = running()
    if how == "gone":
        del cluster.pods["demo-scheduler"]
    elif how == "failed":
        cluster.end("demo-scheduler", 2)
    else:
        cluster.lost, cluster.node = {"a": 0.0}, "b"
    cluster.settle()
    assert (cluster.status.round, cluster.status.restarts, cluster.status.state) == (
        2,
        1,
        "Running",
    )
    assert {pod.round for pod in cluster.pods.values()} == {2} and len(cluster.pods) == 3


def test_a_change_that_cannot_be_leaves_what_runs():
    cluster = running()
    job = d.Job(owner=OWNER, spec=None, status=cluster.status, problem="no such field")
    decision = d.decide(job, list(cluster.pods.values()), {}, cluster.now)
    assert decision.actions == () and decision.status.state == "Refused"
    assert "no such field" in str(decision.status.conditions)


def test_only_what_pods_depend_on_begins_another_round():
    cluster = running()
    cluster.spec = replace(cluster.spec, ttl_seconds_after_finished=5, clean_pod_policy="All")
    cluster.settle()
    assert cluster.status.round == 1 and not cluster.made


def test_an_operator_of_a_later_version_leaves_the_pods_of_a_job_alone():
    """The revision in the status of a job that the first operator has started."""
    given = {
        "image": "i:1",
        "command": ["train.py", "--lr", "1"],
        "workers": {"replicas": 4, "ranks": 8, "pod": {"nodeSelector": {"a": "b"}}},
        "servers": {"replicas": 2, "copies": 1},
        "scheduler": {"port": 29500},
        "backoffLimit": 3,
    }
    cluster = Cluster(checks.read_spec(given))
    cluster.settle()
    assert cluster.status.revision == "df837e83d4af"
