"""The scheduler's side of every connection: greet, prove, answer.

Until the secret is proved a connection may say two small messages within a few seconds. After that each message is
decoded into a request, or the connection ends. One connection has one request at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from meshwright.scheduler import messages as m
from meshwright.scheduler.link import SCHEDULER, challenged
from meshwright.scheduler.members import AT_ONCE_SECONDS, Members
from meshwright.scheduler.state import Kept
from meshwright.scheduler.trust import same

GREETING_SECONDS = 10.0
TICK_SECONDS = 0.25
LATE_SECONDS = 1.0  # between two ticks, when this process, or its machine, stood still
T = TypeVar("T")
STRANGERS = 2048  # connections that have proved nothing; the oldest has to go when one more comes
LONGEST_WAIT_SECONDS = 30.0  # of one answer: who wants to wait longer asks again


@dataclass
class Server:
    """`torch_store`: starts torch's own store of an attempt and returns its port on the loopback address."""

    kept: Kept
    members: Members
    secret: str
    certificate: bytes = b""
    torch_store: Callable[[int], int] | None = None
    _strangers: OrderedDict[asyncio.StreamWriter, None] = field(default_factory=OrderedDict)
    _of_keys: dict[str, set[asyncio.Future[None]]] = field(default_factory=dict)
    _of_members: set[asyncio.Future[None]] = field(default_factory=set)
    _connection_of: dict[str, int] = field(default_factory=dict)
    _session_of: dict[str, str] = field(default_factory=dict)  # of the client that has joined as a node
    _formed: tuple[m.Formed | m.Refused, bytes] | None = None

    # ---- connections

    async def serve(self, address: tuple[str, int], context: ssl.SSLContext | None) -> asyncio.Server:
        """Begin to listen."""
        more = {} if context is None else {"ssl": context, "ssl_handshake_timeout": GREETING_SECONDS}
        return await asyncio.start_server(self._connected, *address, backlog=4096, **more)

    async def tick(self) -> None:
        """Look for lost nodes until the job has ended, and a little longer, so that all hear of it."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            before, now = self.members.seen, time.monotonic()
            if now - last > LATE_SECONDS:
                self.members.excuse(now - last, now)
            last = now
            self.members.tick(now)
            if self.members.seen != before:
                self._changed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._strangers[writer] = None
        if len(self._strangers) > STRANGERS:
            next(iter(self._strangers)).transport.abort()
        try:
            async with asyncio.timeout(GREETING_SECONDS):
                known = await self._greet(reader, writer)
            self._strangers.pop(writer, None)
            if known:
                await self._converse(reader, writer)
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError, m.Malformed):
            pass  # a stranger, or a node that has gone: the members' clock tells
        finally:
            self._strangers.pop(writer, None)
            self._closed(id(writer))
            writer.transport.abort()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        hello: m.Hello = await self._read(reader, m.GREETING_BYTES, m.Hello)
        try:
            challenge, expected = challenged(hello, self.secret, self.certificate, SCHEDULER)
        except m.Malformed as error:
            writer.write(m.frame(m.Refused(str(error))))
            return False
        writer.write(m.frame(challenge))
        answer: m.Prove = await self._read(reader, m.GREETING_BYTES, m.Prove)
        if not same(answer.proof, expected.proof):
            return False
        writer.write(m.frame(m.Welcome()))
        return True

    @staticmethod
    async def _read(reader: asyncio.StreamReader, limit: int, kind: type[T]) -> T:
        size = m.length(await reader.readexactly(m.LENGTH.size), limit)
        return m.decode(await reader.readexactly(size), kind)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            ask: m.Ask = await self._read(reader, m.FRAME_BYTES, m.Ask)
            if isinstance(ask.body, m.Tunnel):
                await self._tunnel(ask.body.attempt, reader, writer)
                return
            if isinstance(ask.body, m.Watch):
                self._connection_of[ask.body.node] = id(writer)
            writer.write(await self._unless_closed(reader, ask, id(writer)))
            await writer.drain()

    async def _unless_closed(self, reader: asyncio.StreamReader, ask: m.Ask, connection: int) -> bytes:
        """The answer; raises EOFError as soon as who waits for it has gone."""
        if not getattr(ask.body, "seconds", 0.0):
            return await self._answer(ask, connection)
        answer = asyncio.ensure_future(self._answer(ask, connection))
        more = asyncio.ensure_future(reader.read(1))  # who asks says nothing before the answer
        try:
            await asyncio.wait({answer, more}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise EOFError
            return await answer
        finally:
            answer.cancel()
            more.cancel()
            await asyncio.wait({more})
            if not more.cancelled():
                more.exception()

    def _closed(self, connection: int) -> None:
        for node in [n for n, c in self._connection_of.items() if c == connection]:
            del self._connection_of[node]
            self.members.closed(node, time.monotonic())
            self._changed()

    # ---- answers

    async def _answer(self, ask: m.Ask, connection: int) -> bytes:
        body = ask.body
        match body:
            case m.Get():
                await self._wait((body.key,), body.seconds)
                return m.frame(m.Value(self.kept.pairs.get(body.key)))
            case m.Wait():
                await self._wait(body.keys, body.seconds)
                missing = tuple(k for k in body.keys if k not in self.kept.pairs)
                return m.frame(m.Missing(missing) if missing else m.Done())
            case m.Count():
                return m.frame(m.Number(len(self.kept.pairs)))
            case m.Join():
                return await self._join(ask.session, body, connection)
            case m.Watch():
                return await self._watch(body)
            case m.Report():
                self.members.report(body, time.monotonic())
                self._changed()
                return m.frame(m.Done())
            case m.Ranks():
                before, standing = self.members.seen, self.members.ranks(body, time.monotonic())
                if self.members.seen != before:
                    self._changed()
                return m.frame(standing)
            case m.Leave():
                if self._session_of.get(body.node, ask.session) == ask.session:
                    self.members.leave(body.node)
                    self._connection_of.pop(body.node, None)
                    self._changed()
                return m.frame(m.Done())
            case m.Set() | m.Add() | m.Swap() | m.Delete():
                return self._change(ask, body)
        raise m.Malformed("a request that has no answer")

    def _change(self, ask: m.Ask, body: m.Set | m.Add | m.Swap | m.Delete) -> bytes:
        """Change a pair, once, however often a client that lost its connection asks for it."""
        known = self.kept.answered(ask.session, ask.number)
        if known is not None:
            return known
        answer: m.Answer = m.Done()
        self.kept.begin()
        match body:
            case m.Set():
                self.kept.set(body.key, body.value)
            case m.Add():
                number = int(self.kept.pairs.get(body.key, b"0")) + body.amount
                self.kept.set(body.key, str(number).encode())
                answer = m.Number(number)
            case m.Swap():
                value = self.kept.pairs.get(body.key)
                if (value or b"") == body.expected:
                    self.kept.set(body.key, body.desired)
                    value = body.desired
                answer = m.Value(body.expected if value is None else value)
            case m.Delete():
                answer = m.Number(int(self.kept.delete(body.key)))
        encoded = m.frame(answer)
        self.kept.commit(ask.session, ask.number, encoded)
        for future in self._of_keys.pop(body.key, ()):
            if not future.done():
                future.set_result(None)
        return encoded

    async def _wait(self, keys: tuple[str, ...], seconds: float) -> None:
        """Wait until all keys are there, or for a time."""
        end = time.monotonic() + min(seconds, LONGEST_WAIT_SECONDS)
        while (missing := next((k for k in keys if k not in self.kept.pairs), None)) is not None:
            waiting = self._of_keys.setdefault(missing, set())
            if not await _woken(waiting, end - time.monotonic()):
                return

    async def _join(self, session: str, join: m.Join, connection: int) -> bytes:
        now = time.monotonic()
        refused = self._twice(session, join.node, now) or self.members.join(join, now, time.time())
        if refused is not None:  # this connection's end, or a Leave, is not that of the node with this id
            return m.frame(refused)
        self._session_of[join.node.id], self._connection_of[join.node.id] = session, connection
        self._changed()
        end = time.monotonic() + min(join.seconds, LONGEST_WAIT_SECONDS)
        while (formed := self.members.formed(join.node.id)) is None:
            if not await _woken(self._of_members, end - time.monotonic()):
                return m.frame(self.members.waiting())
        if self._formed is None or self._formed[0] != formed:
            self._formed = (formed, m.frame(formed))
        return self._formed[1]

    def _twice(self, session: str, node: m.Node, now: float) -> m.Refused | None:
        """Why a second launcher of a machine may not be the node that the first one, which speaks, is."""
        if node.id not in self._connection_of or self._session_of.get(node.id, session) == session:
            return None
        members = self.members
        same, silent = (
            members.here.get(node.id) or members.facts.node(node.id),
            now - members.heard.get(node.id, now),
        )
        if same is None or same.host != node.host or silent > AT_ONCE_SECONDS:
            return None
        return m.Refused(
            f"the node id {node.id} is taken",
            why=f"another launcher of {node.host} has it, and is at work",
            hint="end that one first; for one more node, a --node-rank, or a --node-id, of its own",
        )

    async def _watch(self, watch: m.Watch) -> bytes:
        self.members.watch(watch.node, time.monotonic(), watch.attempt)
        # a node that waits for an answer is not heard of meanwhile
        end = time.monotonic() + min(watch.seconds, LONGEST_WAIT_SECONDS, self.members.node_seconds / 3)
        while self.members.seen == watch.seen and await _woken(self._of_members, end - time.monotonic()):
            pass
        self.members.watch(watch.node, time.monotonic(), watch.attempt)
        return m.frame(self.members.state)

    def _changed(self) -> None:
        waiting, self._of_members = self._of_members, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    # ---- tunnels

    async def _tunnel(self, attempt: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass bytes between a connection and torch's own store of an attempt."""
        if self.torch_store is None or attempt != self.members.facts.attempt:
            return
        to_store = await asyncio.open_connection("127.0.0.1", self.torch_store(attempt))
        writer.write(m.frame(m.Done()))
        try:
            ways = (pump(reader, to_store[1]), pump(to_store[0], writer))
            await asyncio.wait(list(map(asyncio.create_task, ways)), return_when=asyncio.FIRST_COMPLETED)
        finally:
            to_store[1].close()


async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Pass bytes on until there are no more."""
    with contextlib.suppress(OSError):
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()


async def _woken(waiting: set[asyncio.Future[None]], seconds: float) -> bool:
    """Wait in a set for something to change; False when the time is over."""
    if seconds <= 0:
        return False
    future = asyncio.get_running_loop().create_future()
    waiting.add(future)
    try:
        async with asyncio.timeout(seconds):
            await future
        return True
    except TimeoutError:
        return False
    finally:
        waiting.discard(future)


__all__ = ["Server", "pump"]
