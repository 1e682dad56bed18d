"""A process that is a worker, a parameter server or the scheduler of a dynamic cluster, by `MS_ROLE`: nobody starts it
but the user.

A worker joins the scheduler as a node of one rank, and learns its rank when all are there. It says that it is alive as
long as it runs, and how it has ended. The scheduler's process becomes `meshwright scheduler`, that of a parameter
server `meshwright.launch.server_by_hand`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from meshwright.errors import LaunchError, PeerLost
from meshwright.launchers.interfaces import resolve
from meshwright.scheduler import messages as m
from meshwright.scheduler.client import Client, Place
from meshwright.scheduler.gather import TURN_SECONDS, gather
from meshwright.scheduler.members import NODE_SECONDS
from meshwright.scheduler.trust import INSECURE, SECRET, SECRET_FILE, Trust, find_secret

ROLE = "MS_ROLE"
WORKER, SCHEDULER, SERVER = "MS_WORKER", "MS_SCHED", "MS_PSERVER"
SERVER_COUNT = "MS_SERVER_NUM"
REPLICAS = "MESHWRIGHT_REPLICAS"
WAIT_SECONDS = 1800.0
WATCH_SECONDS = 5.0
REPORT_SECONDS = 10.0  # for a scheduler that is away when this rank ends
MANY = 1 << 20  # restarts of a job that may recover
SAID = 1000  # characters of an error that other ranks receive


@dataclass(frozen=True, slots=True)
class Told:
    """What the environment says of a dynamic cluster. `world`: its ranks. `servers`: how many parameter servers it has;
    `replicas`: how many others have a copy of each. `id`: the name of this process."""

    role: str
    host: str
    port: int
    world: int
    id: str = ""
    wait_seconds: float = WAIT_SECONDS
    node_seconds: float = NODE_SECONDS
    recovers: bool = False
    state: str = ""
    insecure: bool = False
    servers: int = 0
    replicas: int = 0


def read(env: Mapping[str, str]) -> Told:
    """Raises LaunchError with the variable that is missing or cannot be."""
    role = env[ROLE]
    if role not in (WORKER, SCHEDULER, SERVER):
        raise LaunchError(f"{ROLE} is {role!r:.40}", why=f"it must be {WORKER}, {SERVER} or {SCHEDULER}")
    for name in ("MS_SCHED_HOST", "MS_SCHED_PORT", "MS_WORKER_NUM"):
        if not env.get(name):
            raise LaunchError(
                f"{ROLE} is set, {name} is not",
                why="a worker finds the others through the scheduler, and all know how many they are",
                hint="MS_SCHED_HOST=HOST MS_SCHED_PORT=PORT MS_WORKER_NUM=N",
            )
    port, world = _number(env, "MS_SCHED_PORT"), _number(env, "MS_WORKER_NUM")
    if not 1024 <= port <= 65535:
        raise LaunchError(f"MS_SCHED_PORT is {port}", why="a port is a number from 1024 to 65535")
    if not world:
        raise LaunchError("MS_WORKER_NUM is 0", why="a job has at least one worker")
    servers = _number(env, SERVER_COUNT)
    if role == SERVER and not servers:
        raise LaunchError(
            f"{ROLE} is {SERVER}, and {SERVER_COUNT} is {env.get(SERVER_COUNT, 'not set')}",
            why="workers wait for all servers, and have to know how many there are",
            hint=f"{SERVER_COUNT}=N in all processes of the job",
        )
    replicas = _number(env, REPLICAS)
    if replicas > 1 or (replicas and servers == 1):
        raise LaunchError(
            f"{REPLICAS} is {replicas}, and {SERVER_COUNT} is {servers}",
            why="a parameter server has one copy, on another one, or none",
            hint=f"{SERVER_COUNT}=2 {REPLICAS}=1 in all processes of the job",
        )
    return Told(
        role,
        env["MS_SCHED_HOST"],
        port,
        world,
        env.get("MS_NODE_ID", ""),
        _number(env, "MS_TOPO_TIMEOUT", WAIT_SECONDS),
        _number(env, "MS_NODE_TIMEOUT", NODE_SECONDS),
        env.get("MS_ENABLE_RECOVERY") == "1",
        env.get("MS_RECOVERY_PATH", ""),
        env.get(INSECURE) == "1",
        servers,
        replicas,
    )


def _number(env: Mapping[str, str], name: str, default: Any = 0) -> Any:
    text = env.get(name)
    if text is None:
        return default
    if not text.isdecimal():
        raise LaunchError(f"{name} is {text!r:.40}", why="it must be a whole number, at least 0")
    return int(text)


@dataclass
class Worker:
    """This process in an attempt. `local_rank` of `local_world`: on this host. `address`: its own, by which it reaches
    the scheduler. `servers`: how many parameter servers the job has."""

    place: Place
    node: str
    attempt: int
    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    client: Client  # through which it joined: a node whose connection closes is gone
    servers: int = 0
    ended: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def report(self, status: int, text: str = "", blame: int = m.OWN) -> None:
        """Say how this rank has ended; only the first time counts."""
        with self.lock:
            if self.ended or os.getpid() != _pid[0]:
                return
            self.ended = True
        report = m.Report(self.node, self.attempt, status, text[:SAID], blame)
        with contextlib.suppress(LaunchError):
            Client(self.place, REPORT_SECONDS).ask(report, m.Done)

    def follow(self) -> None:
        """Say that this rank is alive, until it ends."""
        client, seen = Client(self.place, patience=TURN_SECONDS), -1
        while not self.ended:
            with contextlib.suppress(LaunchError):
                seen = client.ask(
                    m.Watch(self.node, self.attempt, seen, WATCH_SECONDS), m.State, WATCH_SECONDS
                ).seen


_pid: list[int] = []  # of the process that has joined: a child that was forked has not
_worker: list[Worker] = []


def worker(env: Mapping[str, str]) -> Worker:
    """This process as a worker, once all are there. Returns neither in the scheduler's process nor in a server's."""
    if _worker and _pid[0] == os.getpid():
        return _worker[0]
    told = read(env)
    secret = find_secret(None, make=told.role == SCHEDULER)
    if not secret and not told.insecure:
        raise LaunchError(
            f"{ROLE} is set, and there is no secret",
            why=f"whoever reaches port {told.port} of {told.host} could take part in the job, or end it",
            hint=f"{SECRET_FILE}=FILE (the scheduler makes it, copy it to the workers) or {SECRET}; in a network that "
            f"nobody else reaches: {INSECURE}=1",
        )
    if told.role == SCHEDULER:
        _become_scheduler(told, secret)
    if told.role == SERVER:
        _become_server(told, secret)
    resolve(told.host, told.port, "MS_SCHED_HOST")
    found = _join(told, Place(told.host, told.port, Trust(secret)))
    _pid[:], _worker[:] = [os.getpid()], [found]
    threading.Thread(target=found.follow, name="worker of a dynamic cluster", daemon=True).start()
    atexit.register(found.report, 0)
    _hook(found)
    return found


def _join(told: Told, place: Place) -> Worker:
    client, host = Client(place, patience=TURN_SECONDS), socket.gethostname()
    own = m.Node(told.id or f"{host}-{os.getpid()}", host, 1)
    formed = gather(client, m.Join(own, 0, told.world, 0, 0.0, 0.0), told.wait_seconds, lambda: None)
    address = client.own_address()
    index = [node.id for node in formed.nodes].index(own.id)
    before = formed.nodes[:index]
    return Worker(
        place,
        own.id,
        formed.attempt,
        sum(node.nproc for node in before),
        sum(node.nproc for node in formed.nodes),
        sum(node.nproc for node in before if node.host == host),
        sum(node.nproc for node in formed.nodes if node.host == host),
        address,
        client,
        told.servers,
    )


def _hook(found: Worker) -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        found.report(1, f"{kind.__name__}: {error}", m.PEER if isinstance(error, PeerLost) else m.OWN)

    sys.excepthook = hook


def _become_scheduler(told: Told, secret: str) -> None:
    settings = {
        "host": told.host,
        "port": told.port,
        "world": told.world,
        "restarts": MANY if told.recovers else 0,
        "state": told.state,
        "node_seconds": told.node_seconds,
    }
    _become("meshwright.launch.scheduler_process", settings, secret)


def _become_server(told: Told, secret: str) -> None:
    settings = {
        "host": told.host,
        "port": told.port,
        "node": told.id or f"{socket.gethostname()}-{os.getpid()}",
        "servers": told.servers,
        "state": told.state,
        "replicas": told.replicas,
        "wait_seconds": told.wait_seconds,
        "away_seconds": told.node_seconds,
    }
    _become("meshwright.launch.server_by_hand", settings, secret)


def _become(module: str, settings: Mapping[str, Any], secret: str) -> None:
    sys.stdout.flush()
    command = [sys.executable, "-P", "-m", module, json.dumps(settings)]
    os.execve(sys.executable, command, {**os.environ, SECRET: secret})


__all__ = ["Told", "Worker", "read", "worker"]
