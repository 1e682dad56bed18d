"""Seconds until a scheduler has registered many workers and named all to each of them: python -m bench.registration.

Every worker has a connection of its own, greeted with the secret over TLS (`--plain`: neither). They all come at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from meshwright.scheduler import messages as m
from meshwright.scheduler.client import Place
from meshwright.scheduler.trust import SECRET, Trust
from meshwright.scheduler.tunnel import open_streams

WORKERS = 1000
PORT = 29533


async def register(place: Place, index: int) -> None:
    """Register a worker, and wait for all the others."""
    reader, writer = await open_streams(place)
    node = m.Node(f"worker{index}", "host", 1, index)
    answer, number = None, 0
    while not isinstance(answer, m.Formed):
        number += 1
        join = m.Join(node, WORKERS, 0, 0, time.time(), 20.0)
        writer.write(m.frame(m.Ask(uuid.uuid4().hex, number, join)))
        size = m.length(await reader.readexactly(m.LENGTH.size), m.FRAME_BYTES)
        answer = m.decode(await reader.readexactly(size), m.Formed | m.Waiting)
    assert len(answer.nodes) == WORKERS
    writer.close()


async def measure(place: Place) -> float:
    begin = time.monotonic()
    await asyncio.gather(*(register(place, index) for index in range(WORKERS)))
    return time.monotonic() - begin


@contextmanager
def scheduler(secret: str, nodes: int) -> Iterator[Place]:
    """A scheduler process of this machine, for a job of so many nodes; without a secret there is no TLS."""
    settings = json.dumps({"host": "127.0.0.1", "port": PORT, "nodes": nodes})
    command = [sys.executable, "-m", "meshwright.launch.scheduler_process", settings]
    with subprocess.Popen(command, env={**os.environ, SECRET: secret}, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield Place("127.0.0.1", PORT, Trust(secret))
        finally:
            process.terminate()


def main() -> None:
    secret = "" if "--plain" in sys.argv else "the secret of a benchmark"
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 14), hard))
    with scheduler(secret, WORKERS) as place:
        seconds = asyncio.run(measure(place))
    print(f"{WORKERS} workers, {'TLS' if secret else 'plain'}: {seconds:.2f} s")


if __name__ == "__main__":
    main()
