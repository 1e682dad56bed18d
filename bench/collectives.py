"""Measure collectives over gloo on this machine and fit latency and bytes per second to each.

    python bench/collectives.py [--ranks 2 4] [--repeats 15]

The fit is the model of `meshwright.redistribute.prices`: seconds = rounds · latency + bytes sent / bytes per second,
least squares on logarithms (soft-L1, since a shared machine has outliers) over all sizes and rank counts together.
Medians over repeats of the slowest rank.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from scipy.optimize import least_squares
from torch.multiprocessing.spawn import spawn

from meshwright.core.collectives import PRICED
from meshwright.redistribute.prices import rounds
from meshwright.redistribute.steps import wire_elements
from meshwright.runtime.stores import FileStore

SIZES = [1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22, 1 << 24]  # bytes of the larger tensor of a rank
reduce_scatter = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)  # renamed in torch 2.13
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def operation(kind: str, rank: int, ranks: int, count: int) -> Callable[[], object]:
    """One collective on `count` float32 elements (the larger side), ready to be called."""
    full, part = torch.ones(count), torch.ones(count // ranks)
    match kind:
        case "all_reduce":
            return lambda: dist.all_reduce(full)
        case "reduce_scatter":
            return lambda: reduce_scatter(part, full)
        case "all_gather":
            return lambda: all_gather(full, part)
        case "all_to_all":
            out = torch.empty_like(full)
            return lambda: dist.all_to_all_single(out, full)
        case _:  # each rank sends to the next

            def ring() -> None:
                got = torch.empty_like(full)
                work = [dist.isend(full, (rank + 1) % ranks), dist.irecv(got, (rank - 1) % ranks)]
                for w in work:
                    w.wait()  # pyright: ignore[reportOptionalMemberAccess]

            return ring


def measure(rank: int, ranks: int, store_file: str, repeats: int, results: object) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(store_file, ranks), rank=rank, world_size=ranks)
    for kind in PRICED:
        for size in SIZES:
            call = operation(kind, rank, ranks, size // 4)
            for _ in range(3):
                call()
            seconds = []
            for _ in range(repeats):
                dist.barrier()
                began = time.perf_counter()
                call()
                seconds.append(time.perf_counter() - began)
            slowest = torch.tensor(seconds, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if rank == 0:
                results[kind, ranks, size] = statistics.median(slowest.tolist())  # pyright: ignore[reportIndexIssue]
    dist.barrier()
    dist.destroy_process_group()


def sent_bytes(kind: str, ranks: int, size: int) -> float:
    """Bytes one rank sends when the larger side has `size`."""
    match kind:
        case "all_gather":
            return wire_elements(kind, ranks, size // ranks, size)
        case "reduce_scatter":
            return wire_elements(kind, ranks, size, size // ranks)
        case "all_to_all":
            return wire_elements(kind, ranks, size, size)
        case "send":
            return float(size)
        case _:
            return wire_elements(kind, ranks, size, size)


def fit(kind: str, measured: dict[tuple[int, int], float]) -> tuple[float, float]:
    """(latency seconds per round, bytes per second)."""
    turns = np.array([1 if kind == "send" else rounds(kind, ranks) for ranks, _ in measured])
    sent = np.array([sent_bytes(kind, ranks, size) for ranks, size in measured])
    seconds = np.log(list(measured.values()))

    def miss(guess: np.ndarray) -> np.ndarray:
        return np.log(turns * np.exp(guess[0]) + sent / np.exp(guess[1])) - seconds

    latency, rate = np.exp(least_squares(miss, np.log([1e-4, 1e9]), loss="soft_l1").x)
    return float(latency), float(rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()

    manager = multiprocessing.Manager()
    results = manager.dict()
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (ranks, f"{folder}/store", options.repeats, results)
            spawn(measure, args=arguments, nprocs=ranks)
    found = dict(results)
    table = Table(title=f"gloo, median ms, {os.cpu_count()} cores")
    for heading in ("kind", "ranks", *(f"{s >> 10} KiB" for s in SIZES), "fit: µs/round", "GB/s"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for kind in PRICED:
        latency, rate = fit(kind, {(r, s): t for (k, r, s), t in found.items() if k == kind})
        for ranks in options.ranks:
            cells = [f"{found[kind, ranks, s] * 1e3:.3f}" for s in SIZES]
            table.add_row(kind, str(ranks), *cells, f"{latency * 1e6:.0f}", f"{rate / 1e9:.2f}")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
