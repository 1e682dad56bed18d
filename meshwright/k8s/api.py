"""The few requests that the operator makes, over aiohttp, with what kopf has logged in with."""

# pyright: reportMissingImports=false
# kopf and aiohttp come with the extra k8s.

from __future__ import annotations

import base64
import os
import re
import ssl
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import kopf
import msgspec

from meshwright.k8s import pods as p
from meshwright.k8s import resource as r

Object = dict[str, Any]
JOBS = f"/apis/{r.GROUP}/{r.VERSION}"
SECONDS = 30.0


class Refused(Exception):
    """The API server's answer to a request that it does not do. `status`: of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """Requests to one API server."""

    def __init__(self, session: aiohttp.ClientSession, server: str, token: Path | None = None) -> None:
        self._session, self._server, self._token = session, server.rstrip("/"), token

    async def close(self) -> None:
        await self._session.close()

    async def ask(self, method: str, path: str, body: Object | None = None, **query: str) -> Any:
        """The answer. Raises Refused."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        data = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": kind, "Accept": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token.read_text().strip()}"
        url = self._server + path
        async with self._session.request(method, url, data=data, params=query, headers=headers) as answer:
            content = await answer.read()
            if answer.status >= 400:
                raise Refused(answer.status, _message(content))
            raw = path.endswith("/log") or path.startswith("/openapi/")
            return content if raw else msgspec.json.decode(content)

    async def job(self, namespace: str, name: str) -> Object | None:
        """The job; None when there is none."""
        return await self._found(f"{JOBS}/namespaces/{namespace}/{r.PLURAL}/{name}")

    async def jobs(self, namespace: str = "") -> list[Object] | None:
        """The jobs of a namespace, or of all; None when the resource is not installed."""
        where = f"/namespaces/{namespace}" if namespace else ""
        answer = await self._found(f"{JOBS}{where}/{r.PLURAL}")
        return None if answer is None else answer["items"]

    async def node(self, name: str) -> Object | None:
        return await self._found(f"/api/v1/nodes/{name}")

    async def nodes(self, selector: str) -> list[Object]:
        return (await self.ask("GET", "/api/v1/nodes", labelSelector=selector))["items"]

    async def version(self) -> tuple[str, tuple[int, ...]]:
        """Of Kubernetes: v1.20.2, (1, 20). Numbers of some clouds are 20+; a build of one's own may have none."""
        found = await self.ask("GET", "/version")
        numbers = [re.match(r"\d+", found[part]) for part in ("major", "minor")]
        return found["gitVersion"], tuple(int(number[0]) for number in numbers if number)

    async def has(self, group: str) -> bool:
        """Return whether the cluster has an API."""
        return await self._found(f"/apis/{group}") is not None

    async def openapi(self) -> bytes:
        """The document that has pods: a small one since Kubernetes 1.24."""
        try:
            return await self.ask("GET", "/openapi/v3/api/v1")
        except Refused as error:
            if error.status != 404:
                raise
        return await self.ask("GET", "/openapi/v2")

    async def warn(self, job: Object, reason: str, message: str) -> None:
        """Make an event, which `kubectl describe` shows. Raises Refused."""
        metadata, now = job["metadata"], time.time()
        about = {name: metadata[name] for name in ("name", "namespace", "uid", "resourceVersion")}
        stamp = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        await self.ask("POST", f"/api/v1/namespaces/{metadata['namespace']}/events", {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{metadata['name']}.{int(now * 1e9):x}", "namespace": metadata["namespace"]},
            "involvedObject": {"apiVersion": f"{r.GROUP}/{r.VERSION}", "kind": r.KIND, **about},
            "type": "Warning", "reason": reason, "message": " ".join(message.split())[:1000],
            "source": {"component": "meshwright-operator"},
            "firstTimestamp": stamp, "lastTimestamp": stamp, "count": 1,
        })  # fmt: skip

    async def _found(self, path: str) -> Object | None:
        try:
            return await self.ask("GET", path)
        except Refused as error:
            if error.status == 404:
                return None
            raise

    async def pods(self, namespace: str, selector: str) -> list[Object]:
        answer = await self.ask("GET", f"/api/v1/namespaces/{namespace}/pods", labelSelector=selector)
        return answer["items"]

    async def log(self, namespace: str, pod: str, lines: int) -> str:
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/log"
        return (await self.ask("GET", path, tailLines=str(lines))).decode(errors="replace")

    async def create(self, object: Object) -> None:
        """Make an object; one of its name that is there already, and is of the same job, stays. Raises Refused."""
        version, plural = object["apiVersion"], object["kind"].lower() + "s"
        root = f"/apis/{version}" if "/" in version else f"/api/{version}"
        path = f"{root}/namespaces/{object['metadata']['namespace']}/{plural}"
        try:
            await self.ask("POST", path, object)
        except Refused as error:
            if error.status == 404 and "/" in version:
                raise Refused(404, f"the cluster has no {object['kind']} of {version}") from None
            if error.status != 409:
                raise
            if object["kind"] in ("Pod", "Service"):  # others have the job's uid in their names
                await self._same_job(path, object, error)

    async def _same_job(self, path: str, object: Object, conflict: Refused) -> None:
        """Refuse an object that is there under the name of one of a job, but does not belong to it. If none is there,
        the conflict is another one, such as that of a quota."""
        name, job = object["metadata"]["name"], object["metadata"]["labels"][p.JOB]
        found = await self._found(f"{path}/{name}")
        if found is None:
            raise conflict
        if found["metadata"].get("labels", {}).get(p.JOB) == job:
            return
        kind = object["kind"].lower()
        raise Refused(
            409,
            f"the {kind} {name} is there already, and not of this job: kubectl delete {kind} {name}, or give the job "
            "another name",
        )

    async def delete_pod(self, namespace: str, name: str, uid: str, *, now: bool) -> None:
        """Delete a pod, unless it has gone or another has its name."""
        grace = {"gracePeriodSeconds": 0} if now else {}
        await self._deleted(
            f"/api/v1/namespaces/{namespace}/pods/{name}", {"preconditions": {"uid": uid}, **grace}
        )

    async def service(self, namespace: str, name: str) -> Object | None:
        return await self._found(f"/api/v1/namespaces/{namespace}/services/{name}")

    async def delete_service(self, namespace: str, name: str, uid: str) -> None:
        await self._deleted(
            f"/api/v1/namespaces/{namespace}/services/{name}", {"preconditions": {"uid": uid}}
        )

    async def delete_job(self, namespace: str, name: str, uid: str) -> None:
        body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        await self._deleted(f"{JOBS}/namespaces/{namespace}/{r.PLURAL}/{name}", body)

    async def _deleted(self, path: str, body: Object) -> None:
        try:
            await self.ask("DELETE", path, body)
        except Refused as error:
            if error.status not in (404, 409):
                raise

    async def write_status(self, job: Object, status: Object) -> None:
        """Write the status of the job as it was read. Raises Refused (409) if it has changed since."""
        metadata = job["metadata"]
        path = f"{JOBS}/namespaces/{metadata['namespace']}/{r.PLURAL}/{metadata['name']}/status"
        await self.ask("PUT", path, {**job, "status": status})


def connect(info: kopf.ConnectionInfo, token: Path | None = None) -> Api:
    """An API server as kopf knows it, by a file of kubectl or the account of a pod. `token`: a file that is replaced
    from time to time."""
    headers = {"Authorization": f"{info.scheme or 'Bearer'} {info.token}"} if info.token else {}
    connector = aiohttp.TCPConnector(ssl=tls(info), limit=32)
    timeout = aiohttp.ClientTimeout(total=SECONDS)
    return Api(
        aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout), str(info.server), token
    )


def tls(info: kopf.ConnectionInfo) -> ssl.SSLContext | bool:
    """How to trust an API server, and be trusted. Raises OSError or ValueError if its files are of no use."""
    if info.insecure:
        return False
    data = base64.b64decode(info.ca_data).decode() if info.ca_data else None
    if info.ca_path:
        Path(os.fsdecode(info.ca_path)).read_bytes()  # its error names the file; that of ssl does not
    context = ssl.create_default_context(cafile=info.ca_path, cadata=data)
    if info.certificate_path and info.private_key_path:
        context.load_cert_chain(str(info.certificate_path), str(info.private_key_path))
    elif info.certificate_data and info.private_key_data:
        with tempfile.TemporaryDirectory() as folder:  # ssl reads them from files alone
            files = Path(folder, "cert.pem"), Path(folder, "key.pem")
            for file, text in zip(files, (info.certificate_data, info.private_key_data), strict=True):
                file.touch(mode=0o600)
                file.write_bytes(base64.b64decode(text))
            context.load_cert_chain(*map(str, files))
    return context


def message_of(error: Exception) -> str:
    """What an error says. A timeout says nothing by itself."""
    if isinstance(error, TimeoutError):
        return f"the API server has not answered within {SECONDS:.0f} s"
    return str(error) or type(error).__name__


def _message(content: bytes) -> str:
    try:
        return str(msgspec.json.decode(content)["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return content.decode(errors="replace")[:500]


__all__ = ["Api", "Refused", "connect", "message_of", "tls"]
