"""A server at its socket: a thread for each connection, one request of all at a time.

A worker whose connection has closed may come again within a moment; then nobody waits for it any more.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence

from msgspec import structs

from meshwright.errors import LaunchError, MeshwrightError, ServerError
from meshwright.scheduler.messages import Malformed as MalformedGreeting
from meshwright.servers import messages as m
from meshwright.servers.journal import Journal
from meshwright.servers.places import SILENT_SECONDS, Meeting, close_after
from meshwright.servers.replicas import Copies, Replica
from meshwright.servers.server import Reply, Server
from meshwright.servers.sockets import TURN_SECONDS, receive, send
from meshwright.servers.wire import Malformed

STRANGERS = 1024  # connections that have proved nothing; the oldest has to go when one more comes
GONE_SECONDS = 1.0  # for which a worker may be away
SETTLE_SECONDS = 0.1  # between two questions to the first server, while it is away
RESTART_SECONDS = 60.0  # after a restart of the server, of which a worker hears when it asks for something


class Serving:
    """`meeting`: where it is found. `journal`: where requests are written before they are answered, None to keep
    nothing. `replicas`: how many other servers have a copy; with one, the server begins with what that has."""

    def __init__(
        self, server: Server, meeting: Meeting, journal: Journal | None = None, replicas: int = 0
    ) -> None:
        self.server, self.journal = server, journal
        self._began, self._worked = time.monotonic(), 0.0  # seconds of work
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._connection_of: dict[int, socket.socket | None] = {}
        self._open: set[socket.socket] = set()
        self._strangers: dict[socket.socket, None] = {}
        self._asking: set[int] = set()  # workers about which the first server is asked
        self._closed = False
        self.copies = Copies()
        self._ready = False
        self.failure: MeshwrightError | None = None  # why it has ended
        self._meeting, self._listening = meeting, meeting.listen(server.number)
        self.replica: Replica | None = None
        if replicas:
            of = (lambda: self.server, self._begin, self._fail)
            self.replica = Replica(meeting, server.number, lock, *of)
        else:
            self._begin(None)

    def _begin(self, known: Server | None) -> None:
        """Answer from here on. `known`: what the copy on another server has, which is the newest."""
        gone: Sequence[int] = ()
        with contextlib.suppress(LaunchError):  # the scheduler is away for a moment
            gone = self._meeting.gone()
        if known is None and self.server.lost:
            threading.Thread(target=self._tell_loss, name="loss", daemon=True).start()
        with self._changed:
            if known is not None:
                self.server = known
                if self.journal is not None:
                    self.journal.begin_with(known)
            for worker in self.server.clocks.of:  # after a restart: who does not come again is lost
                if self._connection_of.setdefault(worker) is None:
                    self._later(GONE_SECONDS if worker in gone else RESTART_SECONDS, worker, None)
            self._ready = True
            self._changed.notify_all()

    def _tell_loss(self) -> None:
        """Let workers that start from now on begin anew."""
        heard = False
        while not (heard or self._closed):
            with contextlib.suppress(LaunchError):  # the scheduler is away for a moment
                self._meeting.lose_values(self.server.number)
                heard = True

    def run(self) -> None:
        """Serve until the socket is closed."""
        while True:
            try:
                made, _ = self._listening.accept()
            except OSError:
                return
            self._strangers[made] = None
            if len(self._strangers) > STRANGERS:
                _end(next(iter(self._strangers)))
            threading.Thread(target=self._greet, args=(made,), daemon=True).start()

    def close(self) -> None:
        """End as a process ends: all connections are closed, and nothing is written any more."""
        self._closed = True
        for made in (self._listening, *list(self._open), *list(self._strangers)):
            _end(made)
        self._listening.close()
        with self._changed:  # not in the middle of a request
            if self.journal is not None:
                self.journal.close()
                self.journal = None
            if self.replica is not None:
                self.replica.close()

    def has_workers(self) -> bool:
        """Return whether a worker is connected that has not left."""
        with self._changed:
            return any(made in self._open for made in self._connection_of.values())

    def _fail(self, failure: MeshwrightError | None) -> None:
        self.failure = failure
        self.close()

    def _greet(self, plain: socket.socket) -> None:
        try:
            made = self._meeting.admit(plain)
            if self.replica is not None:  # a silent machine is given up sooner
                close_after(made, SILENT_SECONDS)
        except (OSError, EOFError, MalformedGreeting):
            plain.close()
            return
        finally:
            self._strangers.pop(plain, None)
        self._converse(made)

    def _converse(self, made: socket.socket) -> None:
        self._open.add(made)
        try:
            while True:
                body, tensors = receive(made)
                if isinstance(body, m.Copying):
                    heard = self.copies.follow(made, body)
                    while heard(body, tensors):
                        body, tensors = receive(made)
                    return
                if not isinstance(body, m.Request):
                    return
                send(made, *self._answer(made, body, tensors))
        except (OSError, EOFError, Malformed):
            pass  # it has gone, or is no worker
        except Exception as error:  # what it has may be half of an update
            said = f"{type(error).__name__}: {error}"
            self._fail(ServerError(f"parameter server {self.server.number} has failed", why=said))
        finally:
            made.close()
            self._open.discard(made)
            with self._changed:
                gone = [worker for worker, owner in self._connection_of.items() if owner is made]
            for worker in gone:
                self._later(GONE_SECONDS, worker, made)

    def _answer(self, made: socket.socket, body: m.Request, tensors: m.Tensors) -> Reply:
        end = time.monotonic() + TURN_SECONDS
        with self._changed:
            if not self._changed.wait_for(lambda: self._ready, TURN_SECONDS):
                return m.Wait(), []
            if isinstance(body, m.Join | m.Pull | m.Push | m.Commit | m.Deal):
                self._connection_of[body.worker] = made
            elif isinstance(body, m.Leave):
                self._connection_of.pop(body.worker, None)
            while True:
                reply = (m.Wait(), []) if self._asks_first(body) else self._answered(body, tensors)
                left = end - time.monotonic()
                if not isinstance(reply[0], m.Wait) or left <= 0:
                    return reply if self._kept(body, reply[0]) else (m.Wait(), [])
                self._changed.wait(left)

    def _kept(self, body: m.Request, answer: m.Answer) -> bool:
        """Return whether the copy on the other server has what was done, if this is asked again too."""
        changes = isinstance(body, m.Changing) and not isinstance(answer, m.Refused | m.Wait | m.Moved)
        return self.replica is None or not changes or self.replica.wait(TURN_SECONDS)

    def _answered(self, body: m.Request, tensors: m.Tensors) -> Reply:
        """Answer, and write down what has changed something before anybody hears of it."""
        begin = time.monotonic()
        reply = self.server.answer(body, tensors)
        changes = isinstance(body, m.Changing) and not isinstance(reply[0], m.Refused | m.Wait | m.Moved)
        if changes and not (isinstance(reply[0], m.Done) and reply[0].repeated):
            if self.journal is not None:
                self.journal.write(self.server, body, tensors)
            if self.replica is not None:
                self.replica.send(body, tensors)
            self._changed.notify_all()
        now = time.monotonic()
        self._worked += now - begin
        if isinstance(reply[0], m.Seen):
            copied = None if self.replica is None else self.replica.copied()
            seconds, held = (now - self._began, self._worked), self.copies.size_bytes
            return structs.replace(reply[0], seconds=seconds, copied=copied, copies_bytes=held), reply[1]
        return reply

    def _later(self, seconds: float, worker: int, made: socket.socket | None) -> None:
        timer = threading.Timer(seconds, self._lost, (worker, made))
        timer.daemon = True
        timer.start()

    def _lost(self, worker: int, made: socket.socket | None) -> None:
        """Nobody waits for a worker that has not come again, unless all are started again with it."""
        with self._changed:
            if self._connection_of.get(worker, self) is made and not self.server.comes_again(worker):
                del self._connection_of[worker]
                if self.server.in_doubt(worker):
                    self._settle(worker)
                else:
                    self._answered(m.Leave(self.server.model, worker), [])

    # ---- pushes of lost workers, see `server.py`

    def _asks_first(self, body: m.Request) -> bool:
        """Whether a request waits for the first server's word: it would drop a push that may count there."""
        if isinstance(body, m.Join | m.Leave):
            workers = [body.worker]
        elif isinstance(body, m.Declare) and self.server.declared and body.life > self.server.declared.life:
            workers = list(self.server.prepared)
        else:
            return False
        asked = [worker for worker in workers if self.server.in_doubt(worker)]
        for worker in asked:
            self._settle(worker)
        return bool(asked)

    def _settle(self, worker: int) -> None:
        """Begin to ask the first server about the push that a lost worker has prepared. Under the lock."""
        if worker not in self._asking:
            self._asking.add(worker)
            asked = worker, self.server.map.first, m.Leave(self.server.model, worker, lost=True)
            threading.Thread(target=self._settled, args=asked, name="settle", daemon=True).start()

    def _settled(self, worker: int, first: int, leave: m.Leave) -> None:
        pushed = None
        while pushed is None and not self._closed:
            with contextlib.suppress(OSError, EOFError, LaunchError, Malformed, MalformedGreeting):
                with contextlib.closing(self._meeting.call(first)) as made:
                    send(made, leave, [])
                    answer, _ = receive(made)
                if isinstance(answer, m.Left | m.Refused):  # refused: that job is over
                    pushed = answer.pushed if isinstance(answer, m.Left) else 0
            if pushed is None:
                time.sleep(SETTLE_SECONDS)
        with self._changed:
            push = self.server.prepared.get(worker)
            if pushed is not None and push is not None:
                if pushed > push.clock:
                    commit = m.Commit(leave.model, self.server.map.version, worker, push.clock)
                    # who moves blocks may have to allow it first
                    self._changed.wait_for(lambda: not isinstance(self._answered(commit, [])[0], m.Wait))
                self._answered(leave, [])
            self._asking.discard(worker)
            self._changed.notify_all()


def _end(made: socket.socket) -> None:
    with contextlib.suppress(OSError):
        made.shutdown(socket.SHUT_RDWR)


__all__ = ["Serving"]
