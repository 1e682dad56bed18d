"""Steps with and without `step.prefetch`, see `ps.py`: tables on two servers, and work that a device does meanwhile."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

import meshwright as mw
from meshwright.launch.nodes import Nodes
from meshwright.launch.servers import started

TABLES, ROWS, WIDTH, BATCH = 8, 200_000, 64, 4096
ROUNDS, STEPS = 5, 8  # of each way in turns, and the steps of one
Ids = Callable[[torch.Generator], torch.Tensor]


class Model(nn.Module):
    """`work_seconds`: of a device, for which the host waits."""

    def __init__(self, work_seconds: float) -> None:
        super().__init__()
        self.work_seconds = work_seconds
        self.tables = nn.ModuleList(
            mw.on_server(nn.Embedding(ROWS, WIDTH, sparse=True, device="meta"), uniform=(0.0, 0.1), seed=n)
            for n in range(TABLES)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = torch.stack([table(ids[:, n]) for n, table in enumerate(self.tables)])
        time.sleep(self.work_seconds)
        return found.mean()


def skewed(random: torch.Generator) -> torch.Tensor:
    """The share of id k falls as 1/k."""
    share = torch.rand(BATCH, TABLES, generator=random, dtype=torch.float64)
    return (ROWS**share).long() - 1


def uniform(random: torch.Generator) -> torch.Tensor:
    return torch.randint(0, ROWS, (BATCH, TABLES), generator=random)


def batches(ids: Ids, seed: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [ids(random) for _ in range(STEPS)]


def run(ids: Ids, work_seconds: float, nodes: Nodes | None = None) -> None:
    with started(2, None, nodes):
        model = Model(work_seconds)
        step = mw.parameter_server(
            model, lambda p: torch.optim.SparseAdam(p, lr=0.01), loss=lambda f, x: f(x)
        )
        found: dict[str, list[float]] = {"without": [], "with": []}

        def ahead(some: list[torch.Tensor]) -> Iterator[torch.Tensor]:
            return step.prefetch(some, lambda x: {t: x[:, n] for n, t in enumerate(model.tables)})

        for number in range(ROUNDS):
            some = batches(ids, number)
            for way, over in (("without", some), ("with", ahead(some))):
                begin = time.perf_counter()
                for batch in over:
                    step(batch)
                found[way].append((time.perf_counter() - begin) / STEPS)
        traffic = step.traffic
        step.close()
    each = {way: 1e3 * statistics.median(times) for way, times in found.items()}
    current = traffic.current_rows / max(1, traffic.prefetched_rows)
    print(
        f"{TABLES} tables, {BATCH:,} {ids.__name__} ids each, {work_seconds * 1e3:.0f} ms of a device: "
        f"{each['without']:.0f} ms a step, {each['with']:.0f} with prefetch; {100 * current:.0f} % were current"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    torch.set_num_threads(1)
    for ids in (skewed, uniform):
        for work_seconds in (0.0, 0.1):
            run(ids, work_seconds)


if __name__ == "__main__":
    main()
