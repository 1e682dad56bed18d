"""One job of two workers on an API server in this process, and what a kubelet does with its pods."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from typing import Any

from meshwright.k8s.operator import Followed, Operator
from tests.k8s import fake

JOB = "/apis/meshwright.dev/v1alpha1/namespaces/default/paralleljobs/demo"

PODS = "/api/v1/namespaces/default/pods"


def with_job(do: Callable[[Any, Operator], Awaitable[None]], **spec: Any) -> None:
    """Run with a server that has a job of two workers."""

    async def run() -> None:
        server = fake.FakeServer()
        given = copy.deepcopy({"image": "i", "command": ["t.py"], "workers": {"replicas": 2}, **spec})
        metadata = {"name": "demo", "namespace": "default", "generation": 1}
        server.put(JOB, {"kind": "ParallelJob", "metadata": metadata, "spec": given})
        async with fake.served(server) as api:
            await do(server, Operator(api))

    asyncio.run(run())


def start(server: Any) -> None:
    """Be the kubelet: run what is there."""
    for path, pod in list(server.objects.items()):
        if path.startswith(PODS) and "status" not in pod:
            ready = [{"type": "Ready", "status": "True"}]
            server.put(
                path, {**pod, "status": {"phase": "Running", "podIP": "10.0.0.7", "conditions": ready}}
            )


async def started(server: Any, operator: Operator) -> Followed:
    followed = Followed()
    for _ in range(4):
        await operator.turn("default", "demo", followed)
        start(server)
    return followed


def ended(server: Any, name: str, code: int, log: str) -> None:
    """Be the kubelet of a pod that ends, after it has printed something."""
    path = f"{PODS}/{name}"
    state = [{"state": {"terminated": {"exitCode": code}}}]
    status = {"phase": "Failed" if code else "Succeeded", "containerStatuses": state}
    server.put(path, {**server.objects[path], "status": status})
    server.log = log


def condition(server: Any, kind: str) -> dict[str, str]:
    return next(c for c in server.objects[JOB]["status"]["conditions"] if c["type"] == kind)
