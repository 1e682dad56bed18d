"""Where the processes of a job find its parameter servers: in a folder of one machine, or by the scheduler of several.

What a folder holds for one machine, the scheduler's keys hold for several. Launchers use this too, so nothing here
imports torch.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import shutil
import socket
import ssl
import tempfile
import time
import uuid
from pathlib import Path
from typing import Protocol

import msgspec

from meshwright.errors import LaunchError, ServerError
from meshwright.scheduler.client import FILE, Client, Place
from meshwright.scheduler.link import PARAMETER_SERVER, admit, at, call
from meshwright.scheduler.trust import server_context

FOLDER = "MESHWRIGHT_SERVERS"  # the environment variable with the folder of a job's servers
JOINS = "MESHWRIGHT_JOINS"  # the environment variable of workers that come while others train
LATE_WORKERS = 1024  # the number of the first of these
PREFIX = "meshwright-servers-"  # of its name, among temporary files
MACHINES = "machines"  # the file in it with the number of machines of a job, at least
LAUNCHER = "launcher"  # the file in it with the launcher's process id
BUFFER_BYTES = 4 << 20
PATIENCE_SECONDS = 2.0  # for a scheduler that is away; who asks tries again
COUNT_SECONDS = 60.0  # for the launchers of all machines to say how many servers they start
# A machine that has gone closes no connection: after so many seconds without an answer it is closed here.
KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 2))
UNANSWERED_MILLISECONDS = 15_000


class Meeting(Protocol):
    """`job`: its name, the same for all of its processes."""

    @property
    def job(self) -> str: ...

    # ---- a launcher

    def begin(self, count: int, node: str) -> range:
        """Say that this machine starts so many servers; their numbers. Raises LaunchError without a scheduler."""
        ...

    def more(self, most: int) -> range:
        """The numbers of all servers that `want` asks for beyond those of the beginning."""
        ...

    def starts(self, number: int) -> bool:
        """Return whether a server of `more` is started by this machine."""
        ...

    def lose(self, number: int, why: str) -> None:
        """Say that a server will not come again."""
        ...

    # ---- a server

    def listen(self, number: int) -> socket.socket:
        """The socket of a server, which others find from now on."""
        ...

    def been(self, number: int) -> bool:
        """Return whether a server of this number has listened before."""
        ...

    def beside(self, number: int) -> int | None:
        """The server that has the copy of another one, of another machine if any has servers; the same at all times.
        None while the machines have not said how many they start. Raises ServerError if there is no other."""
        ...

    def admit(self, made: socket.socket) -> socket.socket:
        """A connection that was accepted, from somebody who belongs to the job. Raises OSError, EOFError, Malformed."""
        ...

    # ---- a worker

    def worker(self) -> int:
        """A number for a worker that comes while others train, which no other has."""
        ...

    def count(self) -> int:
        """The number of servers that the job begins with. Raises ServerError where a machine does not say it."""
        ...

    def want(self, count: int) -> None:
        """Ask for so many servers in all."""
        ...

    def call(self, number: int) -> socket.socket:
        """A connection to a server. Raises OSError where there is none, LaunchError for a stranger."""
        ...

    def lost(self, number: int) -> str:
        """Why a server will not come again; empty for one that may."""
        ...

    def place(self, number: int) -> str:
        """Where a server is, for people."""
        ...

    def close(self) -> None: ...


def meeting(folder: Path) -> Meeting:
    """The meeting that a launcher has made in a folder."""
    return ByScheduler(folder) if (folder / FILE).exists() else InFolder(folder)


def meeting_by_hand(place: Place, servers: int) -> Path:
    """A folder for a process that no launcher has started; it is removed when this process ends. `servers`: how many
    others start, each on a machine of its own as far as anybody knows."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))  # only this user can open it
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / LAUNCHER).write_text(str(os.getpid()))
    place.write(folder / FILE)
    (folder / MACHINES).write_text(str(servers))
    return folder


def widen(made: socket.socket) -> socket.socket:
    """A socket with room for large messages."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        made.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    if made.family != socket.AF_UNIX:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (*KEEPALIVE, (socket.TCP_USER_TIMEOUT, UNANSWERED_MILLISECONDS)):
            made.setsockopt(socket.IPPROTO_TCP, option, value)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


class InFolder:
    """Sockets and files in a folder that only the job's user can open: who can open it is trusted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def job(self) -> str:
        return self.folder.name

    def begin(self, count: int, node: str) -> range:
        self._write("servers", str(count))
        return range(count)

    def more(self, most: int) -> range:
        wanted = self.folder / "wanted"
        return range(self.count(), min(int(wanted.read_text()), most) if wanted.exists() else 0)

    def starts(self, number: int) -> bool:
        return True

    def lose(self, number: int, why: str) -> None:
        self._write(f"{number}.lost", why)

    def listen(self, number: int) -> socket.socket:
        path = self._address(number)
        path.unlink(missing_ok=True)
        made = socket.socket(socket.AF_UNIX)
        made.bind(str(path))
        made.listen(4096)
        return made

    def been(self, number: int) -> bool:
        return self._address(number).exists()

    def beside(self, number: int) -> int | None:
        return _beside([self.count()], number)

    def admit(self, made: socket.socket) -> socket.socket:
        return widen(made)

    def worker(self) -> int:
        for number in itertools.count(LATE_WORKERS):
            with contextlib.suppress(FileExistsError):
                (self.folder / f"worker{number}").touch(exist_ok=False)
                return number
        raise AssertionError

    def count(self) -> int:
        return int((self.folder / "servers").read_text())

    def want(self, count: int) -> None:
        self._write("wanted", str(count))

    def call(self, number: int) -> socket.socket:
        made = widen(socket.socket(socket.AF_UNIX))
        try:
            made.connect(str(self._address(number)))
        except OSError:
            made.close()
            raise
        return made

    def lost(self, number: int) -> str:
        path = self.folder / f"{number}.lost"
        return path.read_text() if path.exists() else ""

    def place(self, number: int) -> str:
        return str(self._address(number))

    def close(self) -> None:
        """Nothing is open."""

    def _address(self, number: int) -> Path:
        return self.folder / f"{number}.sock"

    def _write(self, name: str, text: str) -> None:
        """Write a file that is there in full or not at all."""
        part = self.folder / f"{name}.part"
        part.write_text(text)
        part.rename(self.folder / name)


def running() -> list[Path]:
    """The folders of this user's jobs of this machine whose launcher runs, the newest first."""
    found = []
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):
            if path.stat().st_uid == os.getuid():
                os.kill(int((path / LAUNCHER).read_text()), 0)
                found.append(path)
    return sorted(found, key=lambda path: -path.stat().st_mtime)


class Begun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The servers of one machine: `node` is its name in the job."""

    node: str
    count: int


class ByScheduler:
    """Keys of the scheduler: ``servers/begun`` has the servers of each machine, ``servers/at/N`` the address of one.
    Connections are secured as those of the scheduler are."""

    def __init__(self, folder: Path) -> None:
        self._place = Place.read(folder / FILE)
        machines = folder / MACHINES
        self._machines = int(machines.read_text()) if machines.exists() else 1
        self._client = Client(self._place, PATIENCE_SECONDS)
        self._context: ssl.SSLContext | None = None
        self._certificate = b""
        self._index = 0

    @property
    def job(self) -> str:
        made = uuid.uuid4().hex.encode()
        return self._client.swap("servers/job", b"", made).decode()

    def begin(self, count: int, node: str) -> range:
        while True:
            old = self._client.get("servers/begun", 0.0) or b""
            begun = _begun(old)
            if node not in [each.node for each in begun]:
                begun.append(Begun(node, count))
            new = msgspec.json.encode(begun)
            if new == old or self._client.swap("servers/begun", old, new) == new:
                break
        self._index = [each.node for each in begun].index(node)
        first = sum(each.count for each in begun[: self._index])
        return range(first, first + begun[self._index].count)

    def more(self, most: int) -> range:
        wanted = int(self._client.get("servers/wanted", 0.0) or b"0")
        return range(sum(each.count for each in self._all()), min(wanted, most)) if wanted else range(0)

    def starts(self, number: int) -> bool:
        return number % len(self._all()) == self._index

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

    def beside(self, number: int) -> int | None:
        key = f"servers/copy/{number}"
        known = self._client.get(key, 0.0)
        if known is None:
            begun = self._all()
            if len(begun) < self._machines:
                return None
            other = _beside([each.count for each in begun], number)
            known = self._client.swap(key, b"", str(other).encode())  # others may have come since then
        return int(known)

    def admit(self, made: socket.socket) -> socket.socket:
        secret = self._place.trust.secret
        return admit(widen(made), self._context, self._certificate, secret, PARAMETER_SERVER)

    def worker(self) -> int:
        return LATE_WORKERS - 1 + self._client.add("servers/workers", 1)

    def count(self) -> int:
        machines = int(os.environ.get("GROUP_WORLD_SIZE", self._machines))
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

    def want(self, count: int) -> None:
        self._client.set("servers/wanted", str(count).encode())

    def call(self, number: int) -> socket.socket:
        told = self._told(number)
        if told is None:
            raise FileNotFoundError(f"server {number} has not begun")
        made = widen(call(*told, self._place.trust, PARAMETER_SERVER))
        made.settimeout(None)
        return made

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


def _beside(counts: list[int], number: int) -> int:
    """The server for the copy of another one, by the counts of all machines: of the next machine that has any."""
    firsts = [sum(counts[:machine]) for machine in range(len(counts) + 1)]
    mine, place = number % len(counts), 0  # of one that was started later
    for machine, first in enumerate(firsts[:-1]):
        if first <= number < firsts[machine + 1]:
            mine, place = machine, number - first
    others = [(mine + step) % len(counts) for step in range(1, len(counts))]
    for machine in (x for x in others if counts[x]):
        return firsts[machine] + place % counts[machine]
    other = firsts[mine] + (place + 1) % max(counts[mine], 1)
    if other == number:
        raise ServerError(
            f"parameter server {number} has no other for its copy",
            hint="--servers 2, here or on another machine",
        )
    return other


def _begun(known: bytes) -> list[Begun]:
    return msgspec.json.decode(known, type=list[Begun]) if known else []


__all__ = [
    "FOLDER",
    "JOINS",
    "LAUNCHER",
    "MACHINES",
    "PREFIX",
    "ByScheduler",
    "InFolder",
    "Meeting",
    "meeting",
    "meeting_by_hand",
    "running",
]
