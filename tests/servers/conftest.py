"""Workers in threads of a test, and launches of which nothing is left after it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.parameter_server import server_step
from meshwright.servers import of_job
from meshwright.servers.local import Local
from meshwright.servers.server import Server
from tests.launch.conftest import Launches
from tests.servers.served import Job


@pytest.fixture
def launches(tmp_path: Path) -> Iterator[Launches]:
    made = Launches(tmp_path)
    yield made
    made.wait_until_gone()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def start(count: int = 2, every: int = 1 << 30, replicas: int = 0) -> Job:
        made.append(Job(tmp_path, count, every, replicas))
        return made[-1]

    yield start
    for job in made:
        for server in job.running:
            server.close()


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Any]]]:
    """Workers in threads of the test, on servers that they share."""
    here = threading.local()

    def run(workers: int, servers: int, work: Callable[[int], Any]) -> list[Any]:
        shared = Local({n: Server(n) for n in range(servers)}, 30)
        monkeypatch.setattr(of_job, "transport", lambda _: (shared, tuple(range(servers))))
        monkeypatch.setattr(server_step, "launched_world", lambda: workers)
        monkeypatch.setattr(server_step, "launched_rank", lambda: here.rank)
        found: list[Any] = [None] * workers

        def one(rank: int) -> None:
            here.rank = rank
            try:
                found[rank] = work(rank)
            except mw.MeshwrightError as error:
                found[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        torch.compiler.set_stance("default")  # threads have set it across each other
        return found

    yield run
