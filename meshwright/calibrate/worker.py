"""The worker of ``meshwright calibrate``: every rank runs all rows together, and rank 0 writes the results.

    python -m meshwright.calibrate.worker EVENTS quick|full BEGAN

BEGAN is the start of the command in seconds since the epoch; its time limit counts from there. EVENTS is a file to
which rank 0 appends one JSON object a line: the machine, then for each row ``{"begin": row}`` and the row.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.calibrate import host, kernels, links, operators, overlap
from meshwright.calibrate import step_rows as steps
from meshwright.calibrate.bench import Bench
from meshwright.calibrate.plan import LEVEL, NODES, PACES, POST, SUFFIX, WAITED, MeasuredRow, Pace, Point
from meshwright.calibrate.quiet import LIMIT, unrest
from meshwright.core.collectives import PRICED
from meshwright.core.mesh import Mesh
from meshwright.cost import local_machine as local
from meshwright.errors import LaunchError
from meshwright.launchers import launched
from meshwright.runtime.communicator import ProcessGroups, leave
from meshwright.runtime.rendezvous import Meeting, launched_world

Measured = tuple[Iterable[Point], dict[str, Any]]  # points, and further values to record
Measure = Callable[[], Measured]


def main(arguments: list[str]) -> None:
    """Measure all rows. The last event is ``{"end": true}``: without it the run did not finish."""
    events, pace = Path(arguments[0]), PACES[arguments[1]]
    bench = connect(float(arguments[2]))
    tell = _teller(events) if bench.comm.rank == 0 else lambda event: None
    rows = dict(all_rows(bench, pace))
    tell({"machine": machine(bench), "rows": list(rows)})
    left_out = look(bench, rows, pace, tell)
    tell({"end": True, "seconds": bench.elapsed(), "left_out": left_out})
    if dist.is_initialized():
        leave()


def look(
    bench: Bench, rows: Mapping[str, Measure], pace: Pace, tell: Callable[[dict[str, Any]], None]
) -> list[str]:
    """Measure every row once, then those that were disturbed again, as long as there is time: what disturbs has often
    passed by then. Of each row the quietest attempt counts. The rows for which there was no time at all."""
    found: dict[str, MeasuredRow] = {}
    took: dict[str, float] = {}
    for attempt in range(pace.attempts):
        for name, measure in rows.items():
            now = bench.elapsed()
            if attempt == 0 and now > pace.limit_seconds and found:
                continue
            if attempt and (
                name not in found or found[name].unrest <= LIMIT or now + took[name] > pace.limit_seconds
            ):
                continue
            tell({"begin": name})
            new, old = measured(bench, name, measure), found.get(name)
            took[name] = bench.elapsed() - now
            best = new if old is None or new.unrest < old.unrest else old
            found[name] = replace(best, attempts=old.attempts + 1 if old is not None else 1)
            tell(found[name].data())
    return [name for name in rows if name not in found]


def connect(began: float) -> Bench:
    """The ranks of this job as one mesh of neighbours, with the groups that are measured."""
    ranks, mine = launched_world(), launched()
    mesh = mesh_of(ranks, mine.local_world or ranks)
    place = mine.local_rank
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", place % torch.cuda.device_count())
        torch.cuda.set_device(device)
    cores = local.cores()
    torch.set_num_threads(max(1, cores // (mine.local_world or ranks)))
    comm = Meeting().connect(mesh, device)
    if isinstance(comm, ProcessGroups):
        every = [axes for link in SUFFIX for axes in links.groups(mesh, link)]
        comm.prepare([frozenset(axes) for axes in (*every, [a.name for a in mesh.axes])])
    torch.manual_seed(comm.rank)
    return Bench(comm, device, cores, began=time.monotonic() - (time.time() - began))


def mesh_of(ranks: int, here: int) -> Mesh:
    """The ranks of one machine, or machines with equally many. Raises LaunchError where they are uneven."""
    if ranks % here:
        raise LaunchError(
            f"this machine has {here} of {ranks} ranks",
            why="a cluster file describes machines with equally many",
            hint="the same --nproc on each",
        )
    sizes = {NODES: ranks // here, LEVEL: here}
    sizes = {link: size for link, size in sizes.items() if size > 1} or {LEVEL: 1}
    return Mesh.of(sizes).linked({link: link for link in sizes})


def all_rows(bench: Bench, pace: Pace) -> Iterable[tuple[str, Measure]]:
    """Names and what measures them, in order."""
    for name in operators.names(bench):
        yield name, lambda name=name: (operators.measure(bench, name, pace), {})
    if bench.ranks > 1:
        for link, suffix in SUFFIX.items():
            if not links.groups(bench.comm.mesh, link):
                continue
            for kind in PRICED:
                yield kind + suffix, lambda kind=kind, link=link: (links.measure(bench, kind, pace, link), {})
            for name in WAITED:
                kind = name.partition(" ")[0]
                yield (
                    name + suffix,
                    lambda kind=kind, link=link: (links.measure_waited(bench, kind, pace, link), {}),
                )
        yield POST, lambda: ([links.posted(bench, pace)], {})
        yield "slowdown", lambda: (overlap.measure(bench, pace), {})
    for name in host.names(bench):
        yield name, lambda name=name: (host.measure(bench, name, pace), {})
    if pace.step_seconds and bench.here == bench.ranks:  # steps are planned for one level
        for name, row in steps.rows(bench.ranks, bench.device.type).items():
            yield name, lambda row=row: steps.measure(bench, row, pace)
    for name in kernels.names(bench):
        yield name, lambda name=name: kernels.measure(bench, name, pace)


def measured(bench: Bench, name: str, measure: Measure) -> MeasuredRow:
    """A row between two probes."""
    before = unrest(bench)
    points, about = measure()
    points = tuple(points)
    return MeasuredRow(name, points, max(before, unrest(bench)), about=about)


def machine(bench: Bench) -> dict[str, Any]:
    """Describe the machine: all that a cluster needs besides rates."""
    if bench.device.type == "cuda":
        name = torch.cuda.get_device_properties(bench.device).name
        # What a step may have: neither the context of CUDA nor what other programs hold.
        memory = torch.cuda.mem_get_info(bench.device)[0] + torch.cuda.memory_reserved(bench.device)
    else:
        name, memory = (
            f"{bench.cores} processor cores shared by {bench.here}",
            local.memory_bytes() // bench.here,
        )
    return {
        "device": name,
        "type": bench.device.type,
        "ranks": bench.ranks,
        "nodes": bench.ranks // bench.here,
        "threads": torch.get_num_threads(),
        "cores": bench.cores,
        "memory_bytes": memory,
        "host_memory_bytes": local.memory_bytes() // bench.here,
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
