"""A copy of each server on another one: whatever changes a server is sent there, and answered once the copy has it.

The copy is a server of its own that answers the same requests in the same order, so it has the same values, moments
and clocks. A server that is started again takes all that it had from its copy, and no push is lost or applied twice:
one that was not answered is sent again by its worker, and the clocks of the copy say whether it was applied.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from meshwright.errors import LaunchError, MeshwrightError, ServerError
from meshwright.scheduler.messages import Malformed as MalformedGreeting
from meshwright.servers import messages as m
from meshwright.servers import snapshots
from meshwright.servers.places import Meeting
from meshwright.servers.server import Server
from meshwright.servers.sockets import RETRY_SECONDS, receive, send
from meshwright.servers.wire import Malformed

LOOK_SECONDS = 0.1  # between two looks whether the other server is there, while nothing changes
BROKEN = (OSError, EOFError, Malformed, MalformedGreeting, LaunchError)


@dataclass
class Copy:
    """Of one server. `owner`: the connection that may change it."""

    server: Server | None = None
    life: int = 0
    owner: socket.socket | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class Copies:
    """The copies of other servers that this one holds."""

    def __init__(self) -> None:
        self._of: dict[int, Copy] = {}

    @property
    def size_bytes(self) -> int:
        return sum(copy.server.size_bytes for copy in list(self._of.values()) if copy.server is not None)

    def has(self, number: int) -> bool:
        """Return whether there is a copy of a server, of all that it had."""
        return (copy := self._of.get(number)) is not None and copy.server is not None

    def follow(self, made: socket.socket, body: m.Copying) -> Callable[[object, m.Tensors], bool]:
        """The function that answers what comes on a connection which began with `body`; False ends it."""
        copy = self._of.setdefault(body.number, Copy())

        def heard(body: object, tensors: m.Tensors) -> bool:
            with copy.lock:
                match body:
                    case m.Recover():
                        copy.life, copy.owner = copy.life + 1, made
                        send(made, *_recovered(copy))
                    case m.Adopt():
                        send(made, _adopted(copy, made, body, tensors), [])
                    case _:
                        if copy.owner is not made or copy.server is None or not isinstance(body, m.Changing):
                            return False
                        try:
                            reply, _ = copy.server.answer(body, tensors)
                        except Exception:  # as on the server itself, which ends
                            copy.server, reply = None, m.Wait()
                        if isinstance(reply, m.Refused | m.Wait | m.Moved):
                            return False  # it is no copy any more: the server sends all that it has
                        send(made, m.Done(), [])
            return True

        return heard


def _recovered(copy: Copy) -> tuple[m.Answer, m.Tensors]:
    if copy.server is None:
        return m.Recovered(copy.life), []
    kept = snapshots.of(copy.server)
    answer = m.Recovered(copy.life, snapshots.encode(kept.record), tuple(kept.tensors))
    return answer, list(kept.tensors.values())


def _adopted(copy: Copy, made: socket.socket, body: m.Adopt, tensors: m.Tensors) -> m.Answer:
    if body.life < copy.life:
        return m.Recovered(copy.life)
    copy.server = None  # its memory is needed
    try:
        copy.server = _server(body.record, body.names, tensors, body.number)
    except ServerError as error:
        return m.Refused(error.what, error.why, error.hint)
    copy.life, copy.owner = body.life, made
    return m.Done()


def _server(record: bytes, names: tuple[str, ...], tensors: m.Tensors, number: int) -> Server:
    """The server of a message. Raises ServerError."""
    try:
        found = snapshots.decode(record)
        if found.number != number or len(names) != len(tensors):
            raise ServerError(f"a state of server {number} is none of it")
        return snapshots.server_of(snapshots.Snapshot(found, dict(zip(names, tensors, strict=True))))
    except (msgspec.DecodeError, KeyError) as error:
        raise ServerError(f"a state of server {number} cannot be read", why=f"{error!s:.200}") from None


class Replica:
    """The copy of a server on another one, as the server sees it; a thread keeps it. `sent`: the number of changes;
    `held`: how many of them the copy has; `complete`: whether it has all that was before."""

    def __init__(
        self,
        meeting: Meeting,
        number: int,
        lock: threading.RLock,
        server: Callable[[], Server],
        begin: Callable[[Server | None], None],
        end: Callable[[MeshwrightError | None], None],
    ) -> None:
        """`lock`: held while the server changes. `server`: it, now. `begin`: called once, under the lock, with the
        server that the copy is of, None if there is no copy yet. `end`: called where the server cannot go on, with the
        error, None if it runs elsewhere."""
        self.number, self._meeting, self._lock = number, meeting, lock
        self._server, self._begin, self._end = server, begin, end
        self.target: int | None = None
        self.sent, self.held, self.complete = 0, 0, False
        self._passes_on = False  # changes, behind all that was before
        self._life = 0
        self._queue: deque[tuple[m.Request, m.Tensors]] = deque()
        self._ending = False
        self.reached = threading.Condition(lock)
        self._more = threading.Condition(lock)
        threading.Thread(target=self._run, name="replica", daemon=True).start()

    def send(self, body: m.Request, tensors: m.Tensors) -> None:
        """Send a change, in the order in which it happened. Under the lock."""
        self.sent += 1
        if self._passes_on:
            self._queue.append((body, tensors))
            self._more.notify()

    def wait(self, seconds: float) -> bool:
        """Return whether the copy has all that was sent so far, within so many seconds. Under the lock."""
        upto = self.sent
        return self.reached.wait_for(lambda: self.held >= upto or self._ending, seconds) and not self._ending

    def copied(self) -> m.Copied | None:
        if self.target is None:
            return None
        return m.Copied(self.target, self.sent - self.held if self.complete else None)

    def close(self) -> None:
        """Under the lock."""
        self._ending = True
        self._more.notify()
        self.reached.notify_all()

    # ---- the thread

    def _run(self) -> None:
        while not self._ending:
            made: socket.socket | None = None
            try:
                if self.target is None:
                    self.target = self._meeting.beside(self.number)
                if self.target is not None:
                    made = self._meeting.call(self.target)
                    self._follow(made)
            except BROKEN:
                pass
            except ServerError as error:
                self._end(error)
            finally:
                if made is not None:
                    made.close()
                with self._lock:
                    self.complete = self._passes_on = False
            time.sleep(RETRY_SECONDS)

    def _follow(self, made: socket.socket) -> None:
        """Keep the copy over one connection, until it breaks."""
        if not self._life:
            send(made, m.Recover(self.number), [])
            answer, tensors = receive(made)
            if not isinstance(answer, m.Recovered):
                raise Malformed(f"{type(answer).__name__} for a server that begins")
            known = _server(answer.record, answer.names, tensors, self.number) if answer.record else None
            del tensors
            with self._lock:
                self._life, self.complete = answer.life, known is not None
                self._passes_on = self.complete
                self._begin(known)
        if not self.complete:
            self._give_all(made)
        while not self._ending:
            self._pass_on(made)

    def _give_all(self, made: socket.socket) -> None:
        with self._lock:  # nothing may change while it is sent
            self._queue.clear()
            upto, kept = self.sent, snapshots.of(self._server())
            record = snapshots.encode(kept.record)
            send(
                made,
                m.Adopt(self.number, self._life, record, tuple(kept.tensors)),
                list(kept.tensors.values()),
            )
            self._passes_on = True
        answer, _ = receive(made)
        with self._lock:
            if isinstance(answer, m.Done):
                self.held, self.complete = upto, True
            self.reached.notify_all()
        if not isinstance(answer, m.Done):
            self._end(answer.error() if isinstance(answer, m.Refused) else None)

    def _pass_on(self, made: socket.socket) -> None:
        with self._lock:
            self._more.wait_for(lambda: self._queue or self._ending, LOOK_SECONDS)
            some = [self._queue.popleft() for _ in range(len(self._queue))]
        if not some and select.select([made], [], [], 0)[0]:
            raise EOFError("the other server has gone")
        for body, tensors in some:
            send(made, body, tensors)
        for _ in some:
            if not isinstance(receive(made)[0], m.Done):
                raise Malformed("a copy that is none")
        if some:
            with self._lock:
                self.held += len(some)
                self.reached.notify_all()


__all__ = ["Copies", "Replica"]
