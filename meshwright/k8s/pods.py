"""The objects that a job consists of: a secret, a service, the scheduler's pod, and one pod for each worker.

Workers that have to start together are a PodGroup of scheduler-plugins.
"""

from __future__ import annotations

from typing import Any

from meshwright.k8s import resource as r

JOB, ROLE, INDEX, ROUND = (f"{r.GROUP}/{name}" for name in ("job", "role", "index", "round"))
STATE = "/var/lib/meshwright"  # in the scheduler's pod: it outlives the container, not the pod
STOP_SECONDS = 25  # of the 30 that a pod has to end: long enough to save a checkpoint at a step border
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


def shared(owner: Owner, spec: r.Spec, round: int, value: str) -> list[Object]:
    """What is made before the pods of a round. `value`: of the secret, if there is none yet."""
    groups = [pod_group(owner, spec, round)] if spec.workers.gang else []
    return [secret(owner, value), service(owner), *groups]


def pod_group(owner: Owner, spec: r.Spec, round: int) -> Object:
    """The group whose pods start together."""
    return {
        "apiVersion": POD_GROUPS,
        "kind": "PodGroup",
        "metadata": owner.metadata(group_name(owner.name, round)),
        "spec": {"minMember": spec.workers.replicas},
    }


def group_name(job: str, round: int) -> str:
    """Of the workers of a round: the next one may have another number of them."""
    return f"{job}-{round}"


def secret(owner: Owner, value: str) -> Object:
    """What every process of the job proves to know; TLS is made from it at the start of the scheduler."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": owner.metadata(owner.name),
        "stringData": {"secret": value},
    }


def service(owner: Owner) -> Object:
    """Gives each pod the name POD.JOB.NAMESPACE.svc."""
    spec = {"clusterIP": "None", "selector": {JOB: owner.name}, "publishNotReadyAddresses": True}
    return {"apiVersion": "v1", "kind": "Service", "metadata": owner.metadata(owner.name), "spec": spec}


def scheduler_name(job: str) -> str:
    return f"{job}-scheduler"


def worker_name(job: str, index: int) -> str:
    return f"{job}-worker-{index}"


def scheduler(owner: Owner, spec: r.Spec, round: int) -> Object:
    """The scheduler's pod. A container that fails starts again in it, and goes on from its state."""
    command = ["meshwright", "scheduler", "--nnodes", str(spec.workers.replicas)]
    command += ["--max-restarts", str(spec.backoff_limit), "--state", STATE]
    env = [
        {"name": "MS_SCHED_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "MS_SCHED_PORT", "value": str(spec.scheduler.port)},
    ]
    pod = _pod(owner, spec, spec.scheduler, scheduler_name(owner.name), r.SCHEDULER, 0, round, command, env)
    pod["spec"]["restartPolicy"] = "OnFailure"
    volumes = pod["spec"].setdefault("volumes", [])
    volumes.append({"name": "meshwright-state", "emptyDir": {}})
    mounts = pod["spec"]["containers"][0].setdefault("volumeMounts", [])
    mounts.append({"name": "meshwright-state", "mountPath": STATE})
    return pod


def worker(owner: Owner, spec: r.Spec, round: int, index: int, address: str) -> Object:
    """The pod of a worker. `address`: the scheduler's."""
    host = f"[{address}]" if ":" in address else address
    command = [
        "meshwright",
        "run",
        "--nnodes",
        str(spec.workers.replicas),
        "--nproc",
        str(spec.workers.ranks),
    ]
    command += ["--node-id", str(index), "--master", f"{host}:{spec.scheduler.port}", "--cluster-time-out=-1"]
    command += ["--max-restarts", str(spec.backoff_limit), "--grace", str(STOP_SECONDS), "--stop-alone"]
    name = worker_name(owner.name, index)
    pod = _pod(owner, spec, spec.workers, name, r.WORKER, index, round, [*command, *spec.command], [])
    if spec.workers.gang:
        pod["metadata"]["labels"][POD_GROUP] = group_name(owner.name, round)
    return pod


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
    key = {"secretKeyRef": {"name": owner.name, "key": "secret"}}
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
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}


__all__ = [
    "Owner",
    "group_name",
    "pod_group",
    "scheduler",
    "scheduler_name",
    "shared",
    "worker",
    "worker_name",
]
