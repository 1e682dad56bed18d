"""A rank of `bench.ps_tables`: two tables of click data under one way of sharding them."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import meshwright as mw

WIDTH, IDS, TABLES = 32, 4, 2
STEPS, WARM = 15, 4


class Clicks(nn.Module):
    def __init__(self, rows: int, on_servers: bool) -> None:
        super().__init__()
        device = "meta" if on_servers else "cpu"
        every = [nn.Embedding(rows, WIDTH, sparse=on_servers, device=device) for _ in range(TABLES)]
        self.tables = nn.ModuleList(every)
        self.layers = nn.Sequential(nn.Linear(TABLES * WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = [table(ids[:, n]).mean(1) for n, table in enumerate(self.tables)]
        return self.layers(torch.cat(found, -1)).squeeze(-1)


def model(rows: int, on_servers: bool = False) -> Clicks:
    torch.manual_seed(0)
    return Clicks(rows, on_servers)


def loss(net: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(net(batch["ids"]), batch["clicked"])


def batch(rows: int, examples: int, number: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(number)
    ids = torch.randint(0, rows, (examples, TABLES, IDS), generator=random)
    return {"ids": ids, "clicked": torch.ones(examples)}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def built(way: str, rows: int, given: dict[str, torch.Tensor]) -> Callable[[Any], Any]:
    """The step of one way."""
    net = model(rows, way == "servers")
    if way == "servers":
        for table in net.tables:
            mw.on_server(
                table.to("meta"),
                optimizer=lambda p: torch.optim.SparseAdam(p, lr=0.01),
                normal=(0.0, 0.1),
                seed=1,
            )
        return mw.train_step(net, adam, given, loss=loss, mode="parameter_server")
    cluster = mw.Cluster.local(2) if way == "auto" else None
    plan = mw.plan(net, given, loss=loss, mesh=2, mode=way, cluster=cluster)
    return mw.train_step(net, adam, given, loss=loss, plan=plan)


def main(way: str, rows: int, examples: int) -> None:
    torch.set_num_threads(1)
    given = [batch(rows, examples, number) for number in range(6)]
    step, taken = built(way, rows, given[0]), []
    for number in range(STEPS):
        begin = time.perf_counter()
        float(step(given[number % len(given)]))
        taken.append(time.perf_counter() - begin)
    print(f"step: {1e3 * statistics.median(taken[WARM:]):.1f} ms", flush=True)
    mw.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
