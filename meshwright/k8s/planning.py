"""What to do next for the plan of a job, as `decide` does for all of it.

    a job with `plan`, or another number of its workers --> Planning --> Planned
                                                               |
                                                               +-------> PlanFailed, until the job is changed

A pod makes the plan, and the operator keeps what it prints as a ConfigMap. A plan that cannot be made stays so: the pod
remains with its log, and a change of the job, or deleting the pod, begins again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from meshwright.k8s import pods as p
from meshwright.k8s import resource as r
from meshwright.k8s.conditions import SIGNALS, how, is_gone, time_of, with_conditions
from meshwright.k8s.records import Action, CreatePlanner, Delete, Job, Pod

PLAN = "plan"
RETRY_SECONDS = 15.0  # after a pod that was killed, and for nodes that may come


class Turn(r.Record, frozen=True, kw_only=True):
    """`ready`: workers may start. `again`: the time at which to decide again."""

    status: r.Status
    actions: tuple[Action, ...] = ()
    ready: bool = False
    again: float | None = None


def planner(spec: r.Spec, pods: Sequence[Pod]) -> Pod | None:
    """The pod that makes or has made the plan of a spec."""
    wanted = p.plan_revision(spec)
    return next((pod for pod in pods if pod.role == PLAN and pod.plan == wanted and not pod.deleting), None)


def was_killed(pod: Pod) -> bool:
    """Return whether a pod was evicted or killed, for another reason than the memory that it needs."""
    if pod.phase != "Failed" or pod.reason == "OOMKilled":
        return False
    return pod.exit_code is None or pod.exit_code > SIGNALS


def turn(
    job: Job, spec: r.Spec, status: r.Status, pods: Sequence[Pod], lost: Mapping[str, float], now: float
) -> Turn:
    """What to do before workers have the plan of `spec`."""
    planners = [pod for pod in pods if pod.role == PLAN]
    mine = None if spec.plan is None else planner(spec, planners)
    gone = {pod.uid for pod in planners if is_gone(pod, lost, spec, now)}
    stale = tuple(
        Delete(pod.name, pod.uid, pod.uid in gone)
        for pod in planners
        if pod is not mine and (pod.uid in gone or not pod.deleting)
    )
    if spec.plan is None:
        kept = [c for c in status.conditions if c.type != "Planned"]
        return Turn(status=replace(status, plan="", planner="", conditions=kept), actions=stale, ready=True)
    wanted, facts = p.plan_revision(spec), job.plan
    if facts.written or status.plan == wanted:
        about = facts.about or f"{spec.workers.replicas * spec.workers.ranks} ranks"
        planned = any(c.type == "Planned" and c.status == "True" for c in status.conditions)
        if facts.written or not planned:
            status = with_conditions(status, now, Planned=("True", "Planned", about))
        return Turn(status=replace(status, plan=wanted), actions=stale, ready=True)
    if mine is not None and (mine.uid in gone or was_killed(mine)):
        return _lost(status, mine, gone, stale, now)
    if facts.problem:
        reason, again = ("PlanFailed", None) if mine else ("NoCluster", now + RETRY_SECONDS)
        status = replace(status, planner=mine.uid if mine else "")
        status = with_conditions(status, now, Planned=("False", reason, facts.problem))
        return Turn(status=status, actions=stale, again=again)
    if mine is not None and mine.uid == status.planner:
        return Turn(status=status, actions=stale)
    status = with_conditions(status, now, Planned=("Unknown", "Planning", facts.cluster or spec.plan.cluster))
    new = (CreatePlanner(facts.cluster),) if not planners else ()
    return Turn(status=status, actions=stale + new)


def _lost(status: r.Status, mine: Pod, gone: set[str], stale: tuple[Action, ...], now: float) -> Turn:
    """Its node is lost, or it was killed: another one is made after a while."""
    status = with_conditions(status, now, Planned=("False", "PodLost", f"{mine.name}: {how(mine, gone)}"))
    since = next(time_of(c.last_transition_time) for c in status.conditions if c.type == "Planned")
    if now < since + RETRY_SECONDS:
        return Turn(status=status, actions=stale, again=since + RETRY_SECONDS)
    return Turn(status=status, actions=(*stale, Delete(mine.name, mine.uid, mine.uid in gone)))


def state(status: r.Status) -> str:
    """The state of a job without workers, which waits for its plan."""
    failed = any(c.type == "Planned" and c.status == "False" for c in status.conditions)
    return "Refused" if failed else "Planning"


__all__ = ["PLAN", "Turn", "planner", "state", "turn", "was_killed"]
