"""A port of this machine's loopback address that leads to torch's own store, through the scheduler.

So scripts that call ``torch.distributed.init_process_group()`` themselves meet over machines, too, and nothing of it is
in the clear.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import uuid

from meshwright.scheduler import messages as m
from meshwright.scheduler.client import Place
from meshwright.scheduler.server import pump
from meshwright.scheduler.trust import client_context, nonce, proof, same

LOOPBACK = "127.0.0.1"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def open_streams(place: Place) -> Streams:
    """A greeted connection to the scheduler, as `client.connect` makes one. Raises OSError, EOFError, Malformed."""
    context = client_context(place.trust)
    reader, writer = await asyncio.open_connection(place.host, place.port, ssl=context)
    try:
        secured = writer.get_extra_info("ssl_object")
        certificate = secured.getpeercert(binary_form=True) if secured is not None else b""
        mine, secret = nonce(), place.trust.secret
        writer.write(m.frame(m.Hello(m.VERSION, mine)))
        answer: m.Challenge = await read(reader, m.Challenge)
        both = (mine, answer.nonce, certificate or b"")
        if not same(answer.proof, proof(secret, "scheduler", *both)):
            raise m.Malformed("no proof of the secret")
        writer.write(m.frame(m.Prove(proof(secret, "node", *both))))
        await read(reader, m.Welcome)
    except BaseException:
        writer.transport.abort()
        raise
    return reader, writer


async def read(reader: asyncio.StreamReader, kind: type[m.T]) -> m.T:
    """The next message, which is small."""
    size = m.length(await reader.readexactly(m.LENGTH.size), m.GREETING_BYTES)
    return m.decode(await reader.readexactly(size), kind)


class Tunnel:
    """Within a ``with`` block. `number`: the port."""

    def __init__(self, place: Place, attempt: int) -> None:
        self._place, self._attempt = place, attempt
        self._socket = socket.socket()
        self._socket.bind((LOOPBACK, 0))
        self._socket.listen(4096)
        self.number: int = self._socket.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="tunnel to torch's store", daemon=True)

    def __enter__(self) -> Tunnel:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        async with await asyncio.start_server(self._connected, sock=self._socket):
            await self._stop.wait()
        mine = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there: Streams | None = None
        try:
            there = await open_streams(self._place)
            there[1].write(m.frame(m.Ask(uuid.uuid4().hex, 1, m.Tunnel(self._attempt))))
            await read(there[0], m.Done)
            ways = (pump(reader, there[1]), pump(there[0], writer))
            await asyncio.wait(list(map(asyncio.ensure_future, ways)), return_when=asyncio.FIRST_COMPLETED)
        except (OSError, EOFError, m.Malformed):
            pass  # torch says that its store is not there
        finally:
            for stream in (writer, *(there[1:] if there else ())):
                with contextlib.suppress(OSError):
                    stream.close()


__all__ = ["Tunnel", "open_streams"]
