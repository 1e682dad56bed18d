"""Refuse a job that cannot be, with the field and what to write in its place: what no schema of the API server can."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from meshwright.cost import presets
from meshwright.errors import LaunchError, did_you_mean
from meshwright.k8s import command
from meshwright.k8s import pods as p
from meshwright.k8s import resource as r

OURS_IN_CONTAINER = ("name", "image", "command", "args")
OURS_IN_PLAN = ("--cluster", "--output", "-o", "--trace", "--json", "--help", "-h")
OURS_IN_METADATA = {
    **dict.fromkeys((p.QUEUE, p.QUEUE_GROUP, p.QUEUE_COUNT, p.QUEUE_RETRIES), "workers.queue"),
    p.POD_GROUP: "workers.gang",
}
OURS_IN_POD = ("containers", "restartPolicy", "hostname", "subdomain")


def read_spec(spec: object) -> r.Spec:
    """The spec of a ParallelJob. Raises LaunchError for what the API server would refuse, and what it cannot see."""
    try:
        found = msgspec.convert(spec, r.Spec)
    except msgspec.ValidationError as error:
        raise LaunchError("this is not a ParallelJob", why=str(error).replace("`$", "`spec")) from None
    check(found)
    return found


def check(spec: r.Spec) -> None:
    """Refuse what a schema cannot express."""
    for name, role in roles(spec):
        _check_role(name, role)
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
    command.check(spec)
    _check_independent(spec)
    if spec.servers is not None:
        _check_servers(spec.servers)
    if spec.plan is not None:
        _check_plan(spec.plan, spec.workers)


def roles(spec: r.Spec) -> Iterator[tuple[str, r.Role]]:
    """The roles of a job, by the names of their fields."""
    for name in ("workers", "servers", "scheduler", "plan"):
        if (role := getattr(spec, name)) is not None:
            yield name, role


def _check_role(name: str, role: r.Role) -> None:
    for field, given, ours in (
        ("container", role.container, OURS_IN_CONTAINER),
        ("pod", role.pod, OURS_IN_POD),
    ):
        if wrong := [key for key in given if key in ours]:
            raise LaunchError(
                f"{name}.{field} has {wrong[0]}",
                why="the operator sets it",
                hint="image and command of the job; other fields of a pod and its container stay as they are given",
            )
    _check_env(name, role)
    for field, given in (("labels", role.metadata.labels), ("annotations", role.metadata.annotations)):
        if wrong := [key for key in given if key.startswith(f"{r.GROUP}/") or key in OURS_IN_METADATA]:
            raise LaunchError(
                f"{name}.metadata.{field} has {wrong[0]}",
                why="the operator sets it",
                hint=OURS_IN_METADATA.get(wrong[0], "leave it out"),
            )


def _check_env(name: str, role: r.Role) -> None:
    """Refuse numbers and booleans, as YAML reads them: the API server names neither the field nor the quotes."""
    variables = role.container.get("env")
    for number, variable in enumerate(variables if isinstance(variables, list) else ()):
        value = variable.get("value", "") if isinstance(variable, dict) else ""
        if not isinstance(value, str):
            shown = str(value).lower() if isinstance(value, bool) else value
            raise LaunchError(
                f"{name}.container.env[{number}].value is {shown}",
                why="values of variables are strings",
                hint=f'value: "{shown}"',
            )


def _check_independent(spec: r.Spec) -> None:
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


def _check_servers(servers: r.Servers) -> None:
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


def _check_plan(plan: r.Planning, workers: r.Workers) -> None:
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
    if not plan.cluster and not r.asks_for_gpus(workers):
        raise LaunchError(
            "plan has no cluster, and workers ask for no GPU",
            why="the labels of nodes name the GPU that a worker gets by workers.container.resources.limits",
            hint=f"cluster: cpu, another preset ({', '.join(presets.names())}), or a cluster file",
        )
    preset = plan.cluster.partition(":")[0]
    if preset and not r.is_file(plan.cluster) and preset.lower() not in (*presets.names(), *presets.ALIASES):
        raise LaunchError(
            f"plan.cluster {plan.cluster!r:.80} is neither a preset nor a cluster file",
            why="a cluster file ends in .yaml or .yml",
            hint=did_you_mean(preset, presets.names()),
        )


def check_name(name: str) -> None:
    """Refuse a name that pods and their service could not have."""
    if len(name) > r.NAME_CHARACTERS or re.fullmatch(r.NAME, name) is None:
        raise LaunchError(
            f"{name!r:.80} cannot name a ParallelJob",
            why=f"its pods are named after it: at most {r.NAME_CHARACTERS} characters of a-z, 0-9 and -, beginning "
            "with a letter",
            hint=re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-0123456789")[: r.NAME_CHARACTERS],
        )


__all__ = ["check_name", "read_spec", "roles"]
