"""Small jobs on servers in one process: a table of rows and a dense weight."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.servers import messages as m
from meshwright.servers.local import Local
from meshwright.servers.server import Server
from meshwright.servers.shards import Parameter, spread
from meshwright.servers.worker import Worker

ROWS, WIDTH = 150, 4
SGD: dict[str, Any] = {"lr": 0.5}


def parameters(optimizer: str = "SGD", options: dict[str, Any] = SGD, **more: Any) -> tuple[Parameter, ...]:
    table = Parameter("table", (ROWS, WIDTH), "float32", optimizer, options, table=True, **more)
    return table, Parameter("weight", (3, WIDTH), "float32", optimizer, options)


def values(name: str, rows: range) -> torch.Tensor:
    shape = (ROWS, WIDTH) if name == "table" else (3, WIDTH)
    every = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
    return every[rows.start : rows.stop] if name == "table" else every


def job(
    count: int = 2,
    bound: int | None = 0,
    workers: int = 1,
    patience: float = 30,
    given: Any = None,
    values: Any = values,
    shares: bool = False,
    limit: m.Limit | None = None,
    servers: Local | None = None,
    **more: Any,
) -> tuple[Local, list[Worker]]:
    """Servers with values, and workers that have joined. `servers`: those of another life of the job. `more`: of
    what workers declare."""
    servers = servers or Local({n: Server(n) for n in range(count)}, patience)
    held = given or parameters()
    declare = m.Declare(
        "job", held, spread(held, range(count)), bound, workers, shares=shares, limit=limit, **more
    )
    made = [Worker(servers, n, declare) for n in range(workers)]
    made[0].fill(values)
    for worker in made:
        worker.join()
    return servers, made


def full(worker: Worker) -> dict[str, torch.Tensor]:
    return worker.pull(("weight",), {"table": torch.arange(ROWS)})


__all__ = ["ROWS", "WIDTH", "full", "job", "parameters", "values"]
