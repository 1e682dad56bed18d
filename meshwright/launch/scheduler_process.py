"""Be the scheduler: ``python -m meshwright.launch.scheduler_process SETTINGS``, the fields of `Settings` as JSON.

The secret comes over the environment, which other users cannot read, as a command line they can.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import signal
import socket
import ssl
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshwright.errors import LaunchError
from meshwright.launch.bootstrap import die_with
from meshwright.launch.nodes import from_environment, master
from meshwright.launch.port import Stores
from meshwright.launchers.interfaces import resolve
from meshwright.scheduler.members import NODE_SECONDS, Members
from meshwright.scheduler.server import Server
from meshwright.scheduler.state import Kept
from meshwright.scheduler.trust import SECRET, Trust, server_context

ENDED_SECONDS = 3.0  # that a scheduler stays after the job has ended, for all to hear of it


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`launcher`: the process with which it ends, 0 for none. `stays`: after the job has ended, too."""

    host: str
    port: int
    nodes: int = 0
    world: int = 0
    restarts: int = 0
    state: str = ""
    certificates: str = ""
    node_seconds: float = NODE_SECONDS
    launcher: int = 0
    stays: bool = False


def settings(environment: Mapping[str, str], *, listen: str | None, **more: Any) -> Settings:
    """The settings as typed. `more`: fields of `Settings`. Raises LaunchError for what cannot be."""
    told, _ = from_environment(environment)
    if not (listen or told):
        raise LaunchError("the scheduler needs an address to listen at", hint="--listen HOST:PORT")
    host, port = master(listen or told, "--listen" if listen else "MESHWRIGHT_MASTER")
    for name, option in (("nodes", "--nnodes"), ("world", "--world-size"), ("restarts", "--max-restarts")):
        if more[name] < 0:
            raise LaunchError(f"{option} is {more[name]}", why="it must be at least 0")
    if not 1 <= more["node_seconds"] <= 86400:
        raise LaunchError(
            f"--node-time-out is {more['node_seconds']:g} seconds",
            why="it must be a time from a second to a day",
        )
    resolve(host, port, "--listen")
    return Settings(host, port, **more)


def run(settings: Settings, secret: str) -> int:
    """Serve until the job has ended, or until a signal comes. Raises LaunchError when it cannot begin."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # one for each connection
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 16)), hard))
    folder = Path(settings.state) if settings.state else None
    if folder is not None:
        _make(folder)
    kept = Kept(folder and folder / "scheduler.sqlite")
    trust = Trust(secret, Path(settings.certificates) if settings.certificates else None)
    context, certificate = server_context(trust)
    members = Members(
        kept, time.monotonic(), settings.nodes, settings.world, settings.restarts, settings.node_seconds
    )
    with Stores() as stores:
        server = Server(kept, members, secret, certificate, stores.port)
        try:
            return asyncio.run(_serve(server, settings, context))
        finally:
            kept.close()


async def _serve(server: Server, settings: Settings, context: ssl.SSLContext | None) -> int:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        listening = await server.serve((settings.host, settings.port), context)
    except OSError as error:
        raise _cannot_listen(settings, error) from None
    where = listening.sockets[0].getsockname()
    print(f"scheduler at {where[0]} port {where[1]}", flush=True)
    ticking = asyncio.create_task(server.tick())
    ended = 0.0
    while not stop.is_set() and not ticking.done():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 0.2)
        ended = (ended or time.monotonic()) if server.members.finished() else 0.0
        if ended and not settings.stays and time.monotonic() - ended > ENDED_SECONDS:
            break
    if ticking.done():
        ticking.result()
    listening.close()
    return 0


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.stat().st_mode & 0o077:
            folder.chmod(0o700)  # keys and values are nobody else's
    except OSError as error:
        raise LaunchError(f"--state {folder} cannot be used", why=error.strerror or str(error)) from None


def _cannot_listen(settings: Settings, error: OSError) -> LaunchError:
    where = f"{settings.host} port {settings.port}"
    if isinstance(error, socket.gaierror):
        return LaunchError(
            f"the host {settings.host} is unknown", why=str(error.strerror), hint="--master (MS_SCHED_HOST)"
        )
    hints = {
        errno.EADDRINUSE: "another port in --master (MS_SCHED_PORT), or end what listens there",
        errno.EADDRNOTAVAIL: "node 0, or the scheduler, runs on the machine that --master (MS_SCHED_HOST) names",
        errno.EACCES: "a port of 1024 or above",
    }
    why = os.strerror(error.errno) if error.errno else str(error)
    return LaunchError(
        f"the scheduler cannot listen at {where}", why=why, hint=hints.get(error.errno or 0, "")
    )


def main() -> None:
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    if settings.launcher:
        die_with(settings.launcher)
    try:
        code = run(settings, os.environ.pop(SECRET, ""))
    except LaunchError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)


if __name__ == "__main__":
    main()
