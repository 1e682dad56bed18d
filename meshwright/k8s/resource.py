"""The resource `ParallelJob` as typed records: what a user writes (`Spec`), and what the operator reports (`Status`).

The limits of each field are part of its type, so that the API server refuses what cannot be; `check` refuses the rest.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from meshwright.cost import presets
from meshwright.errors import LaunchError, did_you_mean

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


OURS_IN_CONTAINER = ("name", "image", "command", "args")
OURS_IN_COMMAND = ("--servers", "--server-state", "--replicas", "--add-to")
OURS_IN_PLAN = ("--cluster", "--output", "-o", "--trace", "--json", "--help", "-h")
OURS_IN_POD = ("containers", "restartPolicy", "hostname", "subdomain")


def read_spec(spec: object) -> Spec:
    """The spec of a ParallelJob. Raises LaunchError for what the API server would refuse, and what it cannot see."""
    try:
        found = msgspec.convert(spec, Spec)
    except msgspec.ValidationError as error:
        raise LaunchError("this is not a ParallelJob", why=str(error).replace("`$", "`spec")) from None
    check(found)
    return found


def check(spec: Spec) -> None:
    """Refuse what a schema cannot express."""
    roles: tuple[tuple[str, Role | None], ...] = (
        ("workers", spec.workers),
        ("servers", spec.servers),
        ("scheduler", spec.scheduler),
        ("plan", spec.plan),
    )
    for role, of in roles:
        for field, given, ours in (
            ()
            if of is None
            else (("container", of.container, OURS_IN_CONTAINER), ("pod", of.pod, OURS_IN_POD))
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
    if spec.workers.gang and spec.workers.queue:
        raise LaunchError(
            "workers.gang and workers.queue are both set",
            why="either a scheduler or Kueue starts all workers or none",
            hint="leave one of them out",
        )
    if not spec.command[0].strip():
        raise LaunchError("command begins with an empty string", hint="command: [train.py]")
    _check_independent(spec)
    if spec.servers is not None:
        _check_servers(spec.servers, spec.command)
    if spec.plan is not None:
        _check_plan(spec.plan, spec.workers)


def _check_independent(spec: Spec) -> None:
    if spec.workers.independent and spec.servers is None:
        raise LaunchError(
            "workers.independent is set without servers",
            why="what one worker trains reaches the others by servers alone",
            hint="servers: {replicas: 2}",
        )
    if spec.workers.independent and spec.workers.gang:
        raise LaunchError(
            "workers.independent and workers.gang are both set",
            why="workers that start all or none do not come and go one by one",
            hint="leave one of them out",
        )


def _check_servers(servers: Servers, command: list[str]) -> None:
    if servers.copies and servers.replicas == 1:
        raise LaunchError(
            "servers.copies is 1, servers.replicas too",
            why="a copy is on another server, and there is one",
            hint="replicas: 2",
        )
    mounts = servers.container.get("volumeMounts") or []
    paths = [str(m.get("mountPath", "")).rstrip("/") for m in mounts if isinstance(m, dict)]
    if servers.state and not any(f"{servers.state}/".startswith(f"{path}/") for path in paths if path):
        raise LaunchError(
            f"servers.state {servers.state} is in no volume",
            why=f"servers.container.volumeMounts has {', '.join(paths) or 'none'}",
            hint="volumeMounts: [{name: state, mountPath: /state}], and that volume in servers.pod.volumes",
        )
    if wrong := [word for word in _options(command) if word.split("=")[0] in OURS_IN_COMMAND]:
        raise LaunchError(
            f"command has {wrong[0]}, and servers is set",
            why="servers are pods, and not processes beside the workers",
            hint="leave one of them out",
        )


def _check_plan(plan: Planning, workers: Workers) -> None:
    if workers.independent:
        raise LaunchError(
            "workers.independent and plan are both set",
            why="a plan is for a number of ranks, and independent workers come and go one by one",
            hint="leave one of them out",
        )
    ours = [word for word in plan.options if word.split("=")[0] in OURS_IN_PLAN or re.match("-o.", word)]
    if ours:
        raise LaunchError(
            f"plan.options has {ours[0]}",
            why="the operator sets the cluster and reads what the plan's pod prints",
            hint="cluster: h100" if ours[0].startswith("--cluster") else "leave it out",
        )
    if not plan.cluster and not asks_for_gpus(workers):
        raise LaunchError(
            "plan has no cluster, and workers ask for no GPU",
            why="the labels of nodes name the GPU that a worker gets by workers.container.resources.limits",
            hint=f"cluster: cpu, another preset ({', '.join(presets.names())}), or a cluster file",
        )
    preset = plan.cluster.partition(":")[0]
    if preset and not is_file(plan.cluster) and preset.lower() not in (*presets.names(), *presets.ALIASES):
        raise LaunchError(
            f"plan.cluster {plan.cluster!r:.80} is neither a preset nor a cluster file",
            why="a cluster file ends in .yaml or .yml",
            hint=did_you_mean(preset, presets.names()),
        )


def asks_for_gpus(workers: Workers) -> bool:
    """Return whether a worker's container has a limit such as ``nvidia.com/gpu``."""
    resources = workers.container.get("resources")
    limits = resources.get("limits") if isinstance(resources, dict) else None
    return isinstance(limits, dict) and any(str(name).endswith("/gpu") for name in limits)


def is_file(cluster: str) -> bool:
    """Return whether a cluster is a file, and not the name of a preset."""
    return cluster.endswith((".yaml", ".yml"))


def _options(command: list[str]) -> list[str]:
    """The words before the script, and perhaps the script."""
    scripts = [n for n, word in enumerate(command) if word.endswith(".py") or word in ("-m", "--module")]
    return command[: scripts[0]] if scripts else command


def check_name(name: str) -> None:
    """Refuse a name that pods and their service could not have."""
    if len(name) > NAME_CHARACTERS or re.fullmatch(NAME, name) is None:
        raise LaunchError(
            f"{name!r:.80} cannot name a ParallelJob",
            why=f"its pods are named after it: at most {NAME_CHARACTERS} characters of a-z, 0-9 and -, beginning "
            "with a letter",
            hint=re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-0123456789")[:NAME_CHARACTERS],
        )


__all__ = ["Spec", "Status", "check", "check_name", "read_spec"]
