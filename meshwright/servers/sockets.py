"""A worker asks servers that are processes, over sockets.

A request is asked again after a lost connection, until the server is back; servers apply a push once.
"""

from __future__ import annotations

import contextlib
import socket
import time

from meshwright.errors import LaunchError, ServerError
from meshwright.scheduler.client import Unreachable
from meshwright.scheduler.messages import Malformed as MalformedGreeting
from meshwright.servers import messages as m
from meshwright.servers.local import PATIENCE_SECONDS, Requests
from meshwright.servers.places import Meeting
from meshwright.servers.server import Reply
from meshwright.servers.wire import Malformed, pieces, read

RETRY_SECONDS = 0.02
AWAY_SECONDS = (
    60.0  # for which a server may be away: one that is started again loads torch, on a busy machine
)
TURN_SECONDS = 10.0  # after which a server that waits for others says so


def fill_from(made: socket.socket, into: memoryview) -> None:
    """Fill a buffer from a socket. Raises EOFError if it ends before."""
    at = 0
    while at < len(into):
        count = made.recv_into(into[at:])
        if not count:
            raise EOFError("the connection has ended")
        at += count


def send(made: socket.socket, body: m.Request | m.Copying | m.Answer, tensors: m.Tensors) -> None:
    for piece in pieces(body, tensors):
        made.sendall(piece)


def receive(made: socket.socket) -> tuple[object, m.Tensors]:
    """The next message. Raises EOFError, OSError, Malformed."""
    return read(lambda into: fill_from(made, into))


class Remote:
    """Asks servers over sockets; all requests are sent before the first answer is read."""

    def __init__(
        self,
        meeting: Meeting,
        patience: float = PATIENCE_SECONDS,
        away: float = AWAY_SECONDS,
        silent: float | None = None,
    ) -> None:
        """`meeting`: where servers are found. `patience`: seconds to wait for other workers; `away`: for a server that
        does not answer; `silent`: for an answer over a connection, None: as long as it is open."""
        self.meeting, self.patience, self.away, self._silent = meeting, patience, away, silent
        self._open: dict[int, socket.socket] = {}

    def ask(self, requests: Requests, busy: float = 0.0) -> dict[int, Reply]:
        """Raises ServerError for a server that stays away, and if other workers do not come on. `busy`: seconds for
        which a server may do what it is asked."""
        found: dict[int, Reply] = {}
        end, down = time.monotonic() + self.patience + busy, time.monotonic() + self.away + busy
        while len(found) < len(requests):
            left = {n: r for n, r in requests.items() if n not in found}
            sent = [number for number, (body, tensors) in left.items() if self._send(number, body, tensors)]
            for number in sent:
                reply = self._receive(number)
                if reply is not None and not isinstance(reply[0], m.Wait):
                    found[number] = reply
                elif reply is not None:
                    down = time.monotonic() + self.away
            for number in (n for n in left if n not in found):
                if why := self.meeting.lost(number):
                    raise ServerError(f"parameter server {number} is lost", why=why)
            if (missing := set(requests) - set(found)) and time.monotonic() > min(end, down):
                raise self._given_up(min(missing), time.monotonic() > end)
            if any(n not in self._open for n in left if n not in found):
                time.sleep(RETRY_SECONDS)
        return found

    def _send(self, number: int, body: m.Request, tensors: m.Tensors) -> bool:
        try:
            if number not in self._open:
                self._open[number] = self.meeting.call(number)
                self._open[number].settimeout(self._silent)
            send(self._open[number], body, tensors)
        except (OSError, EOFError, Unreachable, MalformedGreeting):
            self._lost(number)
            return False
        except LaunchError as error:
            raise ServerError(error.what, why=error.why, hint=error.hint) from None
        return True

    def _receive(self, number: int) -> Reply | None:
        try:
            body, tensors = receive(self._open[number])
        except (OSError, EOFError, Malformed):
            self._lost(number)
            return None
        assert isinstance(body, m.Answer)
        return body, tensors

    def _lost(self, number: int) -> None:
        with contextlib.suppress(KeyError, OSError):
            self._open.pop(number).close()

    def _given_up(self, number: int, waited: bool) -> ServerError:
        if waited:
            why = f"their pushes were waited for {self.patience:g} s"
            return ServerError("the other workers do not come on", why=why)
        return ServerError(
            f"parameter server {number} does not answer",
            why=f"it was tried for {self.away:g} s at {self.meeting.place(number)}",
            hint="its output is on the terminal of the launcher that started it",
        )

    def another(self) -> Remote:
        return Remote(self.meeting, self.patience, self.away, self._silent)

    def __del__(self) -> None:
        for made in self._open.values():  # not by `close`: at the end of a process its modules may be gone
            made.close()

    def close(self) -> None:
        for number in list(self._open):
            self._lost(number)
        self.meeting.close()


__all__ = ["TURN_SECONDS", "Remote", "receive", "send"]
