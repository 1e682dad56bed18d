"""A kubelet that runs each pod's command as a process of this machine: ``python -m tests.k8s.kubelet NAME FOLDER``.

It registers the node NAME, keeps its lease, follows the pods that the scheduler binds to it, reports their states and
serves their logs. What it does not have: images (a command is found on PATH), networks (a pod's address is one of the
loopback network), probes, limits, and file systems (the path of a volume is replaced in commands by a real folder).
All of its processes end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import re
import signal
import ssl
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import kopf
from aiohttp import web

from meshwright.k8s.api import Api, Refused, connect

Object = dict[str, Any]
LEASE_SECONDS = 1.0
RESTART_SECONDS = (0.0, 0.5, 1.0, 2.0, 5.0)  # of a container within its pod
PR_SET_PDEATHSIG = 1
VARIABLE = re.compile(r"\$\((\w+)\)")  # in words of a command, as Kubernetes has it


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass
class Running:
    """A pod on this node. `task` runs it from its start to its end."""

    object: Object
    address: str
    task: asyncio.Task[None] | None = None
    process: asyncio.subprocess.Process | None = None
    stopping: bool = False
    restarts: int = 0
    folders: dict[str, str] = field(default_factory=dict)


class Kubelet:
    def __init__(
        self, name: str, folder: Path, api: Api, session: aiohttp.ClientSession, server: str
    ) -> None:
        self.name, self.folder, self.api, self.session, self.server = name, folder, api, session, server
        self.pods: dict[str, Running] = {}
        self.number = 0
        self.stopping: set[asyncio.Task[None]] = set()

    # ---- the node

    async def register(self, port: int) -> None:
        condition = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
        stamps = {"lastHeartbeatTime": now()[:19] + "Z", "lastTransitionTime": now()[:19] + "Z"}
        status = {
            "conditions": [condition | stamps],
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
            "capacity": {"cpu": "64", "memory": "64Gi", "pods": "500"},
            "allocatable": {"cpu": "64", "memory": "64Gi", "pods": "500"},
            "nodeInfo": dict.fromkeys(
                "architecture bootID containerRuntimeVersion kernelVersion kubeProxyVersion machineID osImage "
                "operatingSystem systemUUID".split(), "process",
            ) | {"kubeletVersion": "v1.20.2"},
        }  # fmt: skip
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": self.name}, "status": status}
        with contextlib.suppress(Refused):
            await self.api.ask("POST", "/api/v1/nodes", node)
        await self.api.ask("PATCH", f"/api/v1/nodes/{self.name}/status", {"status": status})

    async def keep_lease(self) -> None:
        path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        while True:
            lease = {"holderIdentity": self.name, "leaseDurationSeconds": 4, "renewTime": now()}
            object = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": self.name},
                "spec": lease,
            }
            try:
                await self.api.ask("PATCH", f"{path}/{self.name}", {"spec": lease})
            except Refused:
                with contextlib.suppress(Refused):
                    await self.api.ask("POST", path, object)
            except (aiohttp.ClientError, OSError):
                pass
            await asyncio.sleep(LEASE_SECONDS)

    # ---- pods

    async def follow(self) -> None:
        """List the pods of this node, then watch them, again and again."""
        query = {"fieldSelector": f"spec.nodeName={self.name}"}
        while True:
            try:
                found = await self.api.ask("GET", "/api/v1/pods", **query)
                for object in found["items"]:
                    self.changed(object)
                listed = {o["metadata"]["uid"] for o in found["items"]}
                for uid in set(self.pods) - listed:
                    self.vanished(uid)
                version = found["metadata"]["resourceVersion"]
                parameters = {**query, "watch": "true", "resourceVersion": version}
                async with self.session.get(f"{self.server}/api/v1/pods", params=parameters) as answer:
                    async for line in answer.content:
                        event = json.loads(line)
                        if event["type"] == "DELETED":
                            self.vanished(event["object"]["metadata"]["uid"])
                        elif event["type"] in ("ADDED", "MODIFIED"):
                            self.changed(event["object"])
            except (aiohttp.ClientError, OSError, Refused):
                await asyncio.sleep(0.2)

    def changed(self, object: Object) -> None:
        uid = object["metadata"]["uid"]
        pod = self.pods.get(uid)
        ended = object.get("status", {}).get("phase") in ("Succeeded", "Failed")
        if pod is None and not ended:
            self.number += 1
            address = f"127.{10 + sum(self.name.encode()) % 200}.{self.number // 250}.{self.number % 250 + 1}"
            pod = self.pods[uid] = Running(object, address)
            pod.task = asyncio.create_task(self.run(pod))
        if pod is not None:
            pod.object = object
        if "deletionTimestamp" in object["metadata"] and (pod is None or not pod.stopping):
            stopping = asyncio.create_task(self.stop(object, pod))
            self.stopping.add(stopping)  # else the collector may take it
            stopping.add_done_callback(self.stopping.discard)

    def vanished(self, uid: str) -> None:
        """A pod was deleted by force: nothing of it may stay."""
        pod = self.pods.pop(uid, None)
        if pod is not None:
            pod.stopping = True
            _kill(pod.process, signal.SIGKILL)

    async def stop(self, object: Object, pod: Running | None) -> None:
        if pod is not None:
            pod.stopping = True
            _kill(pod.process, signal.SIGTERM)
            if pod.task is not None:
                grace = object["metadata"].get("deletionGracePeriodSeconds", 30)
                await asyncio.wait({pod.task}, timeout=grace)
            _kill(pod.process, signal.SIGKILL)
            if pod.task is not None:
                await asyncio.wait({pod.task})
        metadata = object["metadata"]
        with contextlib.suppress(Refused):
            await self.api.delete_pod(metadata["namespace"], metadata["name"], metadata["uid"], now=True)

    async def run(self, pod: Running) -> None:
        metadata, spec = pod.object["metadata"], pod.object["spec"]
        container = spec["containers"][0]
        log = self.log(metadata["namespace"], metadata["name"])
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            env, command, where = await self.prepared(pod, container)
        except (Refused, LookupError) as error:
            await self.report(
                pod, "Pending", {"waiting": {"reason": "CreateContainerConfigError", "message": str(error)}}
            )
            return
        while True:
            with log.open("ab" if pod.restarts else "wb") as out:
                try:
                    pod.process = await asyncio.create_subprocess_exec(
                        *command, env=env, cwd=where, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
                        start_new_session=True, preexec_fn=_die_with_parent,
                    )  # fmt: skip
                except OSError as error:
                    out.write(f"{error}\n".encode())
                    waiting = {"reason": "ErrImagePull", "message": str(error)}
                    await self.report(pod, "Pending", {"waiting": waiting})
                    return
            log.with_suffix(".pid").write_text(str(pod.process.pid))
            began = now()[:19] + "Z"
            await self.report(pod, "Running", {"running": {"startedAt": began}})
            status = await pod.process.wait()
            _kill(pod.process, signal.SIGKILL)  # what it has left behind
            code = status if status >= 0 else 128 - status
            reason = "Completed" if code == 0 else "Error"
            ended = {
                "terminated": {
                    "exitCode": code,
                    "reason": reason,
                    "startedAt": began,
                    "finishedAt": now()[:19] + "Z",
                }
            }
            if (
                pod.stopping
                or spec["restartPolicy"] == "Never"
                or (spec["restartPolicy"] == "OnFailure" and code == 0)
            ):
                await self.report(pod, "Failed" if code else "Succeeded", ended)
                return
            pod.restarts += 1
            await self.report(pod, "Running", {"waiting": {"reason": "CrashLoopBackOff"}})
            await asyncio.sleep(RESTART_SECONDS[min(pod.restarts, len(RESTART_SECONDS)) - 1])

    async def prepared(self, pod: Running, container: Object) -> tuple[dict[str, str], list[str], str | None]:
        """Environment, command and folder of a container, with the paths of its volumes replaced."""
        metadata, spec = pod.object["metadata"], pod.object["spec"]
        volumes = {v["name"]: v for v in spec.get("volumes", [])}
        paths = {}
        for mount in container.get("volumeMounts", []):
            volume = volumes[mount["name"]]
            if "hostPath" in volume:
                paths[mount["mountPath"]] = volume["hostPath"]["path"]
            elif "emptyDir" in volume:
                made = self.folder / "volumes" / metadata["uid"] / mount["name"]
                made.mkdir(parents=True, exist_ok=True)
                paths[mount["mountPath"]] = str(made)
            elif "configMap" in volume:
                made = self.folder / "volumes" / metadata["uid"] / mount["name"]
                made.mkdir(parents=True, exist_ok=True)
                name = volume["configMap"]["name"]
                found = await self.api.ask(
                    "GET", f"/api/v1/namespaces/{metadata['namespace']}/configmaps/{name}"
                )
                for file, text in found["data"].items():
                    (made / file).write_text(text)
                paths[mount["mountPath"]] = str(made)

        def local(text: str) -> str:
            for path, real in paths.items():
                text = text.replace(path, real)
            return text

        env = dict(os.environ)
        for variable in container.get("env", []):
            source = variable.get("valueFrom", {})
            if "secretKeyRef" in source:
                import base64

                of = source["secretKeyRef"]
                secret = await self.api.ask(
                    "GET", f"/api/v1/namespaces/{metadata['namespace']}/secrets/{of['name']}"
                )
                value = base64.b64decode(secret["data"][of["key"]]).decode()
            elif "fieldRef" in source:
                fields = {"status.podIP": pod.address, "metadata.name": metadata["name"]}
                value = fields[source["fieldRef"]["fieldPath"]]
            else:
                value = variable.get("value", "")
            env[variable["name"]] = local(value)
        words = [*container.get("command", []), *container.get("args", [])]
        where = container.get("workingDir")
        given = {variable["name"] for variable in container.get("env", [])}

        def expanded(word: str) -> str:
            return VARIABLE.sub(lambda found: env[found[1]] if found[1] in given else found[0], word)

        return env, [expanded(local(word)) for word in words], local(where) if where else None

    async def report(self, pod: Running, phase: str, state: Object) -> None:
        metadata, container = pod.object["metadata"], pod.object["spec"]["containers"][0]
        ready = "True" if "running" in state else "False"
        condition = {"status": ready, "lastTransitionTime": now()[:19] + "Z"}
        ours = ("Ready", "ContainersReady")
        others = [c for c in pod.object["status"].get("conditions", []) if c["type"] not in ours]
        status = {
            "phase": phase,
            "podIP": pod.address,
            "podIPs": [{"ip": pod.address}],
            "hostIP": "127.0.0.1",
            "startTime": now()[:19] + "Z",
            "conditions": [*others, *({"type": kind, **condition} for kind in ours)],
            "containerStatuses": [
                {
                    "name": container["name"], "image": container["image"], "imageID": "", "ready": ready == "True",
                    "restartCount": pod.restarts, "state": state,
                }
            ],
        }  # fmt: skip
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/status"
        with contextlib.suppress(Refused, aiohttp.ClientError):
            await self.api.ask("PATCH", path, {"metadata": {"uid": metadata["uid"]}, "status": status})

    # ---- logs

    def log(self, namespace: str, pod: str) -> Path:
        return self.folder / "logs" / namespace / f"{pod}.log"

    async def show(self, request: web.Request) -> web.StreamResponse:
        log = self.log(request.match_info["namespace"], request.match_info["pod"])
        if not log.exists():
            return web.Response(status=404, text="no log")
        lines = log.read_bytes().splitlines(keepends=True)
        if "tailLines" in request.query:
            count = int(request.query["tailLines"])
            lines = lines[len(lines) - min(count, len(lines)) :]
        return web.Response(body=b"".join(lines))


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill(process: asyncio.subprocess.Process | None, number: signal.Signals) -> None:
    """Signal a pod's process; a final one goes to all of its session."""
    if process is None:
        return
    with contextlib.suppress(ProcessLookupError):
        if number == signal.SIGKILL:
            os.killpg(process.pid, number)
        elif process.returncode is None:
            process.send_signal(number)


async def main(name: str, folder: Path) -> None:
    info = kopf.login_with_kubeconfig(settings=kopf.OperatorSettings())
    assert info is not None
    api = connect(info)
    session = aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {info.token}"},
        connector=aiohttp.TCPConnector(ssl=False),
        timeout=aiohttp.ClientTimeout(total=None),
    )
    kubelet = Kubelet(name, folder, api, session, str(info.server))
    app = web.Application()
    app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", kubelet.show)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(str(folder / "kubelet.pem"))
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    await kubelet.register(runner.addresses[0][1])
    await asyncio.gather(kubelet.keep_lease(), kubelet.follow())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
