"""Rows of collectives: seconds by bytes and ranks, through the very operators that programs call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from meshwright.calibrate.bench import Bench, Call
from meshwright.calibrate.plan import Pace, Point
from meshwright.mesh import Mesh
from meshwright.redistribute.steps import wire_elements
from meshwright.runtime import collectives

SIZES = (
    1 << 10,
    1 << 13,
    1 << 16,
    1 << 18,
    1 << 20,
    1 << 22,
    1 << 24,
)  # bytes of the larger tensor of a rank
LARGE = (1 << 26, 1 << 28)  # on an accelerator
TOO_LONG = 0.3  # seconds of one call after which no larger size is tried


def groups(mesh: Mesh) -> list[tuple[str, ...]]:
    """Axes to measure over: all of them, and the inner runs of neighbours."""
    axes = [a.name for a in mesh.axes if a.size > 1]
    return [tuple(axes[n:]) for n in reversed(range(len(axes)))]


def measure(bench: Bench, kind: str, pace: Pace) -> Iterator[Point]:
    """Points of a kind: every group of neighbours, all such groups at once, from small to large."""
    mesh = bench.comm.mesh
    sizes = [*SIZES, *(LARGE if bench.device.type == "cuda" else ())]
    for axes in groups(mesh):
        ranks = mesh.count(axes)
        for size in pace.chosen(sizes):
            count = max(1, size // 4 // ranks) * ranks
            call, sent = operation(bench, kind, axes, count)
            seconds = bench.joint_seconds(call, pace.link_seconds)
            yield Point(4.0 * sent, seconds, ranks)
            if seconds > TOO_LONG:
                break


def operation(bench: Bench, kind: str, axes: Sequence[str], count: int) -> tuple[Call, float]:
    """A collective whose larger side has `count` float32 elements on a rank, and the elements that a rank sends."""
    handle, ranks = bench.handle, bench.comm.mesh.count(axes)
    full, part = torch.ones(count, device=bench.device), torch.ones(count // ranks, device=bench.device)
    match kind:
        case "all_reduce":
            return lambda: collectives.all_reduce(full, handle, axes), wire_elements(
                kind, ranks, count, count
            )
        case "reduce_scatter":
            rows = full.view(ranks, -1)
            return lambda: collectives.reduce_scatter(rows, handle, axes), wire_elements(
                kind, ranks, count, part.numel()
            )
        case "all_gather":
            return lambda: collectives.all_gather(part, handle, axes), wire_elements(
                kind, ranks, part.numel(), count
            )
        case "all_to_all":
            each = [count // ranks] * ranks
            return lambda: collectives.all_to_all(full, each, each, handle, axes), wire_elements(
                kind, ranks, count, count
            )
        case _:
            return ring(bench, axes, full), float(count)


def ring(bench: Bench, axes: Sequence[str], full: torch.Tensor) -> Call:
    """Each rank sends to the next of its group and receives from the one before."""
    members = bench.comm.mesh.group(bench.comm.rank, axes)
    place = members.index(bench.comm.rank)
    after, before = members[(place + 1) % len(members)], members[place - 1]
    got = torch.empty_like(full)

    def call() -> None:
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, full, after), dist.P2POp(dist.irecv, got, before)]
        ):
            work.wait()

    return call
