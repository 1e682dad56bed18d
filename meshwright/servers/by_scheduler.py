"""Parameter servers of several machines are found by the keys of the job's scheduler."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from meshwright.errors import LaunchError, ServerError
from meshwright.scheduler.client import FILE, Client, Place
from meshwright.scheduler.link import PARAMETER_SERVER, admit, at, call
from meshwright.scheduler.trust import server_context
from meshwright.servers.places import (
    BY_HAND,
    LATE_WORKERS,
    MACHINES,
    SILENT_SECONDS,
    beside,
    close_after,
    widen,
)

JOB = "servers/job"  # the key of the job's name
PATIENCE_SECONDS = 2.0  # for a scheduler that is away; who asks tries again
REACH_SECONDS = 3.0  # for a machine to answer; a server that was there may be on another one by then
COUNT_SECONDS = 60.0  # for the launchers of all machines to say how many servers they start


class Begun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The servers of one machine: `node` is its name in the job."""

    node: str
    count: int


class Home(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The machine of a server that `begin` did not number, or that has `moved` to another one at some time."""

    node: str
    moved: bool = False


class ByScheduler:
    """Keys of the scheduler: ``servers/begun`` has the servers of each machine, ``servers/homes`` those that are
    elsewhere or came later, ``servers/at/N`` the address of one, ``servers/copy/N`` where its copy is,
    ``servers/gone`` the workers of lost machines, ``servers/losses`` how often values were lost. Connections are
    secured as those of the scheduler are."""

    def __init__(self, folder: Path) -> None:
        self._place = Place.read(folder / FILE)
        machines = folder / MACHINES
        self._machines = int(machines.read_text()) if machines.exists() else 1
        self._by_hand = (folder / BY_HAND).exists()
        self._client = Client(self._place, PATIENCE_SECONDS)
        self._context: ssl.SSLContext | None = None
        self._certificate = b""
        self._node = ""

    @property
    def job(self) -> str:
        return _named(self._client)

    def begin(self, count: int, node: str) -> range:
        while True:
            old = self._client.get("servers/begun", 0.0) or b""
            begun = _begun(old)
            if node not in [each.node for each in begun]:
                begun.append(Begun(node, count))
            new = msgspec.json.encode(begun)
            if new == old or self._client.swap("servers/begun", old, new) == new:
                break
        self._node = node
        index = [each.node for each in begun].index(node)
        first = sum(each.count for each in begun[:index])
        numbers = range(first, first + begun[index].count)
        # those that others have taken over come home
        self._settle(lambda homes: {n: Home(node, True) for n in numbers if n in homes and homes[n].moved})
        return numbers

    def runs(self, most: int) -> dict[int, bool]:
        return {n: node == self._node for n, node in self._nodes(self._homes()).items() if n < most}

    def take_over(self, nodes: Sequence[str], gone: Sequence[int] = ()) -> None:
        self._client.set("servers/gone", msgspec.json.encode(list(gone)))

        def given(homes: Mapping[int, Home]) -> dict[int, Home]:
            known = self._nodes(homes)
            copies = {n: self._client.get(f"servers/copy/{n}", 0.0) for n in known}
            beside = {n: int(other) for n, other in copies.items() if other is not None}
            return {n: Home(node, True) for n, node in heirs(known, beside, nodes).items()}

        self._settle(given)

    def _settle(self, change: Callable[[Mapping[int, Home]], Mapping[int, Home]]) -> None:
        """Write down other homes of servers; nobody else changes them meanwhile."""
        while True:
            old = self._client.get("servers/homes", 0.0) or b""
            homes = _decoded_homes(old)
            new = msgspec.json.encode({**homes, **changed}) if (changed := change(homes)) else old
            if new == old or self._client.swap("servers/homes", old, new) == new:
                return

    def _homes(self) -> dict[int, Home]:
        return _decoded_homes(self._client.get("servers/homes", 0.0) or b"")

    def _nodes(self, homes: Mapping[int, Home]) -> dict[int, str]:
        """The machine of each server."""
        numbered = [each.node for each in self._all() for _ in range(each.count)]
        return {**dict(enumerate(numbered)), **{n: home.node for n, home in homes.items()}}

    def lose(self, number: int, why: str) -> None:
        self._client.set(f"servers/lost/{number}", why.encode())

    def listen(self, number: int) -> socket.socket:
        self._context, self._certificate = server_context(self._place.trust)
        while not self._client.own_address():
            with contextlib.suppress(LaunchError):
                self._client.get(f"servers/at/{number}", 0.0)
        host = self._client.own_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made = socket.create_server((host, 0), family=family, backlog=4096)
        told = msgspec.json.encode((host, made.getsockname()[1]))
        self._client.patience = COUNT_SECONDS
        self._client.set(f"servers/at/{number}", told)
        return made

    def been(self, number: int) -> bool:
        return self._told(number) is not None

    def moved(self, number: int) -> bool:
        return (home := self._homes().get(number)) is not None and home.moved

    def gone(self) -> Sequence[int]:
        known = self._client.get("servers/gone", 0.0)
        return [] if known is None else msgspec.json.decode(known, type=list[int])

    def lose_values(self, number: int) -> None:
        self._client.add("servers/losses", 1)

    def beside(self, number: int) -> int | None:
        key = f"servers/copy/{number}"
        known = self._client.get(key, 0.0)
        if known is None:
            begun = self._all()
            if len(begun) < self._machines:
                return None
            other = beside([each.count for each in begun], number)
            known = self._client.swap(key, b"", str(other).encode())  # others may have come since then
        return int(known)

    def admit(self, made: socket.socket) -> socket.socket:
        secret = self._place.trust.secret
        return admit(widen(made), self._context, self._certificate, secret, PARAMETER_SERVER)

    def worker(self) -> int:
        return LATE_WORKERS - 1 + self._client.add("servers/workers", 1)

    def count(self) -> int:
        machines = self._machines
        if not self._by_hand:
            machines = int(os.environ.get("GROUP_WORLD_SIZE", machines))
        end = time.monotonic() + COUNT_SECONDS
        while len(begun := self._all()) < machines:
            if time.monotonic() > end:
                names = ", ".join(each.node for each in begun)
                raise ServerError(
                    f"{len(begun)} of {machines} machines have said how many servers they start",
                    why=f"these have: {names}",
                    hint="--servers on each machine; 0 starts none there",
                )
            time.sleep(0.05)
        return sum(each.count for each in begun)

    def numbers(self) -> list[int]:
        self.count()
        return sorted(self._nodes(self._homes()))

    def want(self, count: int) -> None:
        begun = self._all()

        def given(homes: Mapping[int, Home]) -> dict[int, Home]:
            known = self._nodes(homes)
            return {n: Home(begun[n % len(begun)].node) for n in range(count) if n not in known}

        self._settle(given)

    def call(self, number: int) -> socket.socket:
        told = self._told(number)
        if told is None:
            raise FileNotFoundError(f"server {number} has not begun")
        made = widen(call(*told, self._place.trust, PARAMETER_SERVER, REACH_SECONDS))
        made.settimeout(None)
        close_after(made, SILENT_SECONDS)  # what is asked again does no harm
        return made

    def losses(self) -> int:
        return self._client.add("servers/losses", 0)

    def lost(self, number: int) -> str:
        with contextlib.suppress(LaunchError):
            return (self._client.get(f"servers/lost/{number}", 0.0) or b"").decode()
        return ""

    def place(self, number: int) -> str:
        with contextlib.suppress(LaunchError):
            return at(*told) if (told := self._told(number)) else "no address yet"
        return f"an address that the scheduler at {self._place} does not tell"

    def close(self) -> None:
        self._client.close()

    def _all(self) -> list[Begun]:
        return _begun(self._client.get("servers/begun", 0.0) or b"")

    def _told(self, number: int) -> tuple[str, int] | None:
        known = self._client.get(f"servers/at/{number}", 0.0)
        return None if known is None else msgspec.json.decode(known, type=tuple[str, int])


def named(place: Place) -> str:
    """The name of the job of a scheduler, which has one from here on. Raises LaunchError."""
    with contextlib.closing(Client(place)) as client:
        return _named(client)


def known(place: Place) -> str:
    """The name of the job of a scheduler; empty before anybody has asked for it, or without a scheduler."""
    with contextlib.closing(Client(place, PATIENCE_SECONDS)) as client, contextlib.suppress(LaunchError):
        return (client.get(JOB, 0.0) or b"").decode()
    return ""


def _named(client: Client) -> str:
    return client.swap(JOB, b"", uuid.uuid4().hex.encode()).decode()


def heirs(homes: Mapping[int, str], copies: Mapping[int, int], nodes: Sequence[str]) -> dict[int, str]:
    """For each server whose machine is not among `nodes` the one that takes it over: if possible one that has neither
    its copy nor a server whose copy it has, so that the next loss loses nothing; of those, one with few servers.
    `homes`: the machine of each server; `copies`: the server that has the copy of another one."""
    now = dict(homes)
    found: dict[int, str] = {}
    for number in sorted(n for n, node in homes.items() if node not in nodes):
        near = [copies.get(number), *(n for n, other in copies.items() if other == number)]
        taken = {now[n] for n in near if n is not None and n in now}
        some = [node for node in nodes if node in homes.values()]
        if not some:
            break
        found[number] = now[number] = min(
            some, key=lambda node: (node in taken, list(now.values()).count(node))
        )
    return found


def _decoded_homes(known: bytes) -> dict[int, Home]:
    return msgspec.json.decode(known, type=dict[int, Home]) if known else {}


def _begun(known: bytes) -> list[Begun]:
    return msgspec.json.decode(known, type=list[Begun]) if known else []


__all__ = ["ByScheduler", "known", "named"]
