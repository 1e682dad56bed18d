"""What to do next for one job: a plain function of what the API server says. Knows no connection and no clock.

    made anew --> (Planning) --> Starting --> (Queued) --> Running --> Succeeded
                                    ^                         |
                                    +------- Restarting ------+------> Failed

All pods of a *round* have the same settings. A killed worker is replaced within its round; a new number of workers that
are not independent, or the loss of the scheduler, begins another one. Everything that has to be remembered is in the
status, and the status is written before anything is done: an operator that ends at any point goes on from there, and of
two only one is heard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

from msgspec.structs import replace

from meshwright.k8s import planning, queue
from meshwright.k8s import pods as p
from meshwright.k8s import resource as r
from meshwright.k8s import servers as s
from meshwright.k8s.conditions import (
    Truth,
    given_up_at,
    how,
    is_gone,
    refusal,
    restarted,
    so_far,
    stamp,
    time_of,
    with_conditions,
)
from meshwright.k8s.job_end import after_the_end, deadline_exceeded, ending, stopped, to_replace, with_end
from meshwright.k8s.records import (
    DONE,
    Action,
    CreateScheduler,
    CreateShared,
    CreateWorker,
    Decision,
    Delete,
    Job,
    Pod,
)


def decide(job: Job, pods: Sequence[Pod], lost: Mapping[str, float], now: float) -> Decision:
    """`lost`: nodes that do not answer, with the time since when; 0 for one that is gone for good."""
    spec, status = job.spec, replace(job.status, observed_generation=job.generation)
    if spec is None:
        return Decision(
            with_conditions(replace(status, state="Refused"), now, Valid=("False", "Refused", job.problem))
        )
    status = with_conditions(status, now, Valid=refusal(job.refused) if job.refused else ("True", "", ""))
    if status.completion_time:
        return after_the_end(spec, status, pods, lost, now)
    if spec.suspend:
        status = replace(
            _new_round(status, ""), state="Suspended", start_time="", ready=f"0/{spec.workers.replicas}"
        )
        status = with_conditions(
            status, now, Suspended=("True", "Suspended", ""), Running=("False", "Suspended", "")
        )
        gone = {pod.uid for pod in pods if is_gone(pod, lost, spec, now)}
        actions = tuple(stopped(pods, gone))
        return Decision(replace(status, workers=0), actions, given_up_at(spec, pods, lost, now))
    plan = planning.turn(job, spec, status, pods, lost, now)
    status, going = plan.status, spec if plan.ready else _as_it_runs(spec, plan.status)
    if going is None:
        decision = _waiting(spec, status, pods, lost, now)
    else:
        others = [pod for pod in pods if pod.role != planning.PLAN]
        decision = _going(job, going, status, others, lost, now)
    if decision.status.completion_time:
        return decision
    again = min((t for t in (plan.again, decision.again) if t is not None), default=None)
    return replace(decision, actions=plan.actions + decision.actions, again=again, spec=going)


def begins(spec: r.Spec, status: r.Status) -> bool:
    """Return whether pods are not made by these settings yet."""
    return not status.completion_time and status.revision != _revision(spec)


def _as_it_runs(spec: r.Spec, status: r.Status) -> r.Spec | None:
    """The spec of the workers that run, if only their number has changed since: they go on till there is a plan."""
    workers = status.replica_statuses.get(r.WORKER, r.RoleStatus()).replicas
    before = replace(spec, workers=replace(spec.workers, replicas=max(workers, 1)))
    return before if _revision(before) == status.revision else None


def _waiting(
    spec: r.Spec, status: r.Status, pods: Sequence[Pod], lost: Mapping[str, float], now: float
) -> Decision:
    """No workers until there is a plan; those of other settings stay as they are."""
    status = replace(
        status,
        state=planning.state(status),
        ready=status.ready or f"0/{spec.workers.replicas}",
        start_time=status.start_time or stamp(now),
    )
    status = with_conditions(status, now, Suspended=("False", "", ""))
    if late := deadline_exceeded(spec, status, now):
        return after_the_end(spec, with_end(spec, status, "Failed", now, Failed=late), pods, lost, now)
    return Decision(status, (), _again(spec, status, pods, lost, now))


def _going(
    job: Job, spec: r.Spec, status: r.Status, pods: Sequence[Pod], lost: Mapping[str, float], now: float
) -> Decision:
    revision = _revision(spec)
    if status.revision != revision:
        status = s.begun(spec, _new_round(status, revision))
        status = replace(
            status, start_time=status.start_time or stamp(now), selector=f"{p.JOB}={job.owner.name}"
        )
        status = with_conditions(status, now, Suspended=("False", "", ""))
    return _in_round(job, spec, status, pods, lost, now)


def _in_round(
    job: Job, spec: r.Spec, status: r.Status, pods: Sequence[Pod], lost: Mapping[str, float], now: float
) -> Decision:
    own = [pod for pod in pods if pod.round == status.round]
    gone = {pod.uid for pod in pods if is_gone(pod, lost, spec, now)}
    scheduler = next((pod for pod in own if pod.role == r.SCHEDULER.lower()), None)
    wanted = spec.workers.replicas
    every = [pod for pod in own if pod.role == r.WORKER.lower()]
    wanted_ones = [pod for pod in every if pod.index < wanted]
    # of two with one index, the first has failed and is held
    workers = {
        pod.index: pod for pod in sorted(wanted_ones, key=lambda pod: to_replace(pod, gone), reverse=True)
    }
    servers, move = s.of_round(own)
    status = s.moved(_counted(status, spec, scheduler, workers, servers, gone, now), move)
    if scheduler is not None and not status.scheduler_uid:
        status = replace(status, scheduler_uid=scheduler.uid)

    if end := ending(spec, status, wanted_ones, gone, now):
        return after_the_end(spec, with_end(spec, status, end[0], now, **end[1]), pods, lost, now)

    lost_server = s.lost(spec, status, servers, workers, gone)
    needed = 0 if lost_server else s.needed(spec, status)
    mine = [*wanted_ones, *(pod for pod in servers.values() if pod.index < needed)]
    failed = [pod for pod in mine if to_replace(pod, gone)]
    # a pod that somebody deletes, as to drain its node, is no failure, whether it is seen to end or not
    why = [
        (pod.uid, f"{pod.name}: {how(pod, gone)}")
        for pod in failed
        if pod.uid not in status.counted and not pod.evicted and (pod.uid in gone or not pod.deleting)
    ]
    anew = _scheduler_lost(spec, status, scheduler, workers, gone) or lost_server or _secret_lost(job, mine)
    if anew:
        why = [("", anew), *why]
    requeued = queue.requeued(spec, wanted_ones, gone)
    status = restarted(status, why, {pod.uid for pod in own}, now)
    if status.restarts > spec.backoff_limit:
        status = replace(status, restarts=spec.backoff_limit)  # the last failure restarts nothing
        text = f"no restart is left, backoffLimit is {spec.backoff_limit}; {why[0][1] if why else ''}"
        failure: tuple[Truth, str, str] = ("True", "BackoffLimitExceeded", text.rstrip("; "))
        status = with_end(spec, status, "Failed", now, Failed=failure, Running=("False", "Failed", ""))
        return after_the_end(spec, status, pods, lost, now)
    if anew or requeued:
        if requeued:
            status = with_conditions(status, now, Running=("False", "Queued", requeued))
        status = s.begun(spec, _new_round(status, status.revision))
        return _in_round(job, spec, status, pods, lost, now)

    ended = {pod.uid for pod in failed}
    actions: list[Action] = [
        Delete(pod.name, pod.uid, pod.uid in gone)
        for pod in own
        if pod.uid in ended | gone and not (pod.held and pod.deleting and pod.uid not in gone)
    ]
    actions += stopped([pod for pod in pods if pod.round != status.round], gone)
    actions += [Delete(pod.name, pod.uid) for pod in every if pod.index >= wanted and not pod.deleting]
    removed = {a.uid for a in actions if isinstance(a, Delete) and (a.now or a.uid in ended)}
    left = [pod for pod in pods if pod.held or pod.uid not in removed]
    if now >= time_of(status.retry_at):
        status, created = _created(job, spec, status, scheduler, workers, servers, move, left, gone)
        actions += created
    return Decision(status, tuple(actions), _again(spec, status, pods, lost, now))


def _created(
    job: Job,
    spec: r.Spec,
    status: r.Status,
    scheduler: Pod | None,
    workers: Mapping[int, Pod],
    servers: s.Servers,
    move: Pod | None,
    left: Sequence[Pod],
    gone: set[str],
) -> tuple[r.Status, list[Action]]:
    """The scheduler first; servers as soon as it has an address, and workers when these run. `left`: pods whose names
    are not free."""
    name, taken = job.owner.name, {pod.name for pod in left}
    if scheduler is None:
        free = p.scheduler_name(name) not in taken
        return status, [CreateShared(status.round), CreateScheduler(status.round)] if free else []
    if not scheduler.address or scheduler.phase in DONE:
        return status, []
    shared = [] if job.has_service else [CreateShared(status.round, service=True)]
    place = p.Place(address=scheduler.address, servers=status.servers.first)
    up = len(workers) == spec.workers.replicas and all(w.phase == "Running" for w in workers.values())
    status, actions = s.changed(job, spec, status, place, servers, move, taken, up)
    actions = [*shared, *actions]
    if not s.ready(spec, status, servers) and not workers:
        return status, actions
    there = {
        pod.index for pod in left if pod.role == r.WORKER.lower() and not queue.is_left(pod, status, gone)
    }
    if 0 not in there:  # the log that tells attempts begins anew
        status = replace(status, attempt="", attempt_after="")
    for index in range(spec.workers.replicas):
        if index not in there:
            again = next(n for n in count() if p.worker_name(name, index, n) not in taken)
            actions.append(CreateWorker(status.round, index, place, again))
    return status, actions


def _scheduler_lost(
    spec: r.Spec, status: r.Status, scheduler: Pod | None, workers: Mapping[int, Pod], gone: set[str]
) -> str:
    """Why all pods have to be made anew; empty if they have not."""
    if not status.scheduler_uid:
        return ""
    if scheduler is None:
        return "the scheduler's pod is gone"
    if scheduler.phase == "Failed" or scheduler.uid in gone or scheduler.deleting:
        return f"{scheduler.name}: {how(scheduler, gone)}"
    missing = any(
        index not in workers or workers[index].phase == "Failed" for index in range(spec.workers.replicas)
    )
    if scheduler.phase == "Succeeded" and missing:
        return "the scheduler has ended before all workers had"
    return ""


def _secret_lost(job: Job, pods: Sequence[Pod]) -> str:
    """Why a pod cannot start, if somebody has deleted the job's secret. Pods that run have it, and another one would
    not let a new pod join them."""
    name = p.secret_name(job.owner)
    lost = any(pod.phase == "Pending" and f'"{name}" not found' in pod.reason for pod in pods)
    return f"the secret {name} was deleted" if lost else ""


def _counted(
    status: r.Status,
    spec: r.Spec,
    scheduler: Pod | None,
    workers: Mapping[int, Pod],
    servers: Mapping[int, Pod],
    gone: set[str],
    now: float,
) -> r.Status:
    """The status with the numbers of pods, and the state that follows from them."""

    def numbers(wanted: int, of: Sequence[Pod]) -> r.RoleStatus:
        phases = [("Failed" if pod.uid in gone else pod.phase) for pod in of if not pod.deleting]
        active, well, bad = (phases.count(phase) for phase in ("Running", *DONE))
        return r.RoleStatus(replicas=wanted, active=active, succeeded=well, failed=bad)

    wanted = spec.workers.replicas
    mine = numbers(wanted, list(workers.values()))
    statuses = {r.SCHEDULER: numbers(1, [scheduler] if scheduler else []), r.WORKER: mine}
    if spec.servers is not None:
        statuses[r.SERVER] = numbers(spec.servers.replicas, list(servers.values()))
    up = mine.active + mine.succeeded >= wanted and (mine.succeeded > 0 or s.ready(spec, status, servers))
    again = "Restarting" if status.restarts or status.round > 1 else "Starting"
    queued = queue.waits(workers.values())
    status = replace(
        status,
        replica_statuses=statuses,
        workers=mine.active,
        ready=f"{mine.active}/{wanted}",
        state="Running" if up else "Queued" if queued else again,
        start_time="" if queued else status.start_time or stamp(now),
    )
    if up:
        free = queue.not_queued(spec, workers.values())
        return with_conditions(
            status, now, Running=("True", "NotQueued", free) if free else ("True", "", so_far(status))
        )
    pending = [
        pod for pod in (scheduler, *servers.values(), *workers.values()) if pod and pod.phase == "Pending"
    ]
    why = next((f"{pod.name}: {pod.reason}" for pod in pending if pod.reason), "")
    before = next(
        (c.message for c in status.conditions if c.type == "Running" and c.reason == "Restarting"), ""
    )
    return with_conditions(status, now, Running=("False", status.state, why or before))


def _new_round(status: r.Status, revision: str) -> r.Status:
    """`revision`: of the settings of its pods; empty while there shall be none."""
    if status.revision == revision == "":
        return status
    return replace(status, round=status.round + 1, revision=revision, scheduler_uid="", counted=[])


def _revision(spec: r.Spec) -> str:
    """Changes with everything that running pods depend on, and with nothing that an operator of another version writes
    into them."""
    workers, servers = spec.workers, spec.servers
    if workers.independent:
        workers = replace(workers, replicas=1)
    parts: list[object] = [spec.image, spec.command, workers, spec.scheduler, spec.backoff_limit]
    if servers is not None:
        parts.append(replace(servers, replicas=1))
    if spec.plan is not None:
        parts.append(spec.plan)
    return p.revision_of(*parts)


def _again(
    spec: r.Spec, status: r.Status, pods: Sequence[Pod], lost: Mapping[str, float], now: float
) -> float | None:
    times = [time_of(status.retry_at)] if status.retry_at else []
    if spec.active_deadline_seconds and status.start_time:
        times.append(time_of(status.start_time) + spec.active_deadline_seconds)
    soon = given_up_at(spec, pods, lost, now)
    return min((t for t in (*times, soon) if t is not None and t > now), default=None)
