"""What each rank of ``meshwright calibrate`` runs: every row, all ranks together; rank 0 writes what it finds.

    python -m meshwright.calibrate.worker EVENTS quick|full

EVENTS is a file to which rank 0 adds one JSON object a line: first what the machine is, then ``{"begin": row}`` and the
row itself, for each.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.calibrate import links, operators, overlap
from meshwright.calibrate.bench import Bench
from meshwright.calibrate.plan import KINDS, PACES, Found, Pace, Point
from meshwright.calibrate.quiet import LIMIT, unrest
from meshwright.cost import local
from meshwright.mesh import Mesh
from meshwright.runtime.communicator import ProcessGroups
from meshwright.runtime.connect import Meeting, launched_world

Measure = Callable[[], Iterable[Point]]


def main(arguments: list[str]) -> None:
    """Measure all rows. The last event is ``{"end": true}``: without it the run was cut short."""
    events, pace = Path(arguments[0]), PACES[arguments[1]]
    bench = connect()
    tell = _teller(events) if bench.comm.rank == 0 else lambda event: None
    rows = list(all_rows(bench, pace))
    tell({"machine": machine(bench), "rows": [name for name, _ in rows]})
    for name, measure in rows:
        tell({"begin": name})
        tell(measured(bench, name, measure, pace).data())
    tell({"end": True, "seconds": bench.elapsed()})
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def connect() -> Bench:
    """The ranks of this job as one mesh of neighbours, with the groups that are measured."""
    ranks, place = launched_world(), int(os.environ.get("LOCAL_RANK", "0"))
    mesh = Mesh.of(rank=ranks).linked({"rank": "rank"})
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", place % torch.cuda.device_count())
        torch.cuda.set_device(device)
    cores = local.cores()
    torch.set_num_threads(max(1, cores // ranks))
    comm = Meeting().connect(mesh, device)
    if isinstance(comm, ProcessGroups):
        comm.prepare([frozenset(axes) for axes in links.groups(mesh)])
    torch.manual_seed(comm.rank)
    return Bench(comm, device, cores)


def all_rows(bench: Bench, pace: Pace) -> Iterable[tuple[str, Measure]]:
    """Names and what measures them, in order."""
    for name in operators.names(bench):
        yield name, lambda name=name: operators.measure(bench, name, pace)
    if bench.ranks > 1:
        for kind in KINDS:
            yield kind, lambda kind=kind: links.measure(bench, kind, pace)
        yield "slowdown", lambda: overlap.measure(bench, pace)


def measured(bench: Bench, name: str, measure: Measure, pace: Pace) -> Found:
    """A row between two probes; again while the machine was not quiet and there is time. The quietest counts."""
    best: Found | None = None
    for attempt in range(1, pace.attempts + 1):
        began, before = bench.elapsed(), unrest(bench)
        points = tuple(measure())
        noise = max(before, unrest(bench))
        if best is None or noise < best.unrest:
            best = Found(name, points, noise, attempt)
        now = bench.elapsed()
        if best.unrest <= LIMIT or now + (now - began) > pace.limit_seconds:
            break
        time.sleep(0.1)  # what disturbs may be short
    assert best is not None
    return best


def machine(bench: Bench) -> dict[str, Any]:
    """What the cluster must know beside rates."""
    if bench.device.type == "cuda":
        properties = torch.cuda.get_device_properties(bench.device)
        name, memory = properties.name, properties.total_memory
    else:
        name, memory = f"{bench.cores} cores shared by {bench.ranks}", local.memory_bytes() // bench.ranks
    return {
        "device": name,
        "type": bench.device.type,
        "ranks": bench.ranks,
        "threads": torch.get_num_threads(),
        "cores": bench.cores,
        "memory_bytes": memory,
        "host_memory_bytes": local.memory_bytes() // bench.ranks,
        "torch": torch.__version__,
        "backend": dist.get_backend() if dist.is_initialized() else "none",
    }


def _teller(path: Path) -> Callable[[dict[str, Any]], None]:
    file = path.open("a", encoding="utf-8")

    def tell(event: dict[str, Any]) -> None:
        file.write(json.dumps(event) + "\n")
        file.flush()

    return tell


if __name__ == "__main__":
    main(sys.argv[1:])
