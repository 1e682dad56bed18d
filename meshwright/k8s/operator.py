"""The operator: kopf watches, and each job has one task that reads, decides, and does.

An event only wakes the task of its job, which reads everything anew: nothing is remembered between two turns but when
the log was read. A list from time to time wakes jobs whose events do not come: kopf does not watch a resource that was
installed after its start, or was deleted since. Nothing is registered in the objects either, so a job can be deleted
while no operator runs.
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
from typing import Any

import kopf
import msgspec
from msgspec.structs import replace

from meshwright.errors import LaunchError
from meshwright.k8s import decide as d
from meshwright.k8s import fields, observed, records
from meshwright.k8s import pods as p
from meshwright.k8s import resource as r
from meshwright.k8s.api import Api, Refused, connect, message_of
from meshwright.k8s.conditions import SIGNALS, refused, warnings
from meshwright.k8s.login import TOKEN, login, server
from meshwright.k8s.read_plan import with_plan

PROGRESS_SECONDS = 5.0
LOG_LINES = 200
SEARCH_SECONDS = 10.0
RETRY_SECONDS = (0.1, 1.0, 5.0, 15.0)  # after an error
FIELDS_SECONDS = 60.0  # after so long, a field that is unknown may be one of a newer API server
OLDEST = (1, 20)  # of Kubernetes
log = logging.getLogger("meshwright.k8s")


@dataclass
class Followed:
    """A job that has a task. `uid`: of the job as it was seen last. `read_at`: when its log was read. `refused`: what
    the API server has said of the objects of its `generation`, which are tried again at `retry_at`."""

    woken: asyncio.Event = field(default_factory=asyncio.Event)
    uid: str = ""
    read_at: float = 0.0
    refused: str = ""
    generation: int = 0
    retry_at: float = 0.0
    task: asyncio.Task[None] | None = None


class Operator:
    """Follows all jobs of one API server."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self._jobs: dict[tuple[str, str], Followed] = {}
        self._search: asyncio.Task[None] | None = None
        self._installed = True
        self._fields: tuple[float, fields.Types] = (0.0, {})

    async def greet(self) -> None:
        """Say which API server it is, and learn its fields of pods before the first job comes."""
        name, version = await self.api.version()
        log.info("the API server has Kubernetes %s", name)
        if version and version < OLDEST:
            log.warning("the operator is for Kubernetes %d.%d and newer", *OLDEST)
        self._fields = time.time(), await self._types()

    def wake(self, namespace: str, name: str) -> None:
        """Something has happened to a job, or to a pod of it."""
        key = (namespace, name)
        if key not in self._jobs:
            followed = self._jobs[key] = Followed()
            followed.task = asyncio.create_task(self._follow(key, followed), name=f"{namespace}/{name}")
        self._jobs[key].woken.set()

    def search(self, namespaces: tuple[str, ...]) -> None:
        """Begin to look for jobs from time to time. `namespaces`: empty for all of them."""

        async def go_on() -> None:
            greeted = False
            while True:
                try:
                    await self.find(namespaces)
                    if not greeted:
                        await self.greet()
                    greeted = True
                except Exception as error:
                    log.warning("cannot list jobs: %s", message_of(error))
                await asyncio.sleep(SEARCH_SECONDS)

        self._search = asyncio.create_task(go_on(), name="search")

    async def find(self, namespaces: tuple[str, ...] = ()) -> None:
        """Wake the jobs that are new, changed or gone since they were seen."""
        lists = [await self.api.jobs(namespace) for namespace in namespaces or ("",)]
        found = {
            (o["metadata"]["namespace"], o["metadata"]["name"]): o["metadata"]
            for objects in lists
            for o in objects or ()
        }
        if None in lists:
            if self._installed:
                log.warning(
                    "the cluster has no %s.%s: kubectl apply -f deploy/crd.yaml installs it; looking for it every "
                    "%.0f s", r.PLURAL, r.GROUP, SEARCH_SECONDS,
                )  # fmt: skip
            self._installed = False
            return
        if not self._installed:
            log.info("the cluster has %s.%s now", r.PLURAL, r.GROUP)
        self._installed = True
        for key in found.keys() | self._jobs.keys():
            seen, now = self._jobs.get(key), found.get(key, {})
            if seen is None or (seen.uid, seen.generation) != (now.get("uid"), now.get("generation")):
                self.wake(*key)

    async def close(self) -> None:
        tasks = [f.task for f in self._jobs.values() if f.task is not None]
        tasks += [self._search] if self._search is not None else []
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
                (log.debug if conflict else log.warning)("%s/%s: %s", *key, message_of(error))
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
        object, found, service = await asyncio.gather(
            self.api.job(namespace, name),
            self.api.pods(namespace, f"{p.JOB}={name}"),
            self.api.service(namespace, name),
        )
        if object is None:
            await self._end_pods(namespace, name, followed.uid)
            return False
        followed.uid = object["metadata"]["uid"]
        if "deletionTimestamp" in object["metadata"]:
            return None
        job = observed.job(object)
        if job.generation != followed.generation:
            followed.refused, followed.generation = "", job.generation
        if followed.refused and time.time() < followed.retry_at:  # to say so in the status was an event, too
            return followed.retry_at
        if job.spec is not None and d.begins(
            job.spec, job.status
        ):  # pods that run already keep what they have
            job = await self._with_known_fields(job, job.spec)
        named = service is not None and observed.owner_of(service) in ("", job.owner.uid)
        job = replace(job, refused=followed.refused, has_service=named)
        pods = [observed.pod(pod, job.owner.uid) for pod in found]
        lost: dict[str, float] = {}
        for node in observed.unsure(pods):
            since = observed.lost_since(await self.api.node(node))
            if since is not None:
                lost[node] = since
        job = await with_plan(self.api, job, pods)
        job, read_again = await self._with_progress(job, pods, followed)
        if not job.status.completion_time:
            pods = list(await asyncio.gather(*(self._with_words(namespace, pod) for pod in pods)))
        decision = d.decide(job, pods, lost, time.time())
        status = decision.status
        if followed.refused:
            status = refused(status, followed.refused, time.time())
        changed = await self._write(object, status)
        try:
            await self._do(job, decision)
        except Refused as error:
            followed.refused, followed.retry_at = str(error), time.time() + RETRY_SECONDS[-1]
            await self._say(namespace, name, str(error))
            return followed.retry_at
        finally:
            if changed:
                await self._warn(object, status)
        if followed.refused:
            followed.refused = ""
            return time.time()
        return min((t for t in (decision.again, read_again) if t is not None), default=None)

    async def _do(self, job: records.Job, decision: records.Decision) -> None:
        """Deletions first, since a pod may have the name of another one; then what is new."""
        owner, spec, actions = job.owner, decision.spec or job.spec, decision.actions
        gone = [a for a in actions if isinstance(a, records.Delete)]
        for pod in gone:
            log.info("%s/%s: delete %s%s", owner.namespace, owner.name, pod.name, " now" if pod.now else "")
        await asyncio.gather(*(self.api.delete_pod(owner.namespace, a.name, a.uid, now=a.now) for a in gone))
        if spec is not None and spec.workers.queue:
            await self._need_kueue(spec, actions)
        made: list[Any] = []
        for action in actions:
            match action:
                case records.DeleteJob():
                    await self.api.delete_job(owner.namespace, owner.name, owner.uid)
                case records.CreateShared() if spec is not None:
                    await self._make_room(owner)
                    for shared in p.shared(owner, spec, action.round, secrets.token_urlsafe(32)):
                        if not action.service or shared["kind"] == "Service":
                            await self.api.create(shared)
                case records.CreatePlanner() if job.spec is not None:
                    made.append(p.planner(owner, job.spec, action.cluster))
                case records.CreateScheduler() if spec is not None:
                    made.append(p.scheduler(owner, spec, action.round))
                case records.CreateServer() if spec is not None:
                    a = action
                    made.append(p.server(owner, spec, a.round, a.index, a.place, fresh=a.fresh))
                case records.CreateMove() if spec is not None:
                    made.append(p.move(owner, spec, action.round, action.count, action.place))
                case records.CreateWorker() if spec is not None:
                    a = action
                    made.append(p.worker(owner, spec, a.round, a.index, a.place, a.again))
        for object in made:
            log.info("%s/%s: create %s", owner.namespace, owner.name, object["metadata"]["name"])
        await asyncio.gather(*map(self.api.create, made))

    async def _need_kueue(self, spec: r.Spec, actions: tuple[records.Action, ...]) -> None:
        """Without Kueue, workers would start at once, and take what others wait for. Raises Refused."""
        new = any(isinstance(a, records.CreateShared | records.CreateWorker) for a in actions)
        if new and not await self.api.has(p.KUEUE):
            raise Refused(
                404,
                f"workers.queue is {spec.workers.queue}, and the cluster has no API {p.KUEUE}: install Kueue, or leave "
                "workers.queue out",
            )

    async def _make_room(self, owner: p.Owner) -> None:
        """Delete the service of an earlier job of the same name: the cluster does so, too, but later."""
        found = await self.api.service(owner.namespace, owner.name)
        if found is not None and observed.owner_of(found) not in ("", owner.uid):
            await self.api.delete_service(owner.namespace, owner.name, found["metadata"]["uid"])

    async def _end_pods(self, namespace: str, name: str, uid: str) -> None:
        """Delete the pods of a deleted job: the cluster would do so too, but may take its time. Nothing that was kept
        (``kubectl delete --cascade=orphan``) has an owner any more."""
        pods = await self.api.pods(namespace, f"{p.JOB}={name}") if uid else []
        owned = [pod["metadata"] for pod in pods if observed.owner_of(pod) == uid]
        await asyncio.gather(*(self.api.delete_pod(namespace, m["name"], m["uid"], now=False) for m in owned))

    async def _say(self, namespace: str, name: str, message: str) -> None:
        """Write into the status what the API server says of the job's pods."""
        object = await self.api.job(namespace, name)
        if object is None:
            return
        status = refused(observed.job(object).status, message, time.time())
        if await self._write(object, status):
            await self._warn(object, status)

    async def _write(self, object: Any, status: r.Status) -> bool:
        """Write the status, if it has changed; returns whether it has."""
        new, old = msgspec.to_builtins(status), object.get("status") or {}
        if new != old:
            await self.api.write_status(object, new)
        return new != old

    async def _warn(self, object: Any, status: r.Status) -> None:
        """Make events of what has become worse."""
        for reason, message in warnings(observed.job(object).status, status):
            try:
                await self.api.warn(object, reason, message)
            except Refused as error:
                log.debug("no event: %s", error)  # the condition says it, too

    async def _with_known_fields(self, job: records.Job, spec: r.Spec) -> records.Job:
        """The job, or one that says which fields of its pods are none."""
        read_at, types = self._fields
        for fresh in (False, True):
            if fresh or not types:
                types = await self._types()
                self._fields = read_at, types = time.time(), types
            try:
                fields.check(spec, types)
                return job
            except LaunchError as error:
                problem = str(error)
            if time.time() < read_at + FIELDS_SECONDS:
                break
        return replace(job, spec=None, problem=problem)

    async def _types(self) -> fields.Types:
        try:
            return fields.types_in(await self.api.openapi())
        except (Refused, ValueError) as error:
            known = fields.published()
            log.warning("fields of pods are those of Kubernetes %s: %s", known.release, message_of(error))
            return known.types

    async def _with_words(self, namespace: str, pod: d.Pod) -> d.Pod:
        """A worker with the end of its log, if its script has failed."""
        if pod.role != r.WORKER.lower() or not _by_itself(pod):
            return pod
        try:
            return replace(pod, said=observed.last_lines(await self.api.log(namespace, pod.name, LOG_LINES)))
        except Refused:
            return pod

    async def _with_progress(
        self, job: records.Job, pods: list[d.Pod], followed: Followed
    ) -> tuple[records.Job, float | None]:
        """The job with the step, the loss and the attempt that the log of its first worker names, and when to read it
        again: somewhat later while a pod has to be replaced, which should not wait for a log."""
        worker = r.WORKER.lower()
        own = [pod for pod in pods if (pod.role, pod.index, pod.round) == (worker, 0, job.status.round)]
        first = next((pod for pod in own if pod.phase in ("Running", "Succeeded") or _by_itself(pod)), None)
        if first is None or job.status.completion_time:
            return job, None
        if first.phase == "Running":
            replaces = any(pod.phase == "Failed" and not pod.deleting for pod in pods)
            again = followed.read_at + PROGRESS_SECONDS * (2 if replaces else 1)
            if time.time() < again:
                return job, again
        followed.read_at = time.time()
        try:
            text = await self.api.log(job.owner.namespace, first.name, LOG_LINES)
        except Refused:
            text = ""
        status = job.status
        if (said := observed.progress(text)) is not None:
            status = replace(status, step=said[0], loss=said[1])
        if (begun := observed.attempt(text)) is not None:
            status = replace(status, attempt=begun[0], attempt_after=begun[1])
        return replace(job, status=status), followed.read_at + PROGRESS_SECONDS


def _by_itself(pod: d.Pod) -> bool:
    """Return whether a pod's script has failed, rather than been killed."""
    return pod.phase == "Failed" and 0 < (pod.exit_code or 0) < SIGNALS


def run(namespaces: tuple[str, ...] = (), liveness: str | None = None) -> None:
    """Run until a signal comes. `namespaces`: empty for all of them. Raises LaunchError."""
    info = server()
    registry, operators = kopf.OperatorRegistry(), list[Operator]()
    kopf.on.login(registry=registry)(login)

    @kopf.on.startup(registry=registry)
    async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.posting.enabled = False  # `_write` makes them, of what is worth one
        settings.scanning.disabled = True  # `search` does it without a right to watch definitions
        token = TOKEN if TOKEN.exists() and info.token else None
        operators.append(Operator(connect(info, token)))
        operators[0].search(namespaces)

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
