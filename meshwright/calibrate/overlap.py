"""How much computing slows down while a collective runs, and the collective while the rank computes."""

from __future__ import annotations

import statistics
import time

import torch

from meshwright.calibrate.bench import Bench
from meshwright.calibrate.plan import Pace, Point

START_BYTES = 1 << 22
WANTED_SECONDS = 0.05  # of the collective alone: long against a product
QUICK_SECONDS = 0.01  # in a quick look
MOST_BYTES = 1 << 28
PRODUCT = {"cpu": 256, "cuda": 4096}  # rows of the matrices


def measure(bench: Bench, pace: Pace) -> list[Point]:
    """Two points: the slowdown of computing, and that of the collective (as `seconds`, work 1 and 2)."""
    size = PRODUCT.get(bench.device.type, 256)
    a = torch.randn(size, size, device=bench.device)
    buffer = torch.ones(START_BYTES // 4, device=bench.device)
    alone = _reduce_seconds(bench, buffer)
    while alone < (QUICK_SECONDS if pace.few else WANTED_SECONDS) and buffer.numel() * 4 < MOST_BYTES:
        buffer = torch.ones(buffer.numel() * 2, device=bench.device)
        alone = _reduce_seconds(bench, buffer)
    product = bench.seconds(lambda: torch.mm(a, a), pace.point_seconds)
    compute, collective = [], []
    for _ in range(1 if pace.few else 3):
        both, products = _together(bench, buffer, a)
        if products:
            compute.append(both / products / product)
        collective.append(both / alone)
    slow = statistics.median(compute) if compute else 1.0
    return [
        Point(1, max(1.0, bench.slowest(slow))),
        Point(2, max(1.0, bench.slowest(statistics.median(collective)))),
    ]


def _reduce_seconds(bench: Bench, buffer: torch.Tensor) -> float:
    found = []
    for _ in range(3):
        bench.meet()
        found.append(bench.sample(lambda: bench.comm.all_reduce_start(buffer, bench.axes).wait(), 1))
        buffer.fill_(1.0)
    return bench.slowest(statistics.median(found))


def _together(bench: Bench, buffer: torch.Tensor, a: torch.Tensor) -> tuple[float, int]:
    """Seconds until a collective is done beside which products run, and how many were."""
    bench.meet()
    bench.finish()
    buffer.fill_(1.0)
    began, products = time.perf_counter(), 0
    pending = bench.comm.all_reduce_start(buffer, bench.axes)
    work = getattr(pending, "work", None)
    while work is not None and not work.is_completed():
        torch.mm(a, a)
        # so that what is counted has run; the collective has a stream of its own
        if bench.device.type == "cuda":
            torch.cuda.current_stream(bench.device).synchronize()
        products += 1
    ended = time.perf_counter()
    pending.wait()
    return ended - began, products
