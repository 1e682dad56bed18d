"""A quick and rough description of this machine's processors as a cluster, without calibration.

The system (or its control group) reports cores and memory. Two short probes of numpy give FLOP/s and bytes/s, which are
divided among the ranks. Links are those of gloo over loopback on a machine of two cores (`TWO_CORE_GLOO` in
`meshwright.redistribute.prices`). ``meshwright calibrate`` measures everything with all ranks at once, also on GPUs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from meshwright.core.type_guards import is_whole
from meshwright.cost.cluster_data import Description, Device, Level
from meshwright.errors import ClusterError

SHARED = "cores shared by"  # of a device's name
PROBE_SECONDS = 0.25  # of each of the two probes
MATMUL = 768  # rows and columns: large enough for the peak, a call takes a few milliseconds
COPY_BYTES = 32 << 20  # a thread; more than the caches of a core
MOST_THREADS = 16  # few machines need more to fill their memory's lanes
LAUNCH_SECONDS = 3e-6  # a tiny operator of eager PyTorch on a processor takes 1 to 5 µs
LINK_BYTES_PER_S, LINK_LATENCY_SECONDS = 1.0e9, 400e-6  # gloo over loopback, the middle of its collectives
MOST_PROCESSES = 4096
FALLBACK_MEMORY = 8 << 30  # if the system does not report it


def describe(nproc: int) -> Description:
    """Describe this machine, shared by `nproc` ranks. Raises ClusterError unless `nproc` is from 1 to 4096."""
    if not is_whole(nproc) or not 1 <= nproc <= MOST_PROCESSES:
        raise ClusterError(
            f"a machine of {nproc!r} ranks",
            why=f"local ranks are processes: 1 to {MOST_PROCESSES}",
            hint="Cluster.local(4)",
        )
    device = Device(
        name=f"{cores()} {SHARED} {nproc} rank{'s' if nproc > 1 else ''}",
        flops={"f64": flops_per_s("float64") / nproc, "f32": flops_per_s("float32") / nproc},
        memory_bytes=memory_bytes() // nproc,
        memory_bytes_per_s=copy_bytes_per_s() / nproc,
        launch_seconds=LAUNCH_SECONDS,
    )
    return Description("local", device, (Level("rank", nproc, LINK_BYTES_PER_S, LINK_LATENCY_SECONDS),))


def cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Return the memory in bytes that processes here may use in all: the machine's, or the control group's limit."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        total = FALLBACK_MEMORY
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(limit).read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return total


def flops_per_s(dtype: str) -> float:
    """Return the FLOP/s of numpy's matrix product with all of its threads: the best of a few calls."""
    a = np.ones((MATMUL, MATMUL), dtype)
    out = np.empty_like(a)
    return 2 * MATMUL**3 / best_seconds(lambda: np.matmul(a, a, out=out), PROBE_SECONDS / 2)


def copy_bytes_per_s() -> float:
    """Return the bytes/s that all cores together read and write in copies."""
    threads = min(cores(), MOST_THREADS)
    pairs = [(np.zeros(COPY_BYTES, np.uint8), np.ones(COPY_BYTES, np.uint8)) for _ in range(threads)]

    def copy(pair: tuple[np.ndarray, np.ndarray]) -> None:
        np.copyto(pair[0], pair[1])

    with ThreadPoolExecutor(threads) as pool:  # a copy leaves the interpreter's lock
        seconds = best_seconds(lambda: list(pool.map(copy, pairs)), PROBE_SECONDS)
    return 2 * COPY_BYTES * threads / seconds


def best_seconds(call: Callable[[], object], budget_seconds: float) -> float:
    """Return the shortest time of as many calls as fit the budget, but of at least two."""
    best, end, calls = float("inf"), time.perf_counter() + budget_seconds, 0
    while calls < 2 or time.perf_counter() < end:
        began = time.perf_counter()
        call()
        best, calls = min(best, time.perf_counter() - began), calls + 1
    return best
