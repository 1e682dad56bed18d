"""Ask the scheduler, from a thread that may wait; a lost link or a restart of the scheduler is waited out.

Of one client one request is under way at a time. Waiting is done in short turns, so that threads of one process take
turns, too.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from meshwright.errors import LaunchError
from meshwright.scheduler import messages as m
from meshwright.scheduler.link import CONNECT_SECONDS, SCHEDULER, at, call, receive, send
from meshwright.scheduler.trust import Trust

TURN_SECONDS = 2.0  # of waiting, before other threads may ask
RETRY_SECONDS = (0.05, 2.0)  # between two attempts to connect, the first and the longest
PATIENCE_SECONDS = 60.0  # without a scheduler
FILE = "scheduler.json"  # in which a launcher tells its ranks where it is; only their user can open it


class Unreachable(LaunchError):
    """The scheduler does not answer."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the scheduler is, and how it is trusted."""

    host: str
    port: int
    trust: Trust = field(default_factory=Trust)

    def __str__(self) -> str:
        return at(self.host, self.port)

    def write(self, path: Path) -> None:
        """Write it for processes of this user."""
        told = {"host": self.host, "port": self.port, "secret": self.trust.secret}
        told["certificates"] = str(self.trust.certificates or "")
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
            out.write(msgspec.json.encode(told))

    @classmethod
    def read(cls, path: Path) -> Place:
        told = msgspec.json.decode(path.read_bytes(), type=dict[str, str | int])
        folder = str(told["certificates"])
        return cls(
            str(told["host"]), int(told["port"]), Trust(str(told["secret"]), Path(folder) if folder else None)
        )


def connect(place: Place, reach_seconds: float = CONNECT_SECONDS) -> socket.socket:
    """A connection to the scheduler, greeted. Raises OSError for one that is not there, LaunchError for one that does
    not know the secret."""
    return call(place.host, place.port, place.trust, SCHEDULER, reach_seconds)


class Client:
    """Requests to one scheduler. `patience`: seconds for which one that is away is looked for. `reach_seconds`: until
    its machine answers."""

    def __init__(
        self, place: Place, patience: float = PATIENCE_SECONDS, reach_seconds: float = CONNECT_SECONDS
    ) -> None:
        self.place, self.patience, self._reach_seconds = place, patience, reach_seconds
        self._session, self._number = uuid.uuid4().hex, 0
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def ask(self, body: Any, kind: Any, wait: float = 0.0) -> Any:
        """The answer to a request; `wait`: the seconds that the scheduler may take. Raises LaunchError for a refusal,
        Unreachable when there is no scheduler."""
        with self._lock:
            if self._pid != os.getpid():  # forked: the connection is the parent's
                self._socket, self._session, self._pid = None, uuid.uuid4().hex, os.getpid()
            self._number += 1
            answer = self._asked(m.Ask(self._session, self._number, body), kind | m.Refused, wait)
        if isinstance(answer, m.Refused):
            raise answer.error()
        return answer

    def _asked(self, ask: m.Ask, kind: Any, wait: float) -> Any:
        end, pause = time.monotonic() + self.patience, RETRY_SECONDS[0]
        while True:
            try:
                if self._socket is None:
                    self._socket = connect(self.place, self._reach_seconds)
                self._socket.settimeout(wait + CONNECT_SECONDS)
                send(self._socket, ask)
                return receive(self._socket, kind)
            except m.Malformed as error:
                self.close()
                raise LaunchError(
                    f"what listens at {self.place} is not a scheduler", why=str(error)
                ) from None
            except (OSError, EOFError) as error:
                self.close()
                if time.monotonic() > end:
                    raise _away(self.place, error) from None
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, RETRY_SECONDS[1])

    def __del__(self) -> None:
        made, self._socket = self._socket, None
        if made is not None:  # not by `close`: at the end of a process its modules may be gone
            made.close()

    def own_address(self) -> str:
        """The address of this machine by which the scheduler is reached; empty without a connection."""
        return "" if self._socket is None else str(self._socket.getsockname()[0])

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None

    # ---- keys and values

    def set(self, key: str, value: bytes) -> None:
        self.ask(m.Set(key, value), m.Done)

    def get(self, key: str, seconds: float) -> bytes | None:
        """The value of a key, waited for; None if it has not come."""
        end = time.monotonic() + seconds
        while True:
            turn = max(0.0, min(TURN_SECONDS, end - time.monotonic()))
            found = self.ask(m.Get(key, turn), m.Value, turn)
            if found.value is not None or time.monotonic() >= end:
                return found.value

    def wait(self, keys: tuple[str, ...], seconds: float) -> tuple[str, ...]:
        """Wait for keys; those that have not come."""
        end = time.monotonic() + seconds
        while True:
            turn = max(0.0, min(TURN_SECONDS, end - time.monotonic()))
            found = self.ask(m.Wait(keys, turn), m.Done | m.Missing, turn)
            if isinstance(found, m.Done):
                return ()
            if time.monotonic() >= end:
                return found.keys

    def add(self, key: str, amount: int) -> int:
        return self.ask(m.Add(key, amount), m.Number).number

    def swap(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Write `desired` if the value is `expected`; the value that is there then."""
        return self.ask(m.Swap(key, expected, desired), m.Value).value

    def delete(self, key: str) -> bool:
        return bool(self.ask(m.Delete(key), m.Number).number)

    def count(self) -> int:
        return self.ask(m.Count(), m.Number).number


def _away(place: Place, error: Exception) -> Unreachable:
    hint = "is it started there (--node-rank 0, or meshwright scheduler), is the port open in the firewall?"
    if isinstance(error, socket.gaierror):
        hint = "the host in --master, or MS_SCHED_HOST: a name that resolves on every node, or an address"
    elif not place.trust.secret and isinstance(error, EOFError | ConnectionResetError):
        hint = "if its job has a secret: --secret with that file, and not --insecure"
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return Unreachable(f"no scheduler answers at {place}", why=why, hint=hint)


__all__ = ["Client", "Place", "Unreachable", "connect"]
