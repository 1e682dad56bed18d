"""How a job ends, and what becomes of its pods then."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from meshwright.k8s import resource as r
from meshwright.k8s import servers as s
from meshwright.k8s.conditions import (
    SIGNALS,
    Truth,
    given_up_at,
    how,
    is_gone,
    stamp,
    time_of,
    with_conditions,
)
from meshwright.k8s.records import DONE, Action, Decision, Delete, DeleteJob, Pod


def ending(
    spec: r.Spec, status: r.Status, workers: Sequence[Pod], gone: set[str], now: float
) -> tuple[str, dict[str, tuple[Truth, str, str]]] | None:
    """State and conditions of a job that has ended."""
    well = [pod for pod in workers if pod.phase == "Succeeded"]
    if len(well) >= (1 if spec.success_policy == "AnyWorker" else spec.workers.replicas):
        return "Succeeded", {
            "Succeeded": ("True", spec.success_policy, ""),
            "Running": ("False", "Succeeded", ""),
        }
    failure: tuple[Truth, str, str] | None = None
    for pod in workers:
        if pod.evicted:
            continue
        bad = to_replace(pod, gone)
        if bad and spec.workers.restart_policy == "Never":
            failure = ("True", "WorkerFailed", f"{pod.name}: {how(pod, gone)}; restartPolicy is Never")
        elif pod.phase == "Failed" and pod.exit_code is not None and 0 < pod.exit_code < SIGNALS:
            failure = ("True", "WorkerFailed", f"{pod.name}: {how(pod, gone)}: {pod.said}".rstrip(": "))
    failure = deadline_exceeded(spec, status, now) or failure
    if failure is None:
        return None
    return "Failed", {"Failed": failure, "Running": ("False", "Failed", "")}


def deadline_exceeded(spec: r.Spec, status: r.Status, now: float) -> tuple[Truth, str, str] | None:
    """The condition of a job that has run longer than it may."""
    if not spec.active_deadline_seconds or not status.start_time:
        return None
    if now < time_of(status.start_time) + spec.active_deadline_seconds:
        return None
    return ("True", "DeadlineExceeded", f"activeDeadlineSeconds is {spec.active_deadline_seconds}")


def with_end(
    spec: r.Spec, status: r.Status, state: str, now: float, **conditions: tuple[Truth, str, str]
) -> r.Status:
    """The status of a job that has ended: nothing runs any more, unless its policy keeps it."""
    if spec.clean_pod_policy != "None":
        roles = {role: replace(of, active=0) for role, of in status.replica_statuses.items()}
        ready = f"0/{spec.workers.replicas}"
        status = replace(status, replica_statuses=roles, workers=0, ready=ready)
    return with_conditions(replace(status, state=state, completion_time=stamp(now)), now, **conditions)


def after_the_end(
    spec: r.Spec, status: r.Status, pods: Sequence[Pod], lost: Mapping[str, float], now: float
) -> Decision:
    """What is left to do for a job that has ended: delete pods as its policy says, and it when its time is over."""
    policy, ttl = spec.clean_pod_policy, spec.ttl_seconds_after_finished
    over = time_of(status.completion_time) + ttl if ttl is not None else None
    if over is not None and now >= over:
        return Decision(status, (DeleteJob(),))
    # independent workers tell no scheduler that the job has ended, and so servers do not hear of it
    waits = (
        {role.lower() for role in (r.SCHEDULER, r.SERVER)} | {s.MOVE} if spec.workers.independent else set()
    )
    extra = [
        pod
        for pod in pods
        if policy == "All" or (pod.phase not in DONE and (policy == "Running" or pod.role in waits))
    ]
    gone = {pod.uid for pod in extra if is_gone(pod, lost, spec, now)}
    times = [t for t in (over, given_up_at(spec, extra, lost, now)) if t is not None]
    return Decision(status, tuple(stopped(extra, gone)), min(times, default=None))


def to_replace(pod: Pod, gone: Collection[str]) -> bool:
    """Whether a pod has failed, or its node is gone."""
    return pod.phase == "Failed" or pod.uid in gone


def stopped(pods: Sequence[Pod], gone: set[str]) -> list[Action]:
    """End pods: the scheduler and the servers after the workers, which need them for their last checkpoint."""
    first = r.WORKER.lower()
    left = any(pod.role == first and pod.phase not in DONE and pod.uid not in gone for pod in pods)
    return [
        Delete(pod.name, pod.uid, pod.uid in gone)
        for pod in pods
        if pod.uid in gone or not (pod.deleting or (left and pod.role != first))
    ]
