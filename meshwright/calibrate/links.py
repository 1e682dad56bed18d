"""Rows of collectives: seconds by bytes and ranks, as steps of reshards, by what programs run them with."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.nn import functional as F

from meshwright.calibrate.bench import Bench, Call
from meshwright.calibrate.plan import Pace, Point
from meshwright.core.collectives import COLLECTIVES, SEND, Matrix
from meshwright.core.layout import SubDim, TensorLayout
from meshwright.core.mesh import Mesh
from meshwright.redistribute.index_maps import exchange
from meshwright.redistribute.steps import Step, wire_elements
from meshwright.runtime.reshard import Mover

# bytes of the larger tensor of a rank
SIZES = (
    1 << 10,
    1 << 13,
    1 << 16,
    1 << 18,
    1 << 20,
    1 << 22,
    1 << 24,
)
LARGE = (1 << 26, 1 << 28)  # on an accelerator
WAITED_SIZES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
LAYERS = 16
POSTED = 1 << 12  # elements of a message whose start is timed: an activation of a small micro-batch
PRODUCT = {"cpu": 448, "cuda": 4096}  # rows of a layer's matrices: a millisecond or two
TOO_LONG = 0.3  # seconds of one call after which no larger size is tried
ROWS = (
    64  # of the matrix that is sent, where it is large enough: so many stretches of memory, as in activations
)


def groups(mesh: Mesh, link: str) -> list[tuple[str, ...]]:
    """Axes to measure over: all those of a link, and the inner runs of neighbours."""
    axes = [a.name for a in mesh.axes if a.size > 1 and a.link == link]
    return [tuple(axes[n:]) for n in reversed(range(len(axes)))]


def measure(bench: Bench, kind: str, pace: Pace, link: str) -> Iterator[Point]:
    """Points of a kind: every group of neighbours, all such groups at once, from small to large. These are the rates of
    collectives beside compute, so a sum is measured as those of gradients run."""
    mesh = bench.comm.mesh
    sizes = [*SIZES, *(LARGE if bench.device.type == "cuda" else ())]
    for axes in groups(mesh, link):
        ranks = mesh.count(axes)
        for size in pace.chosen(sizes):
            call, sent = (started_sum if kind == "all_reduce" else operation)(bench, kind, axes, size // 4)
            seconds = bench.joint_seconds(call, pace.link_seconds)
            yield Point(4.0 * sent, seconds, ranks)
            if seconds > TOO_LONG:
                break


def measure_waited(bench: Bench, kind: str, pace: Pace, link: str) -> Iterator[Point]:
    """Points of a kind that the program waits for: the same, between what a layer of a model computes."""
    mesh, computes = bench.comm.mesh, layer(bench)
    for axes in groups(mesh, link):
        for size in pace.chosen(WAITED_SIZES):
            call, sent = operation(bench, kind, axes, size // 4)
            seconds = bench.waited_seconds(computes, call, pace.waited_seconds)
            yield Point(4.0 * sent, seconds, mesh.count(axes))


def layer(bench: Bench) -> Call:
    """A product and a pointwise operator on other tensors at each call, as the layers of a model have, with results
    that stay for a while."""
    size = PRODUCT.get(bench.device.type, PRODUCT["cpu"])
    pairs = [[torch.randn(size, size, device=bench.device) for _ in range(2)] for _ in range(LAYERS)]
    kept: list[torch.Tensor] = []
    turn = itertools.cycle(pairs)

    def call() -> None:
        x, w = next(turn)
        kept.append(F.gelu(x @ w))
        if len(kept) > LAYERS:
            del kept[0]

    return call


def operation(bench: Bench, kind: str, axes: Sequence[str], count: int) -> tuple[Call, float]:
    """A collective whose larger side has about `count` float32 elements on a rank, and the elements that a rank sends.

    The tensor that is gathered, scattered or exchanged is a matrix split along its columns, by the runtime's own step:
    a collective moves flat memory, and the copies before and after it that reorder a split dim are part of a reshard's
    time.
    """
    ranks = bench.comm.mesh.count(axes)
    if kind == SEND:
        return ring(bench, axes, torch.ones(count, device=bench.device)), float(count)
    shape = _matrix(count, ranks)
    measured = COLLECTIVES[kind].measured
    assert measured is not None, f"{kind} is not measured"
    step = Step(kind, tuple(axes), *(_layout(shape, axes, how) for how in measured))
    plan = exchange(step, bench.comm.mesh, bench.comm.rank)
    mover, x = Mover(plan), torch.ones(plan.shape_before, device=bench.device)
    sent = wire_elements(kind, ranks, x.numel(), math.prod(plan.shape_after))
    return lambda: mover(x, bench.handle), sent


def started_sum(bench: Bench, kind: str, axes: Sequence[str], count: int) -> tuple[Call, float]:
    """A sum as those of gradients are, which is not the one that is waited for at once: started, in place."""
    flat = torch.zeros(count, device=bench.device)
    sent = wire_elements(kind, bench.comm.mesh.count(axes), count, count)
    return lambda: bench.comm.all_reduce_start(flat, axes).wait(), sent


def posted(bench: Bench, pace: Pace) -> Point:
    """Measure the host time that starting a message takes, with sends and receives in equal numbers, excluding the
    transfer."""
    mesh = bench.comm.mesh
    group = mesh.group(bench.comm.rank, bench.axes)
    place = group.index(bench.comm.rank)
    after, before = group[(place + 1) % len(group)], group[place - 1]
    full = torch.ones(POSTED, device=bench.device)
    into = [torch.empty_like(full) for _ in range(LAYERS)]
    found: list[float] = []
    for _ in range(3 if pace.few else 15):
        bench.meet()
        began = time.perf_counter()
        works = [bench.comm.receive_start(x, before, tag) for tag, x in enumerate(into)]
        works += [bench.comm.send_start(full, after, tag) for tag in range(len(into))]
        found.append((time.perf_counter() - began) / len(works))
        for work in works:
            work.wait()
    return Point(1.0, bench.slowest(statistics.median(found)))


def _matrix(count: int, ranks: int) -> tuple[int, int]:
    """Choose a shape of about `count` elements that can be split along both dims."""
    rows = ranks * max(1, min(ROWS // ranks, count // ranks**2))
    return rows, ranks * max(1, count // rows // ranks)


def _layout(shape: tuple[int, int], axes: Sequence[str], how: Matrix) -> TensorLayout:
    dim = {"rows": 0, "columns": 1}.get(how)
    layout = TensorLayout(tuple((SubDim(n, tuple(axes) if d == dim else ()),) for d, n in enumerate(shape)))
    return replace(layout, partial=tuple(axes)) if how == "partial" else layout


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
