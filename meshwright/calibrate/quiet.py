"""Is the machine quiet? Then a loop that only computes takes as long by the clock as by the processor.

Each rank spins on as many threads as it computes with; the worst ratio of wall to processor time counts. A hypervisor
that takes the core away shows as well, where it tells its guest.
"""

from __future__ import annotations

import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import torch

from meshwright.calibrate.bench import Bench

LIMIT = 1.05
SPIN_SECONDS = 0.04  # some ten slices of the kernel's scheduler
_BLOCK = bytes(1 << 20)  # a checksum of this much leaves the interpreter's lock, for well below a millisecond


def spin() -> float:
    """Wall over processor time of one thread that computes."""
    wall, processor = time.perf_counter(), time.thread_time()
    while time.perf_counter() - wall < SPIN_SECONDS:
        zlib.crc32(_BLOCK)
    return (time.perf_counter() - wall) / max(time.thread_time() - processor, 1e-9)


def unrest(bench: Bench) -> float:
    """The worst ratio over all ranks and threads: 1 on a quiet machine. With more ranks than cores, as many of them
    spin as there are cores."""
    bench.meet()
    worst = 1.0
    threads = max(1, min(torch.get_num_threads(), bench.cores // bench.here))
    if bench.device.type == "cuda":  # the host issues from one
        threads = 1
    if bench.comm.rank < bench.cores:
        with ThreadPoolExecutor(threads) as pool:
            worst = max(pool.map(lambda _: spin(), range(threads)))
    return bench.slowest(worst)
