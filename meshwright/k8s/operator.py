"""The operator: kopf watches, and each job has one task that reads, decides, and does.

An event only wakes the task of its job, which reads everything anew: nothing is remembered between two turns but when
the log was read. Nothing is registered in the objects either, so a job can be deleted while no operator runs.
"""

# pyright: reportMissingImports=false
# kopf and aiohttp come with the extra k8s.

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kopf
import msgspec
from msgspec.structs import replace

from meshwright.k8s import decide as d
from meshwright.k8s import observed
from meshwright.k8s import pods as p
from meshwright.k8s import resource as r
from meshwright.k8s.api import Api, Refused, connect

PROGRESS_SECONDS = 5.0
LOG_LINES = 200
RETRY_SECONDS = (0.1, 1.0, 5.0, 15.0)  # after an error
TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")  # replaced about hourly
log = logging.getLogger("meshwright.k8s")


@dataclass
class Followed:
    """A job that has a task. `read_at`: when its log was read."""

    woken: asyncio.Event = field(default_factory=asyncio.Event)
    read_at: float = 0.0
    task: asyncio.Task[None] | None = None


class Operator:
    """Follows all jobs of one API server."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self._jobs: dict[tuple[str, str], Followed] = {}

    def wake(self, namespace: str, name: str) -> None:
        """Something has happened to a job, or to a pod of it."""
        key = (namespace, name)
        if key not in self._jobs:
            followed = self._jobs[key] = Followed()
            followed.task = asyncio.create_task(self._follow(key, followed), name=f"{namespace}/{name}")
        self._jobs[key].woken.set()

    async def close(self) -> None:
        tasks = [f.task for f in self._jobs.values() if f.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.api.close()

    async def _follow(self, key: tuple[str, str], followed: Followed) -> None:
        failures, again = 0, None
        while True:
            wait = None if again is None else max(0.0, again - time.time())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(followed.woken.wait(), wait)
            followed.woken.clear()
            try:
                found = await self.turn(*key, followed)
                failures = 0
            except Exception as error:
                conflict = isinstance(error, Refused) and error.status == 409
                (log.debug if conflict else log.warning)("%s/%s: %s", *key, error)
                found = time.time() + RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)]
                failures += not conflict
            if found is False:
                self._jobs.pop(key, None)
                if followed.woken.is_set():
                    self.wake(*key)
                return
            again = found

    async def turn(self, namespace: str, name: str, followed: Followed) -> float | bool | None:
        """Look at a job once. Returns when to look again, None: at the next event, False: never, it is gone."""
        object = await self.api.job(namespace, name)
        if object is None:
            return False
        if "deletionTimestamp" in object["metadata"]:
            return None
        job = observed.job(object)
        pods = [observed.pod(pod) for pod in await self.api.pods(namespace, f"{p.JOB}={name}")]
        lost: dict[str, float] = {}
        for node in observed.unsure(pods):
            since = observed.lost_since(await self.api.node(node))
            if since is not None:
                lost[node] = since
        job, read_again = await self._with_progress(job, pods, followed)
        decision = d.decide(job, pods, lost, time.time())
        before = object.get("status") or {}
        if (status := msgspec.to_builtins(decision.status)) != before:
            await self.api.write_status(object, status)
        try:
            await self._do(job, decision.actions)
        except Refused as error:
            await self._say(namespace, name, str(error))
            return time.time() + RETRY_SECONDS[-1]
        return min((t for t in (decision.again, read_again) if t is not None), default=None)

    async def _do(self, job: d.Job, actions: tuple[d.Action, ...]) -> None:
        """Deletions first, since a pod may have the name of another one; then what is new."""
        owner, spec = job.owner, job.spec
        gone = [a for a in actions if isinstance(a, d.Delete)]
        for pod in gone:
            log.info("%s/%s: delete %s%s", owner.namespace, owner.name, pod.name, " now" if pod.now else "")
        await asyncio.gather(*(self.api.delete_pod(owner.namespace, a.name, a.uid, now=a.now) for a in gone))
        made: list[Any] = []
        for action in actions:
            match action:
                case d.DeleteJob():
                    await self.api.delete_job(owner.namespace, owner.name, owner.uid)
                case d.CreateShared() if spec is not None:
                    for shared in p.shared(owner, spec, action.round, secrets.token_urlsafe(32)):
                        await self.api.create(shared)
                case d.CreateScheduler() if spec is not None:
                    made.append(p.scheduler(owner, spec, action.round))
                case d.CreateWorker() if spec is not None:
                    made.append(p.worker(owner, spec, action.round, action.index, action.address))
        for object in made:
            log.info("%s/%s: create %s", owner.namespace, owner.name, object["metadata"]["name"])
        await asyncio.gather(*map(self.api.create, made))

    async def _say(self, namespace: str, name: str, message: str) -> None:
        """Write into the status what the API server says of the job's pods."""
        object = await self.api.job(namespace, name)
        if object is None:
            return
        job = observed.job(object)
        status = d.refused(job.status, message, time.time())
        if (new := msgspec.to_builtins(status)) != object.get("status"):
            await self.api.write_status(object, new)

    async def _with_progress(
        self, job: d.Job, pods: list[d.Pod], followed: Followed
    ) -> tuple[d.Job, float | None]:
        """The job with the step and the loss that the log of its first worker names, and when to read it again."""
        name = p.worker_name(job.owner.name, 0)
        first = next(
            (pod for pod in pods if pod.name == name and pod.phase in ("Running", "Succeeded")), None
        )
        if first is None or job.status.completion_time:
            return job, None
        if first.phase == "Running" and time.time() < followed.read_at + PROGRESS_SECONDS:
            return job, followed.read_at + PROGRESS_SECONDS
        followed.read_at = time.time()
        try:
            found = observed.progress(await self.api.log(job.owner.namespace, name, LOG_LINES))
        except Refused:
            found = None
        if found is not None:
            job = replace(job, status=replace(job.status, step=found[0], loss=found[1]))
        return job, followed.read_at + PROGRESS_SECONDS


def login(*, settings: kopf.OperatorSettings, **_: Any) -> kopf.ConnectionInfo | None:
    """The API server of KUBECONFIG or ~/.kube/config, else that of the cluster around this pod."""
    return kopf.login_with_kubeconfig(settings=settings) or kopf.login_with_service_account(settings=settings)


def run(namespaces: tuple[str, ...] = (), liveness: str | None = None) -> None:
    """Run until a signal comes. `namespaces`: empty for all of them."""
    registry, operators = kopf.OperatorRegistry(), list[Operator]()
    kopf.on.login(registry=registry)(login)

    @kopf.on.startup(registry=registry)
    async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.posting.enabled = False  # conditions say it, and fewer rights are needed
        settings.scanning.disabled = True
        info = login(settings=settings)
        if info is None:
            raise kopf.PermanentError("no API server: neither KUBECONFIG nor the account of a pod")
        token = TOKEN if TOKEN.exists() and info.token else None
        operators.append(Operator(connect(info, token)))

    @kopf.on.cleanup(registry=registry)
    async def stop(**_: Any) -> None:
        for operator in operators:
            await operator.close()

    @kopf.on.event(r.GROUP, r.VERSION, r.PLURAL, registry=registry)
    async def job_changed(namespace: str | None, name: str, **_: Any) -> None:
        operators[0].wake(namespace or "", name)

    @kopf.on.event("", "v1", "pods", labels={p.JOB: kopf.PRESENT}, registry=registry)
    async def pod_changed(namespace: str | None, labels: Mapping[str, str], **_: Any) -> None:
        operators[0].wake(namespace or "", labels[p.JOB])

    asyncio.run(
        kopf.operator(
            registry=registry,
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
            liveness_endpoint=liveness,
        )
    )


__all__ = ["Operator", "run"]
