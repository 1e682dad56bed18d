"""Objects of the API server as the records that `decide` reads."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.k8s import decide as d
from meshwright.k8s import pods as p
from meshwright.k8s import resource as r

Object = dict[str, Any]
STEP = re.compile(r"\bstep[ =:]+(?P<step>\d+)\b.*?\bloss[ =:]+(?P<loss>[-+0-9.eE]+|nan|inf)", re.IGNORECASE)


def job(object: Object) -> d.Job:
    """A ParallelJob. A spec that cannot be, and a status of another version, are no errors here."""
    metadata = object["metadata"]
    spec, problem = None, ""
    try:
        spec = r.read_spec(object.get("spec"))
    except MeshwrightError as error:
        problem = f"{error.what}: {error.why}"
    try:
        status = msgspec.convert(object.get("status") or {}, r.Status)
    except msgspec.ValidationError:
        status = r.Status()
    owner = p.Owner(name=metadata["name"], namespace=metadata["namespace"], uid=metadata["uid"])
    return d.Job(
        owner=owner, spec=spec, status=status, generation=metadata.get("generation", 0), problem=problem
    )


def pod(object: Object) -> d.Pod:
    metadata, spec, status = object["metadata"], object["spec"], object.get("status", {})
    labels = metadata.get("labels", {})
    ended = next(
        (c["state"].get("terminated") for c in status.get("containerStatuses", []) if c.get("state")), None
    )
    conditions = {c["type"]: c["status"] for c in status.get("conditions", [])}
    return d.Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        role=labels.get(p.ROLE, ""),
        index=_number(labels.get(p.INDEX)),
        round=_number(labels.get(p.ROUND)),
        phase=status.get("phase", "Pending"),
        address=status.get("podIP", ""),
        node=spec.get("nodeName", ""),
        ready=conditions.get("Ready") == "True",
        deleting="deletionTimestamp" in metadata,
        exit_code=(ended or {}).get("exitCode"),
        reason=status.get("reason") or _own(ended) or _waits(status),
    )


def unsure(pods: list[d.Pod]) -> set[str]:
    """The nodes of pods that may be lost: those that shall end, and those that are not ready."""
    return {
        pod.node for pod in pods if pod.node and pod.phase not in d.DONE and (pod.deleting or not pod.ready)
    }


def lost_since(node: Object | None) -> float | None:
    """When a node was heard for the last time; 0 for one that is gone, None for one that is well."""
    if node is None:
        return 0.0
    for condition in node.get("status", {}).get("conditions", []):
        if condition["type"] == "Ready" and condition["status"] != "True":
            return d.time_of(condition["lastTransitionTime"])
    return None


def progress(log: str) -> tuple[int, str] | None:
    """Step and loss of the last line that has both: ``step 20 loss 2.31``, ``{"step": 20, "loss": 2.31}``."""
    for line in reversed(log.splitlines()):
        if found := STEP.search(line.replace('"', " ")):
            return int(found["step"]), found["loss"]
    return None


def _own(ended: Object | None) -> str:
    reason = (ended or {}).get("reason", "")
    return "" if reason in ("Error", "Completed") else reason


def _waits(status: Object) -> str:
    waits = [
        c["state"]["waiting"]
        for c in status.get("containerStatuses", [])
        if c.get("state", {}).get("waiting")
    ]
    return waits[0].get("reason", "") if waits else ""


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else -1


__all__ = ["job", "lost_since", "pod", "progress", "unsure"]
