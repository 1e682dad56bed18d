"""A job of MindSpore's operator (MSJob) as a ParallelJob. What has no counterpart is refused by its name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from typing import Any

import msgspec

from meshwright.errors import LaunchError
from meshwright.k8s import resource as r

Object = dict[str, Any]
SHELLS = ("sh", "bash", "/bin/sh", "/bin/bash", "/usr/bin/bash")
PYTHON = re.compile(r"(\S*/)?python3?(\.\d+)?")
ROLES = ("Scheduler", "PS", "Worker")
RESTART = {"Always": "OnFailure", "OnFailure": "OnFailure", "ExitCode": "OnFailure", "Never": "Never"}
SUCCESS = {"": "AnyWorker", "AllWorkers": "AllWorkers"}


def convert(job: object) -> Object:
    """The ParallelJob of an MSJob. Raises LaunchError."""
    if not isinstance(job, dict) or job.get("kind") != "MSJob":
        found = job.get("kind") if isinstance(job, dict) else type(job).__name__
        raise LaunchError(f"this is no MSJob but {found!r:.40}", hint="a file with kind: MSJob")
    metadata, spec = _record(job, "metadata"), _record(job, "spec")
    _only(spec, ("runPolicy", "successPolicy", "msReplicaSpecs"), "spec")
    name = str(metadata.get("name", ""))
    r.check_name(name)
    roles = _record(spec, "msReplicaSpecs", "spec")
    _only(roles, ROLES, "spec.msReplicaSpecs")
    if "Worker" not in roles:
        raise LaunchError("spec.msReplicaSpecs has no Worker", why="a job has at least one")
    worker, image, command = _role(roles, "Worker")
    replicas = _count(roles, "Worker")
    if servers := _count(roles, "PS"):
        if servers % replicas:
            raise LaunchError(
                f"spec.msReplicaSpecs has {servers} PS beside {replicas} workers",
                why="parameter servers run beside the ranks of a worker, and all pods of a role are equal",
                hint="as many PS for each worker: a multiple of the number of workers",
            )
        command = ["--servers", str(servers // replicas), *command]
    restart = str(roles["Worker"].get("restartPolicy", "OnFailure"))
    converted: Object = {
        "image": image,
        "command": command,
        "workers": {
            "replicas": replicas,
            "restartPolicy": _word(restart, RESTART, "restartPolicy"),
            **worker,
        },
        "successPolicy": _word(str(spec.get("successPolicy") or ""), SUCCESS, "successPolicy"),
        **_policies(_record(spec, "runPolicy") if spec.get("runPolicy") else {}),
    }
    if "Scheduler" in roles and (scheduler := _role(roles, "Scheduler")[0]):
        converted["scheduler"] = scheduler
    kept = {k: metadata[k] for k in ("name", "namespace", "labels", "annotations") if k in metadata}
    checked = msgspec.to_builtins(r.read_spec(converted))
    return {"apiVersion": f"{r.GROUP}/{r.VERSION}", "kind": r.KIND, "metadata": kept, "spec": checked}


def _policies(policy: Object) -> Object:
    names = ("cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit")
    if "schedulingPolicy" in policy:
        raise LaunchError(
            "spec.runPolicy has schedulingPolicy",
            why="the operator makes pods one by one; none of its jobs waits for all of its places",
            hint="leave it out; labels and schedulerName of a gang scheduler go into workers.pod",
        )
    _only(policy, names, "spec.runPolicy")
    return {name: policy[name] for name in names if policy.get(name) is not None}


def _role(roles: Object, role: str) -> tuple[Object, str, list[str]]:
    """More fields of a role, its image and its command."""
    where = f"spec.msReplicaSpecs.{role}"
    of = _record(roles, role, "spec.msReplicaSpecs")
    _only(of, ("replicas", "restartPolicy", "template"), where)
    pod = dict(_record(_record(of, "template", where), "spec", f"{where}.template"))
    containers = pod.pop("containers", None)
    if not isinstance(containers, list) or len(containers) != 1 or not isinstance(containers[0], dict):
        raise LaunchError(f"{where} has not one container", why="the job's processes run in one of them")
    container = dict(containers[0])
    for ours in ("name", "ports"):
        container.pop(ours, None)
    image = str(container.pop("image", ""))
    command = _words([*(container.pop("command", None) or []), *(container.pop("args", None) or [])], where)
    for ours in ("restartPolicy", "hostname", "subdomain"):
        pod.pop(ours, None)
    more = {name: value for name, value in (("container", container), ("pod", pod)) if value}
    return more, image, command


def _words(command: list[Any], where: str) -> list[str]:
    """The script and its words, of ``python X …`` or ``bash -c "python X …"``."""
    words = [str(word) for word in command]
    if len(words) == 3 and words[0] in SHELLS and re.fullmatch(r"-\w*c", words[1]):
        script = words[2].strip()
        if re.search(r"[;&|<>`$\n*?~(){}]", script):
            raise LaunchError(
                f"the command of {where} is a program of a shell: {script!r:.80}",
                why="workers start one Python script",
                hint="put the script and its words into command, and the rest into the image",
            )
        words = shlex.split(script)
    if not words or PYTHON.fullmatch(words[0]) is None:
        raise LaunchError(
            f"the command of {where} is {' '.join(words)!r:.80}",
            why="workers start a Python script",
            hint='command: [python, train.py], or [bash, -c, "python train.py"]',
        )
    words = words[1:]
    while words and words[0] in ("-s", "-u", "-B", "-E"):  # options of the interpreter that change no result
        words = words[1:]
    if not words or (words[0].startswith("-") and words[0] != "-m"):
        raise LaunchError(f"the command of {where} names no script", hint="command: [python, train.py]")
    return words


def _count(roles: Object, role: str) -> int:
    count = roles[role].get("replicas", 1) if role in roles else 0
    if not isinstance(count, int):
        raise LaunchError(f"spec.msReplicaSpecs.{role}.replicas is {count!r}", why="it is a whole number")
    return count


def _word(value: str, known: dict[str, str], field: str) -> str:
    if value not in known:
        raise LaunchError(f"{field} is {value!r}", why=f"it is one of {', '.join(map(repr, known))}")
    return known[value]


def _record(of: Object, field: str, where: str = "") -> Object:
    found = of.get(field)
    if not isinstance(found, dict):
        raise LaunchError(f"{where + '.' if where else ''}{field} is {found!r:.40}", why="it is a record")
    return found


def _only(of: Iterable[str], known: tuple[str, ...], where: str) -> None:
    for field in of:
        if field not in known:
            raise LaunchError(f"{where} has {field}", why=f"what is known: {', '.join(known)}")


__all__ = ["convert"]
