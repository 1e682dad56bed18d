"""Servers at sockets, in threads of the test, which may be killed and started again; and their workers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.servers import messages as m
from meshwright.servers.in_folder import InFolder
from meshwright.servers.journal import Journal
from meshwright.servers.server import Server
from meshwright.servers.serving import Serving
from meshwright.servers.shards import spread
from meshwright.servers.sockets import Remote
from meshwright.servers.worker import Worker
from tests.servers.jobs import ROWS, full, parameters, values
from tests.servers.jobs import job as local_job


class Job:
    """Servers in a folder, each with a journal or with a copy on another one, which may be killed and started again."""

    def __init__(self, folder: Path, count: int, every: int, replicas: int) -> None:
        self.folder, self.every, self.replicas = folder, every, replicas
        InFolder(folder).begin(count, "")
        self.running = [self.started(n) for n in range(count)]

    def started(self, number: int) -> Serving:
        if self.replicas:
            met = InFolder(self.folder)
            made = Serving(Server(number, lost=met.been(number)), met, replicas=1)
        else:
            journal = Journal(self.folder / "state" / str(number), number, self.every)
            made = Serving(journal.server(), InFolder(self.folder), journal)
        threading.Thread(target=made.run, daemon=True).start()
        return made

    def kill(self, number: int) -> None:
        """End a server with all that it has not written, and start it again."""
        self.running[number].close()
        self.running[number] = self.started(number)


LIMITS = pytest.mark.parametrize("limit", [None, m.Limit(1.0, outside=False)], ids=["", "clipped"])


def worker(
    job: Job,
    number: int,
    workers: int,
    name: str = "Adam",
    bound: int | None = 0,
    limit: m.Limit | None = None,
) -> Worker:
    given = parameters(name, {"lr": 0.1})
    declare = m.Declare("job", given, spread(given, range(len(job.running))), bound, workers, limit=limit)
    made = Worker(Remote(InFolder(job.folder), 30, 10), number, declare)
    if number == 0:
        made.fill(values)
    made.join()
    return made


def train(made: Worker, steps: int, before: Callable[[int], Any] = lambda _: None) -> None:
    order = torch.Generator().manual_seed(made.number)
    for step in range(steps):
        before(step)
        ids = torch.randint(0, ROWS, (5,), generator=order)
        held = made.pull(("weight",), {"table": ids})
        made.push(5.0, {"weight": held["weight"].sin()}, {"table": (ids, held["table"].cos())})


def plain(steps: int, limit: m.Limit | None = None) -> dict[str, torch.Tensor]:
    """The same on servers in this process."""
    _, workers = local_job(2, workers=2, given=parameters("Adam", {"lr": 0.1}), limit=limit)
    threads = [threading.Thread(target=train, args=(each, steps)) for each in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return full(workers[0])
