"""The resource `ParallelJob` as typed records: what a user writes (`Spec`), and what the operator reports (`Status`).

The limits of each field are part of its type, so that the API server refuses what cannot be; `checks.py` refuses the
rest.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

GROUP, VERSION, KIND, PLURAL = "meshwright.dev", "v1alpha1", "ParallelJob", "paralleljobs"
NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"  # of a service and of host names: neither dots nor underscores
QUEUE = r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$"
NAME_CHARACTERS = 45  # of at most 63 in the name of a pod
SCHEDULER, SERVER, WORKER = "Scheduler", "Server", "Worker"
MOST_SERVERS = 64

Free = Annotated[dict[str, Any], Meta(extra_json_schema={"x-kubernetes-preserve-unknown-fields": True})]
Count = Annotated[int, Meta(ge=0, le=1_000_000)]
Seconds = Annotated[int, Meta(ge=0, le=1 << 30)]


class Record(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A part of the resource; its fields are in camelCase there."""


class Strict(Record, frozen=True, forbid_unknown_fields=True):
    """A part that a user writes: a typing error is no field."""


class PodMetadata(Strict, frozen=True, kw_only=True):
    """What the pods of a role are marked with, beside the operator's own labels."""

    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class Role(Strict, frozen=True, kw_only=True):
    """One role of a job. Its image and its command are the job's."""

    metadata: Annotated[PodMetadata, Meta(description="More labels and annotations of its pods.")] = (
        PodMetadata()
    )
    container: Annotated[
        Free, Meta(description="More fields of its container: resources, env, volumeMounts, …")
    ] = {}
    pod: Annotated[
        Free, Meta(description="More fields of its pod's spec: nodeSelector, tolerations, volumes, …")
    ] = {}


class Scheduler(Role, frozen=True, kw_only=True):
    """The process that owns the members of the job. A job has one."""

    port: Annotated[int, Meta(ge=1024, le=65535, description="Where it listens.")] = 29400


class Servers(Role, frozen=True, kw_only=True):
    """Parameter servers, each in a pod of its own. Changing `replicas` moves parameters while workers train."""

    replicas: Annotated[int, Meta(ge=1, le=MOST_SERVERS, description="How many pods.")]
    copies: Annotated[
        int,
        Meta(
            ge=0,
            le=1,
            description="1: each server has a copy on another one, and its pod may be lost. 0: it has a file in its "
            "pod, and its process may be killed.",
        ),
    ] = 0
    state: Annotated[
        str,
        Meta(
            pattern=r"^(/[^\s:]+)?$",
            max_length=1024,
            description="A folder in a volume of container.volumeMounts, in which servers keep all values: pods may be "
            "lost, and the job suspended.",
        ),
    ] = ""


class Workers(Role, frozen=True, kw_only=True):
    """The processes that train. Changing `replicas` restarts them in the new number, unless they are independent."""

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
    queue: Annotated[
        str,
        Meta(
            pattern=QUEUE,
            max_length=63,
            description="A local queue of Kueue: all workers wait in it as one group, independent ones one by one.",
        ),
    ] = ""
    independent: Annotated[
        bool,
        Meta(
            description="With servers that have all parameters: workers come and go one by one, and the others go on. "
            "Batches come from step.samples."
        ),
    ] = False


class Planning(Role, frozen=True, kw_only=True):
    """A plan that is made before workers start, by `meshwright plan` in a pod of its own. Its volume is in workers."""

    model: Annotated[
        str,
        Meta(
            pattern=r"^\S+$",
            max_length=1024,
            description="As of `meshwright plan`: file.py:function, hf:config.json or zoo:gpt.",
        ),
    ]
    cluster: Annotated[
        str,
        Meta(
            pattern=r"^\S*$",
            max_length=1024,
            description="A preset, such as h100 or h100:eager, of which a worker is a node; or a cluster file of the "
            "plan's pod, such as /clusters/ours.yaml. Default: the preset of the GPU that the labels of nodes name.",
        ),
    ] = ""
    options: Annotated[
        list[Annotated[str, Meta(max_length=65536)]],
        Meta(
            max_length=1024, description='More words of `meshwright plan`: [--batch, "64", --memory, 70GB].'
        ),
    ] = []


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
    servers: Annotated[Servers | None, Meta(description="Parameter servers.")] = None
    scheduler: Scheduler = Scheduler()
    plan: Annotated[
        Planning | None,
        Meta(description="Workers wait for a plan; MESHWRIGHT_PLAN names its file."),
    ] = None
    success_policy: Annotated[
        Literal["AllWorkers", "AnyWorker"], Meta(description="Which workers have to end well.")
    ] = "AllWorkers"
    clean_pod_policy: Annotated[
        Literal["Running", "All", "None"],
        Meta(description="The pods that are deleted when the job has ended."),
    ] = "Running"
    backoff_limit: Annotated[
        int,
        Meta(
            ge=0, le=1000, description="How often pods are replaced, and ranks restart, before the job fails."
        ),
    ] = 6
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


class ServersStatus(Record, frozen=True, kw_only=True, omit_defaults=False):
    """`first`: how many servers the job began with. `spread`: how many have parameters. `moving`: to how many they are
    moved now, 0 if they are not."""

    first: Count = 0
    spread: Count = 0
    moving: Count = 0


class Status(Record, frozen=True, kw_only=True):
    """`attempt`: of worker 0's ranks, where they have begun again in their pods (2/7), and `attempt_after`: after what.
    `last_restart`: which pods were lost last, and why. `round` counts the times that all pods were made anew, for the
    settings in `revision`. `counted`: pods whose failure is part of `restarts` already. `retry_at`: before it, no
    pod is replaced. `plan`: the plan that workers have by its settings. `planner`: the pod whose end is part of the
    conditions."""

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
    last_restart: str = ""
    attempt: str = ""
    attempt_after: str = ""
    round: Count = 0
    revision: str = ""
    plan: str = ""
    planner: str = ""
    scheduler_uid: str = ""
    servers: ServersStatus = ServersStatus()
    start_time: str = ""
    completion_time: str = ""
    observed_generation: Count = 0


def asks_for_gpus(workers: Workers) -> bool:
    """Return whether a worker's container has a limit such as ``nvidia.com/gpu``."""
    resources = workers.container.get("resources")
    limits = resources.get("limits") if isinstance(resources, dict) else None
    return isinstance(limits, dict) and any(str(name).endswith("/gpu") for name in limits)


def is_file(cluster: str) -> bool:
    """Return whether a cluster is a file, and not the name of a preset."""
    return cluster.endswith((".yaml", ".yml"))


__all__ = ["Spec", "Status", "asks_for_gpus", "is_file"]
