"""Whatever happens to a job, and wherever the operator ends: once nothing more happens, the job runs or has ended."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace

from meshwright.k8s import decide as d
from meshwright.k8s import pods as p
from meshwright.k8s import resource as r
from meshwright.k8s.planning import planner, was_killed
from meshwright.k8s.records import PlanFacts
from tests.k8s.test_decide import OWNER, Cluster, spec

PLAN = r.Planning(model="m.py:build", cluster="cpu")
PROBLEM = "DoesNotFit: 3 ranks"


def find_out(cluster: Cluster) -> None:
    """Be `read_plan`: what the plan's pod has said, unless it is known."""
    cluster.plan = PlanFacts()
    if cluster.spec.plan is None or cluster.status.plan == p.plan_revision(cluster.spec):
        return
    pod = planner(cluster.spec, list(cluster.pods.values()))
    if pod is None or was_killed(pod) or pod.uid == cluster.status.planner:
        return
    if pod.phase in d.DONE:
        good = pod.phase == "Succeeded" and pod.plan == p.plan_revision(cluster.spec)
        cluster.plan = PlanFacts(written=True) if good else PlanFacts(problem=PROBLEM)


def look(cluster: Cluster, done: int | None = None) -> None:
    """Look at the job until nothing is left to do, or let the operator end after so many actions."""
    for _ in range(40):
        find_out(cluster)
        job = d.Job(owner=OWNER, spec=cluster.spec, status=cluster.status, plan=cluster.plan)
        decision = d.decide(job, list(cluster.pods.values()), cluster.lost, cluster.now)
        same, cluster.status, cluster.again = (
            decision.status == cluster.status,
            decision.status,
            decision.again,
        )
        made_by = decision.spec
        if made_by is not None and any(isinstance(a, d.CreateWorker) for a in decision.actions):
            plan = p.plan_revision(made_by) if made_by.plan is not None else ""
            assert plan == cluster.status.plan, "workers are made without their plan"
        before = dict(cluster.pods)
        for action in decision.actions[:done]:
            cluster._do(action)
        if done is not None or (same and before == cluster.pods):
            return
    raise AssertionError("it never comes to rest")


def happen(cluster: Cluster, chance: random.Random) -> None:
    """One of the things that happen to pods, to nodes, to the job, or to its operator."""
    pods = list(cluster.pods.values())
    pod = chance.choice(pods) if pods else None
    what = chance.randrange(10)
    if what == 0 and pod is not None and pod.phase not in d.DONE:
        cluster.end(pod.name, 137)
    elif what == 1 and pod is not None:
        cluster._do(d.Delete(pod.name, pod.uid))
    elif what == 2 and pod is not None and pod.role == "plan" and pod.phase not in d.DONE:
        cluster.end(pod.name, 2 if cluster.spec.workers.replicas == 3 else 0)
    elif what == 3:
        workers = replace(cluster.spec.workers, replicas=chance.choice((1, 2, 3, 4)))
        cluster.spec = replace(cluster.spec, workers=workers)
    elif what == 4:
        cluster.spec = replace(cluster.spec, suspend=chance.random() < 0.5)
    elif what == 5:
        cluster.lost = {"a": cluster.now} if cluster.node == "a" else {}
        cluster.node = "b" if cluster.lost else "a"
    elif what == 6:
        cluster.now += chance.choice((1, 20, 1000))
    elif what == 7:
        cluster.spec = replace(cluster.spec, plan=chance.choice((None, PLAN)))
    elif what == 8 and pod is not None and pod.phase not in d.DONE:
        cluster.pods[pod.name] = replace(pod, phase="Failed", reason="Evicted")
    elif what == 9:  # Kueue makes room
        for pod in [pod for pod in pods if pod.held and not pod.gated and pod.phase not in d.DONE]:
            cluster.pods[pod.name] = replace(pod, phase="Failed", deleting=True, evicted=True)
    for act in chance.sample((cluster.queue, lambda: look(cluster, chance.choice((None, None, 0, 1, 2)))), 2):
        act()


def come_to_rest(cluster: Cluster) -> None:
    """Nothing more happens: nodes answer, plans end, and time passes."""
    cluster.lost, cluster.slow = {}, False
    workers = cluster.spec.workers
    if cluster.spec.plan is not None and workers.replicas == 3:
        cluster.spec = replace(cluster.spec, workers=replace(workers, replicas=2))
    cluster.spec = replace(cluster.spec, suspend=False)
    for _ in range(60):
        look(cluster)
        cluster.queue()
        for pod in list(cluster.pods.values()):
            if pod.deleting and pod.held:
                cluster.pods[pod.name] = replace(pod, phase="Failed") if pod.phase not in d.DONE else pod
            elif pod.deleting:  # its node is back
                del cluster.pods[pod.name]
            elif pod.role == "plan" and pod.phase not in d.DONE:
                cluster.end(pod.name, 0)
        cluster.now = max(cluster.now + 1, cluster.again or 0)


@pytest.mark.parametrize("seed", range(150))
def test_a_job_comes_to_rest(seed: int) -> None:
    """From 60 on, workers wait in a queue, and from 120 on they are independent."""
    chance = random.Random(seed)
    more: dict[str, Any] = {"plan": PLAN} if seed % 3 else {}
    if seed % 2:
        more["servers"] = r.Servers(replicas=2, copies=1)
    cluster = Cluster(spec(backoff_limit=1000, **more))
    if seed >= 60:
        workers = replace(cluster.spec.workers, queue="team", independent=seed >= 120)
        more = {"servers": cluster.spec.servers or r.Servers(replicas=2, copies=1), "plan": None}
        cluster.spec = replace(cluster.spec, workers=workers, **(more if seed >= 120 else {}))
    cluster.began = True
    for _ in range(40):
        happen(cluster, chance)
    come_to_rest(cluster)
    wanted = cluster.spec.workers.replicas
    assert cluster.status.state == "Running", (cluster.status, cluster.pods, cluster.kueue)
    workers = sorted(pod.index for pod in cluster.pods.values() if pod.role == "worker")
    assert workers == list(range(wanted)) and not cluster.kueue.excess
    assert {pod.round for pod in cluster.pods.values() if pod.role != "plan"} == {cluster.status.round}
    planned = p.plan_revision(cluster.spec) if cluster.spec.plan is not None else ""
    assert cluster.status.plan == planned
