"""A job of MindSpore's operator (MSJob) as a ParallelJob. What has no counterpart is refused by its name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from typing import Any

import msgspec

from meshwright.errors import LaunchError, did_you_mean
from meshwright.k8s import checks, fields
from meshwright.k8s import resource as r

Object = dict[str, Any]
SHELLS = ("sh", "bash", "/bin/sh", "/bin/bash", "/usr/bin/bash")
PYTHON = re.compile(r"(\S*/)?python3?(\.\d+)?")
ROLES = ("Scheduler", "PS", "Worker")
RESTART = {"Always": "OnFailure", "OnFailure": "OnFailure", "ExitCode": "OnFailure", "Never": "Never"}
OPTIONS = {"-u": "", "-B": "PYTHONDONTWRITEBYTECODE", "-s": "PYTHONNOUSERSITE"}  # -u: ranks have it anyway
PORT = "msjob-port"  # of MindSpore's scheduler; ours is scheduler.port
KEPT = ("name", "namespace", "labels", "annotations")
BY_SERVER = ("creationTimestamp", "generation", "managedFields", "resourceVersion", "selfLink", "uid")
CLEAN = {policy: policy for policy in ("Running", "All", "None")}
SUCCESS = {"": "AnyWorker", "AllWorkers": "AllWorkers"}


def convert(job: object) -> Object:
    """The ParallelJob of an MSJob. Raises LaunchError."""
    if not isinstance(job, dict) or job.get("kind") != "MSJob":
        found = job.get("kind") if isinstance(job, dict) else type(job).__name__
        raise LaunchError(f"this is not an MSJob but {found!r:.40}", hint="a file with kind: MSJob")
    _only(job, ("apiVersion", "kind", "metadata", "spec", "status"), "the MSJob")
    metadata, spec = _record(job, "metadata"), _record(job, "spec")
    _only(metadata, (*KEPT, *BY_SERVER), "metadata")
    _only(spec, ("runPolicy", "successPolicy", "msReplicaSpecs"), "spec")
    name = str(metadata.get("name", ""))
    checks.check_name(name)
    roles = _record(spec, "msReplicaSpecs", "spec")
    _only(roles, ROLES, "spec.msReplicaSpecs")
    if "Worker" not in roles:
        raise LaunchError("spec.msReplicaSpecs has no Worker", why="a job has at least one")
    worker, image, command = _role(roles, "Worker")
    replicas = _count(roles, "Worker")
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
    if servers := _count(roles, "PS"):
        more, *rest = _role(roles, "PS")
        _as_workers("PS", rest == [image, command], roles)
        converted["servers"] = {"replicas": servers, **more}
    if "Scheduler" in roles:
        if _count(roles, "Scheduler") != 1:
            raise LaunchError(
                "spec.msReplicaSpecs.Scheduler.replicas is not 1", why="a job has one scheduler"
            )
        more, *rest = _role(roles, "Scheduler")
        _as_workers("Scheduler", rest == [image, command], roles)
        if more:
            converted["scheduler"] = more
    kept = {k: metadata[k] for k in KEPT if k in metadata}
    checked = checks.read_spec(converted)
    known = fields.published()
    fields.check(checked, known.types, f"Kubernetes {known.release}")
    made = msgspec.to_builtins(checked)
    return {"apiVersion": f"{r.GROUP}/{r.VERSION}", "kind": r.KIND, "metadata": kept, "spec": made}


def _as_workers(role: str, same: bool, roles: Object) -> None:
    """Refuse a role that differs from the workers in what a job has once."""
    if not same:
        raise LaunchError(
            f"spec.msReplicaSpecs.{role} has another image or command than Worker",
            why="both are those of the job",
            hint="the image and the command of the Worker",
        )
    given, workers = (roles[of].get("restartPolicy") for of in (role, "Worker"))
    if given not in (None, workers):
        raise LaunchError(
            f"spec.msReplicaSpecs.{role}.restartPolicy is {given!r}, and that of Worker {workers!r}",
            why="a job has one policy, workers.restartPolicy",
            hint="leave it out, or give both the same one",
        )


def _policies(policy: Object) -> Object:
    names = ("cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit")
    if "schedulingPolicy" in policy:
        raise LaunchError(
            "spec.runPolicy has schedulingPolicy",
            why="another scheduler or Kueue starts all workers or none",
            hint="leave it out, and set workers.gang or workers.queue in what is printed",
        )
    _only(policy, names, "spec.runPolicy")
    given = {name: policy[name] for name in names if policy.get(name) is not None}
    if "cleanPodPolicy" in given:
        _word(str(given["cleanPodPolicy"]), CLEAN, "spec.runPolicy.cleanPodPolicy")
    return given


def _role(roles: Object, role: str) -> tuple[Object, str, list[str]]:
    """More fields of a role, its image and its command."""
    where = f"spec.msReplicaSpecs.{role}"
    of = _record(roles, role, "spec.msReplicaSpecs")
    _only(of, ("replicas", "restartPolicy", "template"), where)
    template = _record(of, "template", where)
    _only(template, ("metadata", "spec"), f"{where}.template")
    metadata = _record(template, "metadata", f"{where}.template") if template.get("metadata") else {}
    metadata = {name: value for name, value in metadata.items() if value and name not in BY_SERVER}
    _only(metadata, ("labels", "annotations"), f"{where}.template.metadata")
    pod = dict(_record(template, "spec", f"{where}.template"))
    if pod.pop("restartPolicy", of.get("restartPolicy")) != of.get("restartPolicy"):
        raise LaunchError(
            f"{where}.template.spec.restartPolicy is not {where}.restartPolicy",
            why="only the policy of the role counts",
            hint="leave it out of the template",
        )
    for ours in ("hostname", "subdomain"):
        if ours in pod:
            raise LaunchError(
                f"{where}.template.spec has {ours}", why="the operator sets it", hint="leave it out"
            )
    containers = pod.pop("containers", None)
    if not isinstance(containers, list) or len(containers) != 1 or not isinstance(containers[0], dict):
        raise LaunchError(
            f"{where} must have exactly one container", why="the job's processes run in one of them"
        )
    container = dict(containers[0])
    container.pop("name", None)
    ports = container.pop("ports", None) or []
    if kept := [port for port in ports if not (isinstance(port, dict) and port.get("name") == PORT)]:
        container["ports"] = kept
    image = str(container.pop("image", ""))
    words = [*(container.pop("command", None) or []), *(container.pop("args", None) or [])]
    options, command = _words(words, where)
    if variables := [{"name": OPTIONS[o], "value": "1"} for o in options if OPTIONS[o]]:
        container["env"] = [*(container.get("env") or []), *variables]
    given = {"metadata": metadata, "container": container, "pod": pod}
    more = {name: value for name, value in given.items() if value}
    return more, image, command


def _words(command: list[Any], where: str) -> tuple[list[str], list[str]]:
    """Python's options, and the script with its words, of ``python X …`` or ``bash -c "python X …"``."""
    words = [str(word) for word in command]
    if len(words) == 3 and words[0] in SHELLS and re.fullmatch(r"-\w*c", words[1]):
        script = words[2].strip()
        if re.search(r"[;&|<>`$\n*?~(){}]", script):
            raise LaunchError(
                f"the command of {where} is a shell script: {script!r:.80}",
                why="workers start one Python script",
                hint="put the script and its arguments into command, and the rest into the image",
            )
        words = shlex.split(script)
    if not words or PYTHON.fullmatch(words[0]) is None:
        raise LaunchError(
            f"the command of {where} is {' '.join(words)!r:.80}",
            why="workers start a Python script",
            hint='command: [python, train.py], or [bash, -c, "python train.py"]',
        )
    words, options = words[1:], list[str]()
    while words and words[0] in OPTIONS:
        options.append(words.pop(0))
    if words and words[0].startswith("-") and words[0] != "-m":
        raise LaunchError(
            f"the command of {where} has Python's option {words[0]}",
            why=f"only {', '.join(OPTIONS)} and -m have a counterpart",
            hint="a file with that code"
            if words[0] == "-c"
            else "an environment variable of Python, such as PYTHONOPTIMIZE for -O",
        )
    if not words:
        raise LaunchError(f"the command of {where} names no script", hint="command: [python, train.py]")
    return options, words


def _count(roles: Object, role: str) -> int:
    count = roles[role].get("replicas", 1) if role in roles else 0
    if not isinstance(count, int):
        raise LaunchError(
            f"spec.msReplicaSpecs.{role}.replicas is {count!r}", why="it must be a whole number"
        )
    return count


def _word(value: str, known: dict[str, str], field: str) -> str:
    if value not in known:
        raise LaunchError(f"{field} is {value!r}", why=f"it must be one of {', '.join(map(repr, known))}")
    return known[value]


def _record(of: Object, field: str, where: str = "") -> Object:
    found = of.get(field)
    if not isinstance(found, dict):
        raise LaunchError(
            f"{where + '.' if where else ''}{field} is {found!r:.40}", why="it must be a mapping"
        )
    return found


def _only(of: Iterable[str], known: tuple[str, ...], where: str) -> None:
    for field in of:
        if field not in known:
            why = f"known fields: {', '.join(known)}" if known else "it has no counterpart in a ParallelJob"
            meant = did_you_mean(field, known)
            raise LaunchError(
                f"{where} has {field}", why=why, hint=meant if meant.startswith("did") else "leave it out"
            )


__all__ = ["convert"]
