"""Manifests that run a script: of our own resource, or of other controllers, whose pods start it by themselves."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from meshwright.errors import LaunchError, did_you_mean
from meshwright.k8s import checks
from meshwright.k8s import resource as r

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """`command`: the script and its words. `gpus`: of each worker. `queue`: of Kueue, if any. `plan`: the model to plan
    in the cluster, for `cluster`."""

    name: str
    image: str
    command: tuple[str, ...]
    workers: int
    ranks: int = 1
    gpus: int = 0
    queue: str = ""
    servers: int = 0
    plan: str = ""
    cluster: str = ""

    @property
    def resources(self) -> Object:
        return {"resources": {"limits": {"nvidia.com/gpu": self.gpus}}} if self.gpus else {}


def parallel_job(asked: Asked) -> Object:
    """A ParallelJob, which the operator runs."""
    workers = r.Workers(
        replicas=asked.workers, ranks=asked.ranks, container=asked.resources, queue=asked.queue
    )
    servers = r.Servers(replicas=asked.servers) if asked.servers else None
    plan = r.Planning(model=asked.plan, cluster=asked.cluster) if asked.plan or asked.cluster else None
    spec = r.Spec(image=asked.image, command=list(asked.command), workers=workers, servers=servers, plan=plan)
    version, unlabelled = f"{r.GROUP}/{r.VERSION}", replace(asked, queue="")
    return _object(version, r.KIND, unlabelled, msgspec.to_builtins(spec))


def job_set(asked: Asked) -> Object:
    """A JobSet: an indexed job, whose first pod has the scheduler. Its secret has to be made before."""
    pod = f"{asked.name}-worker-0-0.{asked.name}"  # SET-JOB-REPLICA-INDEX.SUBDOMAIN
    command = ["meshwright", "run", "--nnodes", str(asked.workers), "--nproc", str(asked.ranks)]
    command += ["--node-rank", "$(JOB_COMPLETION_INDEX)", "--master", f"{pod}:29400", *asked.command]
    secret = {"secretKeyRef": {"name": asked.name, "key": "secret"}}
    container = {"name": "worker", "image": asked.image, "command": command, **asked.resources}
    container["env"] = [{"name": "MESHWRIGHT_SECRET", "valueFrom": secret}]
    job = {
        "parallelism": asked.workers,
        "completions": asked.workers,
        "completionMode": "Indexed",
        "backoffLimit": 6,
        "template": {"spec": {"restartPolicy": "OnFailure", "containers": [container]}},
    }
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": asked.name},
        "failurePolicy": {"maxRestarts": 3},
        "replicatedJobs": [{"name": "worker", "replicas": 1, "template": {"spec": job}}],
    }
    return _object("jobset.x-k8s.io/v1alpha2", "JobSet", asked, spec)


def train_job(asked: Asked) -> Object:
    """A TrainJob of Kubeflow Trainer, with its runtime for torchrun."""
    trainer = {
        "image": asked.image,
        "command": ["torchrun", *asked.command],
        "numNodes": asked.workers,
        "numProcPerNode": asked.ranks,
        **({"resourcesPerNode": asked.resources["resources"]} if asked.gpus else {}),
    }
    spec = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}
    return _object("trainer.kubeflow.org/v1alpha1", "TrainJob", asked, spec)


def pytorch_job(asked: Asked) -> Object:
    """A PyTorchJob of Kubeflow's training operator, with torchrun."""
    container = {
        "name": "pytorch",
        "image": asked.image,
        "command": ["torchrun", *asked.command],
        **asked.resources,
    }

    def role(replicas: int) -> Object:
        return {
            "replicas": replicas,
            "restartPolicy": "OnFailure",
            "template": {"spec": {"containers": [container]}},
        }

    roles = {"Master": role(1)} | ({"Worker": role(asked.workers - 1)} if asked.workers > 1 else {})
    spec = {"nprocPerNode": str(asked.ranks), "pytorchReplicaSpecs": roles}
    return _object("kubeflow.org/v1", "PyTorchJob", asked, spec)


def ray_job(asked: Asked) -> Object:
    """A RayJob of KubeRay, whose entry point starts `meshwright run` in each worker. The image needs Ray as well."""
    command = ["python", "-m", "meshwright.launch.on_ray", "--nnodes", str(asked.workers)]
    command += ["--nproc", str(asked.ranks), *(["--gpus", str(asked.gpus)] if asked.gpus else [])]
    container = {"image": asked.image, "imagePullPolicy": "IfNotPresent"}
    worker = {"name": "ray-worker", **container, **asked.resources}
    spec = {
        "entrypoint": shlex.join([*command, *asked.command]),
        "shutdownAfterJobFinishes": True,
        "rayClusterSpec": {
            "headGroupSpec": {
                "rayStartParams": {"num-cpus": "0"},  # it runs the entry point, and no rank
                "template": {"spec": {"containers": [{"name": "ray-head", **container}]}},
            },
            "workerGroupSpecs": [
                {
                    "groupName": "worker",
                    "replicas": asked.workers,
                    "minReplicas": asked.workers,
                    "maxReplicas": asked.workers,
                    "rayStartParams": {},
                    "template": {"spec": {"containers": [worker]}},
                }
            ],
        },
    }
    return _object("ray.io/v1", "RayJob", asked, spec)


CONTROLLERS = {
    "meshwright": parallel_job,
    "jobset": job_set,
    "trainjob": train_job,
    "pytorchjob": pytorch_job,
    "rayjob": ray_job,
}


def manifest(asked: Asked, controller: str = "meshwright") -> Object:
    """The manifest for a controller. Raises LaunchError for what no controller would take."""
    if controller not in CONTROLLERS:
        raise LaunchError(
            f"--for is {controller!r}",
            why=f"it must be one of {', '.join(CONTROLLERS)}",
            hint=did_you_mean(controller, list(CONTROLLERS)),
        )
    checks.check_name(asked.name)
    if asked.gpus < 0:
        raise LaunchError(f"--gpus is {asked.gpus}", why="it must be at least 0")
    for option, given in (("--servers", asked.servers), ("--plan", asked.plan), ("--cluster", asked.cluster)):
        if given and controller != "meshwright":
            raise LaunchError(
                f"{option} is for our own resource",
                why=f"{controller} has no such role",
                hint="--for meshwright",
            )
    checks.read_spec(parallel_job(asked)["spec"])  # the limits are the same for all of them
    return CONTROLLERS[controller](asked)


def _object(version: str, kind: str, asked: Asked, spec: Object) -> Object:
    labels = {"labels": {"kueue.x-k8s.io/queue-name": asked.queue}} if asked.queue else {}
    return {"apiVersion": version, "kind": kind, "metadata": {"name": asked.name, **labels}, "spec": spec}


__all__ = ["CONTROLLERS", "Asked", "manifest"]
