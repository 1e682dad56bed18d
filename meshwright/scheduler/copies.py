"""Files of a job in the memory of its machines: each machine keeps those of its ranks, and copies of a neighbour's.

A rank writes into the folder of its own machine, and sends the same to another one, over a connection that is greeted
as the scheduler's are. When the job begins again, ranks ask whoever has a file for the bytes that they need. Files lie
in sets, of which each belongs to one step: see `Name`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import ssl
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from meshwright.scheduler import messages as m
from meshwright.scheduler.link import admit, call, receive, send
from meshwright.scheduler.trust import Trust, server_context

KEEPER = "keeper of copies"  # the role, in proofs of the secret
WANTED = "copies.wanted"  # beside the store of the job: a rank wants the folder
FOUND = "copies.json"  # so, too: where it is
TENSORS, NOTE = ".safetensors", ".json"  # of a rank; with the note all of it is there
CHUNK_BYTES = 1 << 20
STRANGERS = 64  # connections at a time that have proved nothing yet
FILE = re.compile(r"rank(\d{5,9})(\.safetensors|\.json)")
SET = re.compile(r"([0-9a-f]{8})\.(\d{1,9})\.(\d{1,9})\.(\d{1,18})")


@dataclass(frozen=True, slots=True, order=True)
class Name:
    """A set of files, one for each of `world` ranks: after `step` steps, in an attempt of the job. `key`: what is
    saved. Of two the later one is the greater."""

    step: int
    attempt: int
    world: int
    key: str

    def __str__(self) -> str:
        return f"{self.key}.{self.attempt}.{self.world}.{self.step}"

    @classmethod
    def of(cls, text: str) -> Name | None:
        found = SET.fullmatch(text)
        return None if found is None else cls(int(found[4]), int(found[2]), int(found[3]), found[1])


class Found(msgspec.Struct, frozen=True):
    """Where the copies of a machine are: its folder, and where it is asked for them (no port: it has no neighbours)."""

    folder: str
    host: str = ""
    port: int = 0


class Put(m.Message, frozen=True):
    """So many bytes follow, which are a file."""

    set: str
    file: str
    size: int


class Take(m.Message, frozen=True):
    """Answered by the length of the file, and then by the bytes of each range (offset, length)."""

    set: str
    file: str
    ranges: tuple[tuple[int, int], ...]


def file_of(rank: int, kind: str) -> str:
    return f"rank{rank:05d}{kind}"


def there(folder: Path, key: str) -> dict[Name, list[int]]:
    """The ranks of which a folder has all, by set."""
    found: dict[Name, list[int]] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        name = Name.of(path.name)
        if name is None or name.key != key:
            continue
        with contextlib.suppress(FileNotFoundError):  # it is removed at this moment
            for note in path.glob(f"*{NOTE}"):
                known = FILE.fullmatch(note.name)
                if known and note.with_suffix(TENSORS).exists():
                    found.setdefault(name, []).append(int(known[1]))
    return found


def forget(folder: Path, rank: int, older: Name) -> None:
    """Remove what a rank has in sets that are older than one; its note first, without which there is nothing."""
    for path in list(folder.iterdir()):
        name = Name.of(path.name)
        if (
            name is not None
            and name.key == older.key
            and (name.attempt, name.step) < (older.attempt, older.step)
        ):
            for kind in (NOTE, TENSORS):
                (path / file_of(rank, kind)).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                path.rmdir()


def forget_attempts(folder: Path, before: Name) -> None:
    """Remove the sets of earlier attempts."""
    for path in list(folder.iterdir()):
        name = Name.of(path.name)
        if name is not None and name.key == before.key and name.attempt < before.attempt:
            shutil.rmtree(path, ignore_errors=True)


@dataclass
class CopyServer:
    """Takes files into a folder and hands out bytes of them, to who knows the secret. Within a ``with`` block."""

    folder: Path
    trust: Trust
    host: str
    _socket: socket.socket | None = None
    _strangers: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(STRANGERS))

    def __enter__(self) -> CopyServer:
        self._context, self._certificate = server_context(self.trust)
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        self._socket = socket.create_server((self.host, 0), family=family, backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._socket,), name="copies", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes who accepts
            self._socket.close()

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                made, _ = listening.accept()
            except OSError:
                return
            if not self._strangers.acquire(blocking=False):
                made.close()
                continue
            threading.Thread(target=self._serve, args=(made,), name="copies", daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError, ssl.SSLError, m.Malformed):
            try:
                made = admit(plain, self._context, self._certificate, self.trust.secret, KEEPER)
            finally:
                self._strangers.release()
            with made:
                while True:
                    asked: Put | Take = receive(made, Put | Take, m.GREETING_BYTES << 10)
                    name, file = Name.of(asked.set), FILE.fullmatch(asked.file)
                    if name is None or file is None:
                        raise m.Malformed("no name of a copy")
                    if isinstance(asked, Put):
                        self._put(made, asked, name, int(file[1]))
                    else:
                        self._take(made, asked)

    def _put(self, made: socket.socket, asked: Put, name: Name, rank: int) -> None:
        """Take a file; of the sets before, the newest complete one of its rank stays."""
        known = [
            n
            for n, ranks in there(self.folder, name.key).items()
            if rank in ranks and n.attempt == name.attempt
        ]
        if known and asked.file.endswith(TENSORS):
            forget(self.folder, rank, max(known))
        place = self.folder / str(name) / asked.file
        beside = place.with_name(f".{place.name}.new")
        problem: OSError | None = None
        try:
            place.parent.mkdir(exist_ok=True)
            with beside.open("wb", buffering=0) as out:
                for data in _coming(made, asked.size):
                    if problem is None:
                        try:
                            out.write(data)
                        except OSError as error:  # the rest is read all the same, for the answer to be heard
                            problem = error
            if problem is None:
                beside.replace(place)
        except FileNotFoundError as error:
            problem = error
        if problem is not None:
            beside.unlink(missing_ok=True)
        answer = m.Done() if problem is None else m.Refused(f"no copy of {asked.file}", why=str(problem))
        send(made, answer)

    def _take(self, made: socket.socket, asked: Take) -> None:
        try:
            with (self.folder / asked.set / asked.file).open("rb") as file:
                send(made, m.Number(os.fstat(file.fileno()).st_size))
                for offset, length in asked.ranges:
                    file.seek(offset)
                    while length:
                        data = file.read(min(length, CHUNK_BYTES))
                        if not data:
                            raise EOFError
                        made.sendall(data)
                        length -= len(data)
        except FileNotFoundError as error:
            send(made, m.Refused(f"{asked.file} is not there", why=str(error)))


def _coming(made: socket.socket, size: int) -> Iterator[memoryview]:
    """The bytes that come, in pieces. Raises EOFError."""
    room = memoryview(bytearray(min(size, CHUNK_BYTES)))
    while size:
        count = made.recv_into(room[: min(size, len(room))])
        if not count:
            raise EOFError("the connection has ended")
        yield room[:count]
        size -= count


class Neighbour:
    """Another machine, or this one, as it is asked. Raises OSError, EOFError, LaunchError."""

    def __init__(self, found: Found, trust: Trust) -> None:
        self._found, self._trust = found, trust
        self._socket: socket.socket | None = None

    def _asked(self, message: m.Message) -> socket.socket:
        if self._socket is None:
            self._socket = call(self._found.host, self._found.port, self._trust, KEEPER)
        send(self._socket, message)
        return self._socket

    def _answer(self, made: socket.socket, kind: Any) -> Any:
        answer = receive(made, kind | m.Refused)
        if isinstance(answer, m.Refused):
            raise answer.error()
        return answer

    def put(self, name: Name, file: str, data: memoryview | bytes) -> None:
        """Have it keep a file."""
        made = self._asked(Put(str(name), file, len(data)))
        view = memoryview(data)
        for begin in range(0, len(view), CHUNK_BYTES):
            made.sendall(view[begin : begin + CHUNK_BYTES])
        self._answer(made, m.Done)

    def take(
        self, name: Name, file: str, ranges: Sequence[tuple[int, int]]
    ) -> tuple[int, Iterable[memoryview]]:
        """The length of a file, and the bytes of some ranges of it, one after another in pieces, which have to be read
        before anything else is asked."""
        made = self._asked(Take(str(name), file, tuple(ranges)))
        size = self._answer(made, m.Number).number
        return size, _coming(made, sum(length for _, length in ranges))

    def close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None


__all__ = ["CopyServer", "Found", "Name", "Neighbour", "file_of", "forget", "forget_attempts", "there"]
