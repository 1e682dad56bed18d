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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.calibrate import links, operators, overlap, steps
from meshwright.calibrate.bench import Bench
from meshwright.calibrate.plan import KINDS, PACES, Found, Pace, Point
from meshwright.calibrate.quiet import LIMIT, unrest
from meshwright.cost import local
from meshwright.mesh import Mesh
from meshwright.runtime.communicator import ProcessGroups
from meshwright.runtime.connect import Meeting, launched_world

Measured = tuple[Iterable[Point], dict[str, Any]]  # points, and what else is to be told
Measure = Callable[[], Measured]


def main(arguments: list[str]) -> None:
    """Measure all rows. The last event is ``{"end": true}``: without it the run was cut short."""
    events, pace = Path(arguments[0]), PACES[arguments[1]]
    bench = connect()
    tell = _teller(events) if bench.comm.rank == 0 else lambda event: None
    rows = list(all_rows(bench, pace))
    tell({"machine": machine(bench), "rows": [name for name, _ in rows]})
    spare, left_out = pace.spare_seconds, []
    for name, measure in rows:
        if bench.elapsed() > pace.limit_seconds and name != rows[0][0]:
            left_out.append(name)
            continue
        tell({"begin": name})
        found, spent = measured(bench, name, measure, pace.attempts, spare)
        spare -= spent
        tell(found.data())
    tell({"end": True, "seconds": bench.elapsed(), "left_out": left_out})
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
        yield name, lambda name=name: (operators.measure(bench, name, pace), {})
    if bench.ranks > 1:
        for kind in KINDS:
            yield kind, lambda kind=kind: (links.measure(bench, kind, pace), {})
        yield "slowdown", lambda: (overlap.measure(bench, pace), {})
    if pace.step_seconds:
        for name in steps.MODELS:
            yield name, lambda name=name: steps.measure(bench, name, pace)


def measured(
    bench: Bench, name: str, measure: Measure, attempts: int, spare_seconds: float
) -> tuple[Found, float]:
    """A row between two probes; again while the machine was not quiet and there is time to spare. The quietest counts.
    Also the seconds that went into measuring again."""
    best: Found | None = None
    spent = 0.0
    for attempt in range(1, attempts + 1):
        began, before = bench.elapsed(), unrest(bench)
        points, about = measure()
        points = tuple(points)
        noise = max(before, unrest(bench))
        if best is None or noise < best.unrest:
            best = Found(name, points, noise, about=about)
        best = replace(best, attempts=attempt)
        took = bench.elapsed() - began
        spent += took if attempt > 1 else 0.0
        if best.unrest <= LIMIT or spent + took > spare_seconds:
            break
        time.sleep(0.1)  # what disturbs may be short
    assert best is not None
    return best, spent


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
