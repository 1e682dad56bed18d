"""What to do next for one job: a plain function of what the API server says. Knows no connection and no clock.

    made anew --> Starting --> Running --> Succeeded
                     ^            |
                     +-Restarting-+------> Failed

All pods of a *round* have the same settings. A killed worker is replaced within its round; a new number of workers, or
the loss of the scheduler, begins another one. Everything that has to be remembered is in the status, and the status is
written before anything is done: an operator that ends at any point goes on from there, and of two only one is heard.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from meshwright.k8s import pods as p
from meshwright.k8s import resource as r

MOST_BACK_OFF_SECONDS = 300.0
CALM_SECONDS = 600.0  # after so long without a failure, the next one is the first in a row
SIGNALS = 128  # exit codes above it say that a process was killed
DONE = ("Succeeded", "Failed")
Truth = Literal["True", "False", "Unknown"]


class Job(r.Record, frozen=True, kw_only=True):
    """`spec`: None for one that cannot be, and then `problem` says why."""

    owner: p.Owner
    spec: r.Spec | None
    status: r.Status
    generation: int = 0
    problem: str = ""


class Pod(r.Record, frozen=True, kw_only=True):
    """`deleting`: somebody has asked for its end. `exit_code`: of its container, where it has ended."""

    name: str
    uid: str
    role: str
    index: int = 0
    round: int = 0
    phase: str = "Pending"
    address: str = ""
    node: str = ""
    ready: bool = False
    deleting: bool = False
    exit_code: int | None = None
    reason: str = ""


class CreateShared(r.Record, frozen=True):
    """The secret and the service, and the group of a round's workers."""

    round: int


class CreateScheduler(r.Record, frozen=True):
    round: int


class CreateWorker(r.Record, frozen=True):
    round: int
    index: int
    address: str


class Delete(r.Record, frozen=True):
    """`now`: without waiting for its node."""

    name: str
    uid: str
    now: bool = False


class DeleteJob(r.Record, frozen=True):
    pass


Action = CreateShared | CreateScheduler | CreateWorker | Delete | DeleteJob


class Decision(r.Record, frozen=True):
    """`status` is written first, then `actions` are done in their order. `again`: the time at which to decide again,
    should nothing happen before."""

    status: r.Status
    actions: tuple[Action, ...] = ()
    again: float | None = None


def decide(job: Job, pods: Sequence[Pod], lost: Mapping[str, float], now: float) -> Decision:
    """`lost`: nodes that do not answer, with the time since when; 0 for one that is gone for good."""
    spec, status = job.spec, replace(job.status, observed_generation=job.generation)
    if spec is None:
        return Decision(_with(replace(status, state="Refused"), now, Valid=("False", "Refused", job.problem)))
    status = _with(status, now, Valid=("True", "", ""))
    if status.completion_time:
        return _after_the_end(spec, status, pods, now)
    if spec.suspend:
        status = replace(
            _new_round(status, ""), state="Suspended", start_time="", ready=f"0/{spec.workers.replicas}"
        )
        status = _with(status, now, Suspended=("True", "Suspended", ""), Running=("False", "Suspended", ""))
        gone = {pod.uid for pod in pods if _gone(pod, lost, spec, now)}
        return Decision(replace(status, workers=0), tuple(_stopped(pods, gone)))
    revision = _revision(spec)
    if status.revision != revision:
        status = _new_round(status, revision)
        status = replace(
            status, start_time=status.start_time or stamp(now), selector=f"{p.JOB}={job.owner.name}"
        )
        status = _with(status, now, Suspended=("False", "", ""))
    return _in_round(job, spec, status, pods, lost, now)


def refused(status: r.Status, message: str, now: float) -> r.Status:
    """The status of a job whose pods the API server does not make."""
    return _with(replace(status, state="Refused"), now, Valid=("False", "PodsRefused", message))


def _in_round(
    job: Job, spec: r.Spec, status: r.Status, pods: Sequence[Pod], lost: Mapping[str, float], now: float
) -> Decision:
    own = [pod for pod in pods if pod.round == status.round]
    gone = {pod.uid for pod in pods if _gone(pod, lost, spec, now)}
    scheduler = next((pod for pod in own if pod.role == r.SCHEDULER.lower()), None)
    workers = {pod.index: pod for pod in own if pod.role == r.WORKER.lower()}
    status = _counted(status, spec, scheduler, workers, gone, now)
    if scheduler is not None and not status.scheduler_uid:
        status = replace(status, scheduler_uid=scheduler.uid)

    if end := _end(spec, status, workers, gone, now):
        status = _with(replace(status, state=end[0], completion_time=stamp(now)), now, **end[1])
        return _after_the_end(spec, status, pods, now)

    failed = [pod for pod in workers.values() if pod.phase == "Failed" or pod.uid in gone]
    why = [(pod.uid, f"{pod.name}: {_how(pod, gone)}") for pod in failed if pod.uid not in status.counted]
    anew = _scheduler_lost(spec, status, scheduler, workers, gone)
    if anew:
        why = [("", anew), *why]
    status = _restarted(status, why, {pod.uid for pod in own}, now)
    if status.restarts > spec.backoff_limit:
        text = f"{status.restarts} restarts, backoffLimit is {spec.backoff_limit}; {why[0][1] if why else ''}"
        status = replace(status, state="Failed", completion_time=stamp(now))
        status = _with(status, now, Failed=("True", "BackoffLimitExceeded", text.rstrip("; ")))
        return _after_the_end(spec, status, pods, now)
    if anew:
        return _in_round(job, spec, _new_round(status, status.revision), pods, lost, now)

    ended = {pod.uid for pod in failed}
    actions: list[Action] = [
        Delete(pod.name, pod.uid, pod.uid in gone) for pod in own if pod.uid in ended | gone
    ]
    actions += _stopped([pod for pod in pods if pod.round != status.round], gone)
    removed = {a.uid for a in actions if isinstance(a, Delete) and (a.now or a.uid in ended)}
    taken = {pod.name for pod in pods if pod.uid not in removed}
    retry = time_of(status.retry_at)
    if now >= retry:
        actions += _created(job, spec, status, scheduler, taken)
    return Decision(status, tuple(actions), _again(spec, status, pods, lost, now))


def _created(
    job: Job, spec: r.Spec, status: r.Status, scheduler: Pod | None, taken: set[str]
) -> list[Action]:
    """The scheduler first; workers as soon as it has an address."""
    name = job.owner.name
    if scheduler is None:
        free = p.scheduler_name(name) not in taken
        return [CreateShared(status.round), CreateScheduler(status.round)] if free else []
    if not scheduler.address or scheduler.phase in DONE:
        return []
    return [
        CreateWorker(status.round, index, scheduler.address)
        for index in range(spec.workers.replicas)
        if p.worker_name(name, index) not in taken
    ]


def _end(
    spec: r.Spec, status: r.Status, workers: Mapping[int, Pod], gone: set[str], now: float
) -> tuple[str, dict[str, tuple[Truth, str, str]]] | None:
    """State and conditions of a job that has ended."""
    well = [pod for pod in workers.values() if pod.phase == "Succeeded"]
    if len(well) >= (1 if spec.success_policy == "AnyWorker" else spec.workers.replicas):
        return "Succeeded", {
            "Succeeded": ("True", spec.success_policy, ""),
            "Running": ("False", "Succeeded", ""),
        }
    failure: tuple[Truth, str, str] | None = None
    for pod in workers.values():
        bad = pod.phase == "Failed" or pod.uid in gone
        if bad and spec.workers.restart_policy == "Never":
            failure = ("True", "WorkerFailed", f"{pod.name}: {_how(pod, gone)}; restartPolicy is Never")
        elif pod.phase == "Failed" and pod.exit_code is not None and 0 < pod.exit_code < SIGNALS:
            failure = ("True", "WorkerFailed", f"{pod.name}: {_how(pod, gone)}")
    if spec.active_deadline_seconds and now >= time_of(status.start_time) + spec.active_deadline_seconds:
        failure = ("True", "DeadlineExceeded", f"activeDeadlineSeconds is {spec.active_deadline_seconds}")
    if failure is None:
        return None
    return "Failed", {"Failed": failure, "Running": ("False", "Failed", "")}


def _scheduler_lost(
    spec: r.Spec, status: r.Status, scheduler: Pod | None, workers: Mapping[int, Pod], gone: set[str]
) -> str:
    """Why all pods have to be made anew; empty if they have not."""
    if not status.scheduler_uid:
        return ""
    if scheduler is None:
        return "the scheduler's pod is gone"
    if scheduler.phase == "Failed" or scheduler.uid in gone or scheduler.deleting:
        return f"{scheduler.name}: {_how(scheduler, gone)}"
    missing = any(
        index not in workers or workers[index].phase == "Failed" for index in range(spec.workers.replicas)
    )
    if scheduler.phase == "Succeeded" and missing:
        return "the scheduler has ended before all workers had"
    return ""


def _restarted(status: r.Status, why: list[tuple[str, str]], here: set[str], now: float) -> r.Status:
    """The status with failures counted, each pod once."""
    kept = [uid for uid in status.counted if uid in here]
    if not why:
        return status if kept == status.counted else replace(status, counted=kept)
    calm = now - time_of(status.last_restart_time) > CALM_SECONDS
    in_a_row = 1 if calm else status.in_a_row + 1
    wait = 0.0 if in_a_row == 1 else min(2.0 ** (in_a_row - 2), MOST_BACK_OFF_SECONDS)
    status = replace(
        status,
        restarts=status.restarts + len(why),
        in_a_row=in_a_row,
        counted=[*kept, *(uid for uid, _ in why if uid)],
        last_restart_time=stamp(now),
        retry_at=stamp(now + wait) if wait else "",
        state="Restarting",
    )
    return _with(status, now, Running=("False", "Restarting", why[0][1]))


def _counted(
    status: r.Status,
    spec: r.Spec,
    scheduler: Pod | None,
    workers: Mapping[int, Pod],
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
    up = mine.active + mine.succeeded >= wanted
    again = "Restarting" if status.restarts or status.round > 1 else "Starting"
    status = replace(
        status,
        replica_statuses=statuses,
        workers=mine.active,
        ready=f"{mine.active}/{wanted}",
        state="Running" if up else again,
    )
    return _with(status, now, Running=("True", "", "")) if up else status


def _after_the_end(spec: r.Spec, status: r.Status, pods: Sequence[Pod], now: float) -> Decision:
    policy, ttl = spec.clean_pod_policy, spec.ttl_seconds_after_finished
    over = time_of(status.completion_time) + ttl if ttl is not None else None
    if over is not None and now >= over:
        return Decision(status, (DeleteJob(),))
    extra = [pod for pod in pods if policy == "All" or (policy == "Running" and pod.phase not in DONE)]
    return Decision(status, tuple(_stopped(extra, set())), over)


def _new_round(status: r.Status, revision: str) -> r.Status:
    """`revision`: of the settings of its pods; empty while there shall be none."""
    if status.revision == revision == "":
        return status
    return replace(status, round=status.round + 1, revision=revision, scheduler_uid="", counted=[])


def _revision(spec: r.Spec) -> str:
    """Changes with everything that running pods depend on, and with nothing that an operator of another version writes
    into them."""
    parts = (spec.image, spec.command, spec.workers, spec.scheduler, spec.backoff_limit)
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()[:12]


def _gone(pod: Pod, lost: Mapping[str, float], spec: r.Spec, now: float) -> bool:
    """Return whether a pod's node has not answered for so long that it is given up."""
    return pod.phase not in DONE and pod.node in lost and now - lost[pod.node] >= spec.node_loss_seconds


def _stopped(pods: Sequence[Pod], gone: set[str]) -> list[Action]:
    """End pods: the scheduler after the workers, which need it to agree on their last checkpoint."""
    last = r.SCHEDULER.lower()
    left = any(pod.role != last and pod.phase not in DONE and pod.uid not in gone for pod in pods)
    return [
        Delete(pod.name, pod.uid, pod.uid in gone)
        for pod in pods
        if pod.uid in gone or not (pod.deleting or (left and pod.role == last))
    ]


def _again(
    spec: r.Spec, status: r.Status, pods: Sequence[Pod], lost: Mapping[str, float], now: float
) -> float | None:
    times = [time_of(status.retry_at)] if status.retry_at else []
    if spec.active_deadline_seconds:
        times.append(time_of(status.start_time) + spec.active_deadline_seconds)
    times += [lost[pod.node] + spec.node_loss_seconds for pod in pods if pod.node in lost]
    return min((t for t in times if t > now), default=None)


def _how(pod: Pod, gone: set[str]) -> str:
    if pod.uid in gone:
        return f"its node {pod.node} is lost"
    if pod.exit_code is None:
        return pod.reason or ("it is being deleted" if pod.deleting else "its pod failed")
    signal = f", signal {pod.exit_code - SIGNALS}" if pod.exit_code > SIGNALS else ""
    return f"exit code {pod.exit_code}{signal}" + (f" ({pod.reason})" if pod.reason else "")


def _with(status: r.Status, now: float, **conditions: tuple[Truth, str, str]) -> r.Status:
    """The status with conditions: type = (status, reason, message)."""
    found = {c.type: c for c in status.conditions}
    for kind, (value, reason, message) in conditions.items():
        old = found.get(kind)
        if old is None or (old.status, old.reason, old.message) != (value, reason, message):
            since = old.last_transition_time if old is not None and old.status == value else stamp(now)
            found[kind] = r.Condition(
                type=kind, status=value, reason=reason, message=message, last_transition_time=since
            )
    return replace(status, conditions=list(found.values()))


def stamp(seconds: float) -> str:
    """A time as the API server writes it, with microseconds."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")


def time_of(text: str) -> float:
    """Seconds since the epoch; 0 for no time."""
    return datetime.datetime.fromisoformat(text).timestamp() if text else 0.0
