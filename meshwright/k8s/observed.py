"""Objects of the API server as the records that `decide` reads."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.k8s import checks, records
from meshwright.k8s import pods as p
from meshwright.k8s import resource as r
from meshwright.k8s.conditions import time_of

Object = dict[str, Any]
STEP = re.compile(r"\bstep[ =:]+(?P<step>\d+)\b.*?\bloss[ =:]+(?P<loss>[-+0-9.eE]+|nan|inf)", re.IGNORECASE)
ATTEMPT = re.compile(r"attempt (?P<number>\d+) of (?P<most>\d+):")  # of `meshwright run`, after why
ERROR = re.compile(r"(\w+\.)*\w*(Error|Fit|Lost): ")
LAST_LINES, LAST_CHARACTERS = 8, 1500  # of a log, where it names no error


def job(object: Object) -> records.Job:
    """A ParallelJob. A spec that cannot be, and a status of another version, are no errors here."""
    metadata = object["metadata"]
    spec, problem = None, ""
    try:
        spec = checks.read_spec(object.get("spec"))
    except MeshwrightError as error:
        problem = str(error)
    try:
        status = msgspec.convert(object.get("status") or {}, r.Status)
    except msgspec.ValidationError:
        status = r.Status()
    owner = p.Owner(name=metadata["name"], namespace=metadata["namespace"], uid=metadata["uid"])
    return records.Job(
        owner=owner, spec=spec, status=status, generation=metadata.get("generation", 0), problem=problem
    )


def owner_of(object: Object) -> str:
    """The uid of the job that an object belongs to; empty for one that belongs to none any more."""
    return next((o["uid"] for o in object["metadata"].get("ownerReferences", []) if o["kind"] == r.KIND), "")


def pod(object: Object, job: str = "") -> records.Pod:
    """A pod of a job. One that an earlier job of the same name has left is of no round of this one, and so is
    deleted."""
    other = job and owner_of(object) != job
    metadata, spec, status = object["metadata"], object["spec"], object.get("status", {})
    labels = metadata.get("labels", {})
    ended = next(
        (c["state"].get("terminated") for c in status.get("containerStatuses", []) if c.get("state")), None
    )
    conditions = {c["type"]: c["status"] for c in status.get("conditions", [])}
    return records.Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        role=labels.get(p.ROLE, ""),
        index=_number(labels.get(p.INDEX)),
        round=-1 if other else _number(labels.get(p.ROUND)),
        phase=status.get("phase", "Pending"),
        address=status.get("podIP", ""),
        node=spec.get("nodeName", ""),
        ready=conditions.get("Ready") == "True",
        deleting="deletionTimestamp" in metadata,
        exit_code=(ended or {}).get("exitCode"),
        plan="" if other else labels.get(p.PLAN, ""),
        reason=status.get("reason") or _own(ended) or _waits(status) or _unscheduled(status),
        gated=bool(spec.get("schedulingGates")),
        held=bool(metadata.get("finalizers")),
        evicted=conditions.get(p.EVICTED) == "True",
    )


def unsure(pods: list[records.Pod]) -> set[str]:
    """The nodes of pods that may be lost: those that shall end, and those that are not ready."""
    return {
        pod.node
        for pod in pods
        if pod.node and pod.phase not in records.DONE and (pod.deleting or not pod.ready)
    }


def lost_since(node: Object | None) -> float | None:
    """When a node was heard for the last time; 0 for one that is gone, None for one that is well."""
    if node is None:
        return 0.0
    for condition in node.get("status", {}).get("conditions", []):
        if condition["type"] == "Ready" and condition["status"] != "True":
            return time_of(condition["lastTransitionTime"])
    return None


def progress(log: str) -> tuple[int, str] | None:
    """Step and loss of the last line that has both: ``step 20 loss 2.31``, ``{"step": 20, "loss": 2.31}``."""
    for line in reversed(log.splitlines()):
        if found := STEP.search(line.replace('"', " ")):
            return int(found["step"]), found["loss"]
    return None


def attempt(log: str) -> tuple[str, str] | None:
    """Which attempt of its ranks a worker has begun last, such as 2/7, and after what; None if the log has none."""
    lines = log.splitlines()
    for at in reversed(range(len(lines))):
        if found := ATTEMPT.fullmatch(lines[at]):
            why = next((line for line in reversed(lines[:at]) if line and not line.startswith(" ")), "")
            return f"{found['number']}/{found['most']}", why[:LAST_CHARACTERS]
    return None


def plan_in(log: str) -> str | None:
    """The plan that a pod has printed; None if it did not come to its end."""
    _, begins, rest = log.rpartition(p.PLAN_BEGINS + "\n")
    text, ends, _ = rest.partition(p.PLAN_ENDS)
    return text if begins and ends else None


def last_lines(log: str) -> str:
    """The end of a log: the message of an error, for a condition."""
    lines = [line.rstrip() for line in log.strip().splitlines() if line.strip()]
    first = next((n for n in reversed(range(len(lines))) if ERROR.match(lines[n])), len(lines) - LAST_LINES)
    return "\n".join(lines[max(0, first) :])[-LAST_CHARACTERS:]


def _own(ended: Object | None) -> str:
    reason = (ended or {}).get("reason", "")
    return "" if reason in ("Error", "Completed") else reason


def _waits(status: Object) -> str:
    waits = [
        c["state"]["waiting"]
        for c in status.get("containerStatuses", [])
        if c.get("state", {}).get("waiting")
    ]
    return _text(waits[0]) if waits else ""


def _unscheduled(status: Object) -> str:
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _text(condition)
    return ""


def _text(of: Object) -> str:
    """Reason and message of what a pod waits for; nothing of one that only takes its time to start."""
    if of.get("reason") in ("ContainerCreating", "PodInitializing"):
        return ""
    return ": ".join(of[name] for name in ("reason", "message") if of.get(name))[:LAST_CHARACTERS]


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else -1


__all__ = ["attempt", "job", "last_lines", "lost_since", "owner_of", "plan_in", "pod", "progress", "unsure"]
