"""Ranks for a benchmark: as many processes as asked for, gloo between them, the same threads for all contenders."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import meshwright as mw
from meshwright.runtime.stores import FileStore


def on_ranks(
    ranks: int,
    threads: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout: timedelta = timedelta(minutes=30),
) -> Any:
    """Call a function on every rank; what rank 0 returns (as JSON). One rank has no process group. A collective that
    gets no answer for `timeout` fails."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault(
        "KINETO_LOG_LEVEL", "6"
    )  # the profiler says on the terminal when it starts and stops
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        spawn(_body, args=(ranks, threads, folder, function, arguments, timeout), nprocs=ranks)
        return json.loads(Path(folder, "result").read_text())


def _body(
    rank: int,
    ranks: int,
    threads: int,
    folder: str,
    function: Callable[..., Any],
    arguments: Any,
    timeout: timedelta,
) -> None:
    torch.set_num_threads(threads)
    if ranks > 1:
        store = FileStore(str(Path(folder, "store")), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    result = function(*arguments)
    if rank == 0:
        Path(folder, "result").write_text(json.dumps(result))
    mw.shutdown()
