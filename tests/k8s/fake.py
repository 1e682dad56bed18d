"""An API server in this process: it keeps objects, and knows versions, conflicts and preconditions."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import aiohttp
from aiohttp import web

from meshwright.k8s.api import Api
from meshwright.k8s.fields import CORE, Types, published

Object = dict[str, Any]
JOBS = "/apis/meshwright.dev/v1alpha1/paralleljobs"


class FakeServer:
    """`objects`: by path. `refuses`: the answer to any pod that is made. `before_write`: called once, before the next
    status is written."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.requests: list[tuple[str, str]] = []
        self.refuses: tuple[int, str] | None = None
        self.before_write: Any = None
        self.installed = True  # the definition of jobs
        self.no_events = False  # that the operator may make
        self.apis = {"kueue.x-k8s.io"}  # beside ours
        self.version = {"major": "1", "minor": "20", "gitVersion": "v1.20.2"}
        self.log: str | None = ""  # None: the node does not answer
        self.types = dict(published().types)  # of what pods consist of
        self._versions = count(1)

    def put(self, path: str, object: Object) -> None:
        metadata = object.setdefault("metadata", {})
        metadata.setdefault("uid", f"uid-{next(self._versions)}")
        metadata["resourceVersion"] = f"{next(self._versions)}"
        self.objects[path] = object

    def names(self, kind: str) -> list[str]:
        return sorted(path.rsplit("/", 1)[1] for path in self.objects if f"/{kind}/" in path)

    async def answer(self, request: web.Request) -> web.Response:
        path, method = request.path, request.method
        self.requests.append((method, path.rsplit("/", 1)[1]))
        body = await request.json() if request.can_read_body else {}
        if method == "POST":
            path = f"{path}/{body['metadata']['name']}"
            if body["kind"] == "Pod" and self.refuses:
                return web.json_response({"message": self.refuses[1]}, status=self.refuses[0])
            if body["kind"] == "Event" and self.no_events:
                return web.json_response({"message": "events is forbidden"}, status=403)
            if path in self.objects:
                return web.json_response({"message": "exists"}, status=409)
            self.put(path, body)
            return web.json_response(body, status=201)
        if method == "GET" and path.endswith("/pods"):
            key, value = request.query["labelSelector"].split("=")
            pods = [o for p, o in self.objects.items() if p.startswith(path + "/")]
            return web.json_response(
                {"items": [o for o in pods if o["metadata"].get("labels", {}).get(key) == value]}
            )
        if method == "GET" and path == JOBS and self.installed:
            return web.json_response({"items": [o for p, o in self.objects.items() if "/paralleljobs/" in p]})
        if method == "GET" and path == "/api/v1/nodes":
            return web.json_response(
                {"items": [o for p, o in self.objects.items() if p.startswith(path + "/")]}
            )
        if path.removeprefix("/apis/") in self.apis:
            return web.json_response({"kind": "APIGroup"})
        if path == "/version":
            return web.json_response(self.version)
        if path == "/openapi/v2":
            return web.json_response(openapi(self.types))
        if path.endswith("/log") and self.log is None:
            return web.json_response({"message": "no kubelet"}, status=500)
        if path.endswith("/log"):
            return web.Response(text=self.log)
        if method == "PUT":
            if self.before_write:
                self.before_write, hook = None, self.before_write
                hook()
            path = path.removesuffix("/status")
            if self.objects[path]["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"]:
                return web.json_response({"message": "changed"}, status=409)
            self.put(path, {**self.objects[path], "status": body["status"]})
        if path not in self.objects:
            return web.json_response({"message": "not found"}, status=404)
        if method == "DELETE":
            if body["preconditions"]["uid"] != self.objects[path]["metadata"]["uid"]:
                return web.json_response({"message": "another uid"}, status=409)
            if self.objects[path]["metadata"].get("finalizers"):
                self.objects[path]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            else:
                del self.objects[path]
            return web.json_response({})
        return web.json_response(copy.deepcopy(self.objects[path]))


def openapi(types: Types) -> Object:
    """The document of version 2 that has these types; a list where an API server may have either."""
    plain = {"type": "string"}

    def reference(kind: str) -> Object:
        return {"type": "array", "items": {"$ref": f"#/definitions/{CORE}{kind}"}} if kind else plain

    return {
        "definitions": {
            CORE + kind: {"properties": {field: reference(of) for field, of in fields.items()}}
            for kind, fields in types.items()
        }
    }


@asynccontextmanager
async def served(server: FakeServer) -> AsyncIterator[Api]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    api = Api(aiohttp.ClientSession(), f"http://127.0.0.1:{runner.addresses[0][1]}")
    try:
        yield api
    finally:
        await api.close()
        await runner.cleanup()
