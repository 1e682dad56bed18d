"""The objects that a job consists of: a secret, a service, and a pod for the scheduler and each server and worker.

Workers that have to start together are a PodGroup of scheduler-plugins, or a group of Kueue. One more pod makes a plan
and prints it; it becomes a ConfigMap in the pods of workers.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec

from meshwright.k8s import resource as r

JOB, ROLE, INDEX, ROUND, PLAN = (f"{r.GROUP}/{name}" for name in ("job", "role", "index", "round", "plan"))
STATE = (
    "/var/lib/meshwright"  # in pods of the scheduler and of servers: it outlives the container, not the pod
)
STOP_SECONDS = 25  # of the 30 that a pod has to end: long enough to save a checkpoint at a step border
SPARE_SECONDS = 5  # of the time that a pod has to end: for its launcher
PLAN_FOLDER, PLAN_FILE = "/etc/meshwright/plan", "plan.json"
PLAN_BEGINS, PLAN_ENDS = "-----BEGIN MESHWRIGHT PLAN-----", "-----END MESHWRIGHT PLAN-----"
KUEUE = "kueue.x-k8s.io"
QUEUE, QUEUE_GROUP, QUEUE_COUNT, QUEUE_RETRIES = (
    f"{KUEUE}/{name}"
    for name in ("queue-name", "pod-group-name", "pod-group-total-count", "retriable-in-group")
)
EVICTED = "TerminationTarget"  # a condition of pods that Kueue ends
POD_GROUPS, POD_GROUP = "scheduling.x-k8s.io/v1alpha1", "scheduling.x-k8s.io/pod-group"
Object = dict[str, Any]


class Owner(r.Record, frozen=True, kw_only=True):
    """A ParallelJob as its objects name it: they are deleted with it."""

    name: str
    namespace: str
    uid: str

    def metadata(self, name: str, **labels: str) -> Object:
        reference = {
            "apiVersion": f"{r.GROUP}/{r.VERSION}",
            "kind": r.KIND,
            "name": self.name,
            "uid": self.uid,
        }
        return {
            "name": name,
            "namespace": self.namespace,
            "labels": {JOB: self.name, **labels},
            "ownerReferences": [{**reference, "controller": True}],
        }


class Place(r.Record, frozen=True, kw_only=True):
    """Where pods of a job meet: `address` is the scheduler's. `servers`: how many the job begins with, 0 for none."""

    address: str
    servers: int = 0

    def at(self, spec: r.Spec) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{spec.scheduler.port}"


def shared(owner: Owner, spec: r.Spec, round: int, value: str) -> list[Object]:
    """What is made before the pods of a round. `value`: of the secret, if there is none yet."""
    groups = [pod_group(owner, spec, round)] if spec.workers.gang else []
    return [secret(owner, value), service(owner), *groups]


def pod_group(owner: Owner, spec: r.Spec, round: int) -> Object:
    """The group whose pods start together."""
    return {
        "apiVersion": POD_GROUPS,
        "kind": "PodGroup",
        "metadata": owner.metadata(group_name(owner, round)),
        "spec": {"minMember": spec.workers.replicas},
    }


def group_name(owner: Owner, round: int) -> str:
    """Of the workers of a round: the next one may have another number of them."""
    return f"{secret_name(owner)}-{round}"


def secret_name(owner: Owner) -> str:
    """Of this job alone: what an earlier one of its name has left will be deleted some time."""
    return f"{owner.name}-{owner.uid[:8]}"


def secret(owner: Owner, value: str) -> Object:
    """What every process of the job proves to know; TLS is made from it at the start of the scheduler."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": owner.metadata(secret_name(owner)),
        "stringData": {"secret": value},
    }


def service(owner: Owner) -> Object:
    """Gives each pod the name POD.JOB.NAMESPACE.svc."""
    spec = {"clusterIP": "None", "selector": {JOB: owner.name}, "publishNotReadyAddresses": True}
    return {"apiVersion": "v1", "kind": "Service", "metadata": owner.metadata(owner.name), "spec": spec}


def scheduler_name(job: str) -> str:
    return f"{job}-scheduler"


def server_name(job: str, index: int) -> str:
    return f"{job}-server-{index}"


def move_name(job: str) -> str:
    return f"{job}-move"


def worker_name(job: str, index: int, again: int = 0) -> str:
    return f"{job}-worker-{index}" + (f"-{again}" if again else "")


def plan_name(job: str) -> str:
    return f"{job}-plan"


def plan_map_name(owner: Owner, revision: str) -> str:
    """Of one plan: pods of the round before keep theirs while another one is made."""
    return f"{secret_name(owner)}-{revision}"


def plan_revision(spec: r.Spec) -> str:
    """Changes with everything that a plan depends on."""
    assert spec.plan is not None
    workers = spec.workers
    where = None if spec.plan.cluster else workers.pod.get("nodeSelector")
    return revision_of(spec.image, spec.plan, workers.replicas, workers.ranks, where)


def revision_of(*parts: object) -> str:
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()[:12]


def planner(owner: Owner, spec: r.Spec, preset: str) -> Object:
    """The pod that makes the plan and prints it. `preset`: of the GPU that nodes have, if the job names no cluster."""
    of = spec.plan
    assert of is not None
    file = f"{STATE}/{PLAN_FILE}"
    script = (
        f'meshwright plan "$@" --output {file} && echo "{PLAN_BEGINS}" && cat {file} && echo "{PLAN_ENDS}"'
    )
    words = [of.model, "--cluster", _cluster(of.cluster or preset, spec.workers), *of.options]
    command = ["sh", "-c", script, "plan", *words]
    pod = _pod(owner, spec, of, plan_name(owner.name), "Plan", 0, 0, command, [])
    pod["metadata"]["labels"][PLAN] = plan_revision(spec)
    container = pod["spec"]["containers"][0]
    container["env"] = [e for e in container["env"] if e["name"] != "MESHWRIGHT_SECRET"]
    _with_volume(pod, "meshwright-state", {"emptyDir": {}}, STATE)
    return pod


def _cluster(name: str, workers: r.Workers) -> str:
    """A cluster as `meshwright plan` takes it: of a preset as many nodes as there are workers."""
    if r.is_file(name):
        return name
    preset, colon, execution = name.partition(":")
    return f"preset:{preset}:{workers.replicas}x{workers.ranks}{colon}{execution}"


def plan_map(owner: Owner, spec: r.Spec, text: str) -> Object:
    """The plan, as a file for the pods of workers."""
    name = plan_map_name(owner, plan_revision(spec))
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": owner.metadata(name),
        "data": {PLAN_FILE: text},
    }


def scheduler(owner: Owner, spec: r.Spec, round: int) -> Object:
    """The scheduler's pod. A container that fails starts again in it, and goes on from its state."""
    nodes = [] if spec.workers.independent else ["--nnodes", str(spec.workers.replicas)]
    command = ["meshwright", "scheduler", *nodes, "--max-restarts", str(spec.backoff_limit), "--state", STATE]
    env = [
        {"name": "MS_SCHED_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "MS_SCHED_PORT", "value": str(spec.scheduler.port)},
    ]
    pod = _pod(owner, spec, spec.scheduler, scheduler_name(owner.name), r.SCHEDULER, 0, round, command, env)
    return _with_state(pod)


def server(owner: Owner, spec: r.Spec, round: int, index: int, place: Place, *, fresh: bool) -> Object:
    """The pod of a parameter server. Its values outlive its container, or its pod. `fresh`: it has had none."""
    of = spec.servers
    assert of is not None
    state = f"{of.state.rstrip('/')}/{owner.name}-{owner.uid}" if of.state else "" if of.copies else STATE
    settings = {
        "host": place.address,
        "port": spec.scheduler.port,
        "node": server_name(owner.name, index),
        "servers": place.servers,
        "number": index,
        "state": state,
        "replicas": of.copies,
        "job": owner.uid,
        "fresh": fresh,
    }
    command = ["python", "-P", "-m", "meshwright.launch.server_by_hand", json.dumps(settings)]
    pod = _pod(owner, spec, of, server_name(owner.name, index), r.SERVER, index, round, command, [])
    return _with_state(pod)


def move(owner: Owner, spec: r.Spec, round: int, count: int, place: Place) -> Object:
    """The pod that spreads the parameters over `count` servers. It may begin again in the middle."""
    assert spec.servers is not None
    command = ["meshwright", "ps", "spread", str(count), "--master", place.at(spec), "--mover", owner.uid]
    env = [{"name": "MS_SERVER_NUM", "value": str(place.servers)}]
    pod = _pod(owner, spec, spec.servers, move_name(owner.name), "Move", count, round, command, env)
    pod["spec"]["restartPolicy"] = "OnFailure"
    return pod


def worker(owner: Owner, spec: r.Spec, round: int, index: int, place: Place, again: int = 0) -> Object:
    """The pod of a worker. `again`: part of its name, and not of its host name."""
    of, at = spec.workers, place.at(spec)
    command = ["meshwright", "run", "--nproc", str(of.ranks)]
    if of.independent:
        command += ["--add-to", at, "--node-rank", str(index), "--on-failure", "continue"]
    else:
        command += ["--nnodes", str(of.replicas), "--node-id", str(index), "--master", at]
        # with hostNetwork, a worker may have the address of the scheduler's pod
        command += ["--cluster-time-out=-1", "--stop-alone", "--no-scheduler"]
    command += ["--max-restarts", str(spec.backoff_limit), "--grace", str(_grace(of))]
    env = [{"name": "MS_SERVER_NUM", "value": str(place.servers)}] if place.servers else []
    name = worker_name(owner.name, index)
    pod = _pod(owner, spec, of, name, r.WORKER, index, round, [*command, *spec.command], env)
    if spec.plan is not None:
        source = {"name": plan_map_name(owner, plan_revision(spec))}
        _with_volume(pod, "meshwright-plan", {"configMap": source}, PLAN_FOLDER)
        variable = {"name": "MESHWRIGHT_PLAN", "value": f"{PLAN_FOLDER}/{PLAN_FILE}"}
        pod["spec"]["containers"][0]["env"].append(variable)
    pod["metadata"]["name"] = worker_name(owner.name, index, again)
    if of.gang:
        pod["metadata"]["labels"][POD_GROUP] = group_name(owner, round)
    if of.queue:
        _queue(pod, of, group_name(owner, round))
    return pod


def _grace(workers: r.Workers) -> int:
    """How long ranks may take to stop."""
    given = workers.pod.get("terminationGracePeriodSeconds")
    return max(given - SPARE_SECONDS, 1) if isinstance(given, int) else STOP_SECONDS


def _queue(pod: Object, workers: r.Workers, group: str) -> None:
    """Let a pod wait in a queue of Kueue, whose webhook adds the scheduling gate and a finalizer.

    A group in which nothing may be retried is over for Kueue when all of its pods have ended. Else the finalizer would
    keep them for ever.
    """
    metadata = pod["metadata"]
    metadata["labels"][QUEUE] = workers.queue
    if not workers.independent:
        metadata["labels"][QUEUE_GROUP] = group
        ours = {QUEUE_COUNT: str(workers.replicas), QUEUE_RETRIES: "false"}
        metadata["annotations"] = {**metadata.get("annotations", {}), **ours}


def _with_state(pod: Object) -> Object:
    """A pod with a folder that outlives its container, which starts again when it fails."""
    pod["spec"]["restartPolicy"] = "OnFailure"
    _with_volume(pod, "meshwright-state", {"emptyDir": {}}, STATE)
    return pod


def _with_volume(pod: Object, name: str, source: Object, path: str) -> None:
    """Add a volume to a pod, and mount it in its container."""
    pod["spec"].setdefault("volumes", []).append({"name": name, **source})
    mounts = pod["spec"]["containers"][0].setdefault("volumeMounts", [])
    mounts.append({"name": name, "mountPath": path})


def _pod(
    owner: Owner,
    spec: r.Spec,
    role: r.Role,
    name: str,
    kind: str,
    index: int,
    round: int,
    command: list[str],
    env: list[Object],
) -> Object:
    key = {"secretKeyRef": {"name": secret_name(owner), "key": "secret"}}
    given = dict(role.container)
    container = {
        "securityContext": {"allowPrivilegeEscalation": False},
        **given,
        "name": "meshwright",
        "image": spec.image,
        "command": command,
        "env": [*given.get("env", []), {"name": "MESHWRIGHT_SECRET", "valueFrom": key}, *env],
    }
    if "volumeMounts" in container:
        container["volumeMounts"] = [*container["volumeMounts"]]
    pod = {
        "automountServiceAccountToken": False,  # a worker has no business with the API server
        "enableServiceLinks": False,
        **role.pod,
        "restartPolicy": "Never",
        "hostname": name,
        "subdomain": owner.name,
        "containers": [container],
    }
    if "volumes" in pod:
        pod["volumes"] = [*pod["volumes"]]
    metadata = owner.metadata(name, **{ROLE: kind.lower(), INDEX: str(index), ROUND: str(round)})
    metadata["labels"] = {**role.metadata.labels, **metadata["labels"]}
    if role.metadata.annotations:
        metadata["annotations"] = dict(role.metadata.annotations)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}


__all__ = [
    "Owner",
    "Place",
    "group_name",
    "move",
    "move_name",
    "plan_map",
    "plan_map_name",
    "plan_name",
    "plan_revision",
    "planner",
    "pod_group",
    "revision_of",
    "scheduler",
    "scheduler_name",
    "secret_name",
    "server",
    "server_name",
    "shared",
    "worker",
    "worker_name",
]
