"""A scheduler in a thread of the test, at a free port of the loopback address."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from meshwright.scheduler.client import Place
from meshwright.scheduler.members import Members
from meshwright.scheduler.server import Server
from meshwright.scheduler.state import Kept
from meshwright.scheduler.trust import Trust, server_context

SECRET = "a secret that is long enough"


@contextlib.contextmanager
def serving(
    secret: str = SECRET,
    *,
    path: Path | None = None,
    port: int = 0,
    nodes: int = 0,
    certificates: Path | None = None,
) -> Iterator[tuple[Place, Server]]:
    """Where it listens, and the scheduler itself. `path`: of what it keeps."""
    kept = Kept(path)
    trust = Trust(secret, certificates)
    context, certificate = server_context(trust)
    server = Server(kept, Members(kept, time.monotonic(), nodes), secret, certificate)
    loop, ready, found = asyncio.new_event_loop(), threading.Event(), []
    stop = asyncio.Event()

    async def serve() -> None:
        listening = await server.serve(("127.0.0.1", port), context)
        found.append(listening.sockets[0].getsockname()[1])
        ticking = asyncio.create_task(server.tick())
        ready.set()
        await stop.wait()
        listening.close()
        ticking.cancel()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(30)
    try:
        yield Place("127.0.0.1", found[0], trust), server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
        kept.close()
