"""The status of a job as it changes: conditions, failures that are counted once, and times."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from msgspec.structs import replace

from meshwright.k8s import resource as r
from meshwright.k8s.records import DONE, Pod

MOST_BACK_OFF_SECONDS = 300.0
CALM_SECONDS = 600.0  # after so long without a failure, the next one is the first in a row
SIGNALS = 128  # exit codes above it say that a process was killed
BAD = {"Valid": "False", "Planned": "False", "Failed": "True"}
BAD_REASONS = ("Restarting", "NotQueued")
Truth = Literal["True", "False", "Unknown"]


def with_conditions(status: r.Status, now: float, **conditions: tuple[Truth, str, str]) -> r.Status:
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


def warnings(before: r.Status, after: r.Status) -> list[tuple[str, str]]:
    """Reason and message of the conditions that have become bad, or say something else that is."""
    old = {c.type: (c.status, c.reason, c.message) for c in before.conditions}
    return [
        (c.reason, c.message)
        for c in after.conditions
        if old.get(c.type) != (c.status, c.reason, c.message)
        and (c.status == BAD.get(c.type) or c.reason in BAD_REASONS)
        and c.message
    ]


def refused(status: r.Status, message: str, now: float) -> r.Status:
    """The status of a job whose pods the API server does not make."""
    return with_conditions(replace(status, state="Refused"), now, Valid=refusal(message))


def refusal(message: str) -> tuple[Truth, str, str]:
    return "False", "PodsRefused", message


def stamp(seconds: float) -> str:
    """A time as the API server writes it, with microseconds."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")


def time_of(text: str) -> float:
    """Seconds since the epoch; 0 for no time."""
    return datetime.datetime.fromisoformat(text).timestamp() if text else 0.0


def is_gone(pod: Pod, lost: Mapping[str, float], spec: r.Spec, now: float) -> bool:
    """Return whether a pod's node has not answered for so long that it is given up."""
    return pod.phase not in DONE and pod.node in lost and now - lost[pod.node] >= spec.node_loss_seconds


def given_up_at(spec: r.Spec, pods: Iterable[Pod], lost: Mapping[str, float], now: float) -> float | None:
    """When the next pod is given up, if its node does not answer until then."""
    times = [lost[pod.node] + spec.node_loss_seconds for pod in pods if pod.node in lost]
    return min((t for t in times if t > now), default=None)


def how(pod: Pod, gone: Collection[str]) -> str:
    if pod.uid in gone:
        return f"its node {pod.node} is lost"
    if pod.exit_code is None:
        return pod.reason or ("its pod was deleted" if pod.deleting else "its pod failed")
    signal = f", signal {pod.exit_code - SIGNALS}" if pod.exit_code > SIGNALS else ""
    return f"exit code {pod.exit_code}{signal}" + (f" ({pod.reason})" if pod.reason else "")


def so_far(status: r.Status) -> str:
    """Why pods and ranks of a job that runs were started again last; empty if they were not."""
    attempt = status.attempt.replace("/", " of ")
    return "; ".join(
        text
        for text, there in (
            (f"last restart: {status.last_restart}", status.last_restart),
            (f"attempt {attempt}, after: {status.attempt_after}", attempt),
        )
        if there
    )


def restarted(status: r.Status, why: list[tuple[str, str]], here: Collection[str], now: float) -> r.Status:
    """The status with one more restart, however many pods were lost at once. `why`: of each that is not counted yet."""
    kept = [uid for uid in status.counted if uid in here]
    if not why:
        return status if kept == status.counted else replace(status, counted=kept)
    calm = now - time_of(status.last_restart_time) > CALM_SECONDS
    in_a_row = 1 if calm else status.in_a_row + 1
    wait = 0.0 if in_a_row == 1 else min(2.0 ** (in_a_row - 2), MOST_BACK_OFF_SECONDS)
    more = f", and {len(why) - 1} more" if len(why) > 1 else ""
    status = replace(
        status,
        restarts=status.restarts + 1,
        in_a_row=in_a_row,
        counted=[*kept, *(uid for uid, _ in why if uid)],
        last_restart_time=stamp(now),
        last_restart=why[0][1] + more,
        retry_at=stamp(now + wait) if wait else "",
        state="Restarting",
    )
    return with_conditions(status, now, Running=("False", "Restarting", status.last_restart))


__all__ = [
    "SIGNALS",
    "Truth",
    "given_up_at",
    "how",
    "is_gone",
    "refusal",
    "refused",
    "restarted",
    "so_far",
    "stamp",
    "time_of",
    "warnings",
    "with_conditions",
]
