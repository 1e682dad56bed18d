"""The resource `ParallelJob` as typed records: what a user writes (`Spec`), and what the operator reports (`Status`).

The limits of each field are part of its type, so that the API server refuses what cannot be; `check` refuses the rest.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from meshwright.errors import LaunchError

GROUP, VERSION, KIND, PLURAL = "meshwright.dev", "v1alpha1", "ParallelJob", "paralleljobs"
NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"  # of a service and of host names: neither dots nor underscores
NAME_CHARACTERS = 45  # of at most 63 in the name of a pod
SCHEDULER, WORKER = "Scheduler", "Worker"

Free = Annotated[dict[str, Any], Meta(extra_json_schema={"x-kubernetes-preserve-unknown-fields": True})]
Count = Annotated[int, Meta(ge=0, le=1_000_000)]
Seconds = Annotated[int, Meta(ge=0, le=1 << 30)]


class Record(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A part of the resource; its fields are in camelCase there."""


class Strict(Record, frozen=True, forbid_unknown_fields=True):
    """A part that a user writes: a typing error is no field."""


class Role(Strict, frozen=True, kw_only=True):
    """One role of a job. Its image and its command are the job's."""

    container: Annotated[
        Free, Meta(description="More fields of its container: resources, env, volumeMounts, …")
    ] = {}
    pod: Annotated[
        Free, Meta(description="More fields of its pod's spec: nodeSelector, tolerations, volumes, …")
    ] = {}


class Scheduler(Role, frozen=True, kw_only=True):
    """The process that owns the members of the job. A job has one."""

    port: Annotated[int, Meta(ge=1024, le=65535, description="Where it listens.")] = 29400


class Workers(Role, frozen=True, kw_only=True):
    """The processes that train. Changing `replicas` restarts them in the new number."""

    replicas: Annotated[int, Meta(ge=1, le=4096, description="How many pods.")]
    ranks: Annotated[int, Meta(ge=1, le=4096, description="Ranks of each pod, as --nproc.")] = 1
    restart_policy: Annotated[
        Literal["OnFailure", "Never"],
        Meta(
            description="OnFailure: a worker that is killed or lost is replaced. One whose script fails (exit codes 1 "
            "to 127) is not: all of them start it again, backoffLimit times, before they give up."
        ),
    ] = "OnFailure"
    gang: Annotated[
        bool,
        Meta(
            description="Start all workers or none: they are a PodGroup of scheduler-plugins, and pod.schedulerName "
            "names the scheduler that knows it."
        ),
    ] = False


class Spec(Strict, frozen=True, kw_only=True):
    image: Annotated[
        str, Meta(pattern=r"^\S+$", max_length=1024, description="Has the script, Python and Meshwright.")
    ]
    command: Annotated[
        list[Annotated[str, Meta(max_length=65536)]],
        Meta(
            min_length=1, max_length=1024, description="What workers start: the words after `meshwright run`."
        ),
    ]
    workers: Workers
    scheduler: Scheduler = Scheduler()
    success_policy: Annotated[
        Literal["AllWorkers", "AnyWorker"], Meta(description="Which workers have to end well.")
    ] = "AllWorkers"
    clean_pod_policy: Annotated[
        Literal["Running", "All", "None"],
        Meta(description="The pods that are deleted when the job has ended."),
    ] = "Running"
    backoff_limit: Annotated[int, Meta(ge=0, le=1000, description="Restarts before the job fails.")] = 6
    active_deadline_seconds: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 30)] | None, Meta(description="The job fails after this time.")
    ] = None
    ttl_seconds_after_finished: Annotated[
        Seconds | None, Meta(description="The job is deleted this long after its end.")
    ] = None
    node_loss_seconds: Annotated[
        Seconds,
        Meta(description="After so long without its node, a pod is deleted by force, and made elsewhere."),
    ] = 30
    suspend: Annotated[bool, Meta(description="Delete all pods, and start again when it is false.")] = False


class Condition(Record, frozen=True, kw_only=True):
    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str = ""
    message: str = ""
    last_transition_time: str = ""


class RoleStatus(Record, frozen=True, kw_only=True, omit_defaults=False):
    """How many pods of a role are wanted, running, and have ended well or badly."""

    replicas: Count = 0
    active: Count = 0
    succeeded: Count = 0
    failed: Count = 0


class Status(Record, frozen=True, kw_only=True):
    """`round` counts the times that all pods were made anew, for the settings in `revision`. `counted`: pods whose
    failure is part of `restarts` already. `retry_at`: before it, no pod is replaced."""

    state: str = ""
    ready: str = ""
    workers: Count = 0
    selector: str = ""
    step: int | None = None
    loss: str = ""
    conditions: list[Condition] = []
    replica_statuses: dict[str, RoleStatus] = {}
    restarts: Count = 0
    in_a_row: Count = 0
    counted: list[str] = []
    retry_at: str = ""
    last_restart_time: str = ""
    round: Count = 0
    revision: str = ""
    scheduler_uid: str = ""
    start_time: str = ""
    completion_time: str = ""
    observed_generation: Count = 0


OURS_IN_CONTAINER = ("name", "image", "command", "args")
OURS_IN_POD = ("containers", "restartPolicy", "hostname", "subdomain")


def read_spec(spec: object) -> Spec:
    """The spec of a ParallelJob. Raises LaunchError for what the API server would refuse, and what it cannot see."""
    try:
        found = msgspec.convert(spec, Spec)
    except msgspec.ValidationError as error:
        raise LaunchError("this is no ParallelJob", why=str(error).replace("`$", "`spec")) from None
    check(found)
    return found


def check(spec: Spec) -> None:
    """Refuse what a schema cannot express."""
    for role, of in (("workers", spec.workers), ("scheduler", spec.scheduler)):
        for field, given, ours in (
            ("container", of.container, OURS_IN_CONTAINER),
            ("pod", of.pod, OURS_IN_POD),
        ):
            if wrong := [name for name in given if name in ours]:
                raise LaunchError(
                    f"{role}.{field} has {wrong[0]}",
                    why="the operator sets it",
                    hint="image and command of the job; other fields of a pod and its container stay as they are given",
                )
    if spec.workers.gang and not spec.workers.pod.get("schedulerName"):
        raise LaunchError(
            "workers.gang is set without workers.pod.schedulerName",
            why="the scheduler that a cluster has by default starts pods one by one",
            hint="pod: {schedulerName: scheduler-plugins-scheduler}, as it was named when it was installed",
        )
    if not spec.command[0].strip():
        raise LaunchError("command begins with an empty word", hint="command: [train.py]")


def check_name(name: str) -> None:
    """Refuse a name that pods and their service could not have."""
    if len(name) > NAME_CHARACTERS or re.fullmatch(NAME, name) is None:
        raise LaunchError(
            f"the name {name!r:.80} cannot be that of a ParallelJob",
            why=f"its pods are named after it: at most {NAME_CHARACTERS} of a-z, 0-9 and -, and first a letter",
            hint=re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-0123456789")[:NAME_CHARACTERS],
        )


__all__ = ["Spec", "Status", "check", "check_name", "read_spec"]
