"""A plan for thousands of GPUs without any, and one rank of it run here at a fraction of the width.

python -m bench one-rank --rows mixtral    of the rows of `python -m bench joint`
python -m bench one-rank Llama-70B --nodes 128 --batch 1024 --rank 77
python -m bench one-rank --rows 405b --mesh dp=128,tp=8 --megatron --share 16 \
    --with pipeline=16,micro_batches=16,recompute=full,slice_activation=true,optimizer_parallel=1

A model is planned as it is published. Then the same layers with narrow matrices are sharded by the same plan, no
narrower than leaves each block an element: one rank of all builds its program and runs a step, and a communicator that
only counts answers for the thousands of others. What it sent, and the memory it took, stand beside what was predicted
for that program.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections import Counter as Multiset
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.joint import ROWS, Row
from bench.memory import peak_bytes
from bench.models import CACHE, CONFIGS, built_from
from meshwright.capture import Captured
from meshwright.capture.pytree import leaves
from meshwright.cli.arguments import mesh_sizes, techniques_of
from meshwright.compile import captured_of, lower, plan_captured
from meshwright.core.graph import Graph
from meshwright.core.layout import Dim, TensorLayout, map_leaves
from meshwright.core.layout import leaves as sub_dims
from meshwright.core.rank_numbers import WorldRank
from meshwright.core.techniques import Techniques, techniques_from
from meshwright.cost.cluster import Cluster
from meshwright.ops.analysis import factors_of
from meshwright.ops.strategy import Strategy
from meshwright.partition import Partition
from meshwright.partition.collectives import in_micro_batches, step_collectives, sums_of_batch
from meshwright.partition.micro_batches import first_micro_batch
from meshwright.partition.sharded_update import gathers as gathers_of
from meshwright.pipeline.meshes import meshes_of
from meshwright.pipeline.messages import Messages
from meshwright.pipeline.of_plan import schedule_of
from meshwright.plan.plan import Plan, fingerprint
from meshwright.planning.search_request import request_for
from meshwright.predict.memory.allocator import optimizer_on
from meshwright.predict.memory.step import peak
from meshwright.predict.pipeline_step import peaks_of
from meshwright.report.claims import claim_lines
from meshwright.runtime.buckets import Bucket
from meshwright.runtime.communicator import Counter
from meshwright.runtime.dtypes import TORCH_DTYPES
from meshwright.runtime.rank import Rank
from meshwright.runtime.sharded_update import ScatterBucket
from meshwright.runtime.step import LocalStep

WIDTHS = ("hidden_size", "intermediate_size", "vocab_size")
# How Megatron shards a transformer with gates over an axis: Shoeybi et al., arXiv 1909.08053.
MEGATRON = {
    **{f"*.{name}_proj": {"n": "tp"} for name in ("q", "k", "v", "gate", "up")},
    **{f"*.{name}_proj": {"k": "tp"} for name in ("o", "down")},
    "lm_head": {"n": "tp"},
}
CPU = torch.device("cpu")
Call = tuple[str, frozenset[str], int]  # kind, axes, bytes
Step = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Asked:
    """What a plan is asked for, as of `mw.plan`."""

    mode: str | None
    mesh: Any
    pins: Mapping[str, Mapping[str, str]] | None
    techniques: Techniques


@dataclass(frozen=True)
class Ran:
    """What one rank sent in a step, and the most bytes it had, beside what was predicted."""

    sent: Multiset[Call]
    expected: Multiset[Call]
    peak_bytes: int
    expected_bytes: int


def narrow(config: Mapping[str, Any], share: int, blocks: Mapping[int, int] | None = None) -> dict[str, Any]:
    """A configuration with matrices of a fraction of the width, and as many layers and heads. `blocks`: size → blocks
    that a plan splits dims of it into, which are left an element each (`most_blocks`)."""
    names = [name for name in (*WIDTHS, "head_dim") if name in config]
    return {**config, **{name: least(config[name], share, blocks or {}) for name in names}}


def least(size: int, share: int, blocks: Mapping[int, int]) -> int:
    """A fraction of a size, or what its blocks need."""
    each = blocks.get(size, 1)
    return each * math.ceil(max(1, size // share) / each)


def most_blocks(plan: Plan) -> dict[int, int]:
    """Size → the most blocks that a plan splits a sub-dim of it into, of splits that divide it evenly."""
    layouts = [*plan.inputs.values(), *plan.hubs.values(), *plan.states.values()]
    dims = [dim for layout in layouts for dim in layout.dims]
    dims += [dim for strategy in plan.strategies.values() for _, dim in strategy.splits]
    found: dict[int, int] = {}
    for leaf in {leaf for dim in dims for leaf in sub_dims(dim)}:
        found[leaf.size] = math.lcm(found.get(leaf.size, 1), plan.mesh.count(leaf.axes))
    return found


def resized(plan: Plan, wide: Graph, small: Graph) -> Plan:
    """The plan of a graph for one that differs in sizes alone: the same axes at the same sub-dims."""
    before, after = factors_of(wide), factors_of(small)
    trees = {n: (before.sites[n].trees, after.sites[n].trees) for n in before.sites}

    def layout(name: str, given: TensorLayout) -> TensorLayout:
        dims = tuple(map(_resized, given.dims, after.dims[name]))
        return TensorLayout(dims, given.partial, given.grad)

    def strategy(name: str, given: Strategy) -> Strategy:
        return replace(given, splits=tuple((x, _resized(dim, trees[name][1][x])) for x, dim in given.splits))

    return replace(
        plan.without_model(),
        fingerprint=fingerprint(small),
        strategies={n: strategy(n, s) for n, s in plan.strategies.items()},
        inputs={n: layout(n, v) for n, v in plan.inputs.items()},
        hubs={n: layout(n, v) for n, v in plan.hubs.items()},
        states={n: layout(n, v) for n, v in plan.states.items()},
        claims={},
    )


def _resized(dim: Dim, like: Dim) -> Dim:
    """The axes of a dim at the sub-dims of another."""
    axes = [leaf.axes for leaf in sub_dims(dim)]
    if len(axes) != len(list(sub_dims(like))):
        raise SystemExit(f"{dim} and {like} have other sub-dims: take another width")
    at = iter(axes)
    return map_leaves(like, lambda leaf: replace(leaf, axes=next(at)))


def shortened(
    config: Mapping[str, Any], rows: int, tokens: int, wide: Graph, plan: Plan
) -> tuple[Captured, Any, Plan, int]:
    """A narrow model with its batch of some tokens, or of as many as the plan splits them into, and the plan for it.

    Which blocks are of tokens is seen here: before, they may be as many as a matrix is wide.
    """
    model, batch, loss = built_from(config, rows, tokens)
    captured = captured_of(model, batch, loss, CACHE)
    cut = resized(plan, wide, captured.graph)
    blocks = most_blocks(cut).get(tokens, 1)
    if tokens % blocks:
        return shortened(config, rows, least(tokens, 1, {tokens: blocks}), wide, plan)
    return captured, batch, cut, tokens


def run(
    parts: Partition,
    captured: Captured,
    batch: Any,
    rank: int,
    device: torch.device = CPU,
    most_bytes: Callable[[Callable[[], Step]], int] | None = None,
) -> Ran:
    """Steps of a rank with the counting communicator, its weights drawn at random. `most_bytes`: finds the peak of a
    step that it makes."""
    plan, world = parts.requested, parts.requested.ranks
    comm = Counter(world, rank)
    within = meshes_of(plan).within(WorldRank(rank)) if plan.stages else rank

    def make() -> Step:
        # Every rank gets the global batch; only this rank's shard of a weight is ever made.
        example = {path: torch.zeros(x.shape, dtype=x.dtype, device=device) for path, x in leaves(batch)}
        values, held = _values(parts, captured, within, device)
        step = LocalStep(
            parts, Rank(comm, device), values, lambda p: torch.optim.AdamW(p, lr=1e-3), held=held
        )
        made.append(step)
        return lambda: step(example)

    made: list[LocalStep] = []
    most = peak_bytes(make, warm_up=1, steps=1) if most_bytes is None else most_bytes(make)
    calls = comm.calls[len(comm.calls) - len(comm.calls) // made[0].rank.step :]  # of the last step
    buckets = [call for bucket in made[0].buckets.buckets for call in _reduced(bucket)]
    gathers = [
        ("all_gather", frozenset(axes), size)
        for axes, size in _gathered(parts, set(made[0].weights), device.type)
    ]
    made.clear()
    gc.collect()
    sent = Multiset((kind, frozenset(axes), size) for kind, axes, size in calls)
    return Ran(
        sent,
        _expected(parts, rank, within) + Multiset([*buckets, *gathers]),
        most,
        _peak(parts, rank, within, device.type),
    )


def _reduced(bucket: Bucket | ScatterBucket) -> Iterator[Call]:
    """What is sent to add up a bucket's gradients: all of them, or rows of parts that are as large as the largest."""
    if isinstance(bucket, Bucket):
        yield "all_reduce", frozenset(bucket.axes), bucket.size_bytes
        return
    part = sum(bucket.widths) * bucket.dtype.itemsize
    if bucket.cut:
        yield "reduce_scatter", frozenset(bucket.cut), bucket.members * part
    if bucket.summed:
        yield "all_reduce", frozenset(bucket.summed), part


def _gathered(
    parts: Partition, weights: Collection[str], device: str
) -> Iterator[tuple[tuple[str, ...], int]]:
    """Axes and bytes of what brings the rank's updated weights together again."""
    for group in gathers_of(parts, device=device):
        mine = [member for member in group.members if member.name in weights]
        if mine:
            yield mine[0].axes, sum(member.size_bytes for member in mine)


def _values(
    parts: Partition, captured: Captured, within: int, device: torch.device
) -> tuple[dict[str, torch.Tensor], list[str]]:
    mesh, values, held = parts.plan.mesh, dict[str, torch.Tensor](), list[str]()
    for entry in parts.resharded.graph.inputs:
        shape, dtype = entry.type.shape, TORCH_DTYPES[entry.type.dtype]
        match entry.role:
            case "parameter":
                here = parts.resharded.layouts[entry.name].local_shape(mesh, mesh.coordinate(within))
                values[entry.name] = (0.02 * torch.randn(here, device=device)).to(dtype)
                held.append(entry.name)
            case "buffer":
                values[entry.name] = torch.ones(shape, device=device).to(dtype)
            case "constant":
                values[entry.name] = captured.constants[entry.target].to(device)
    return values, held


def _expected(parts: Partition, rank: int, within: int) -> Multiset[Call]:
    """The collectives of the rank's stages, and their messages."""
    plan = parts.requested
    if not plan.stages:
        every = step_collectives(parts, within)
        return Multiset((c.kind, frozenset(c.axes), c.payload_bytes) for c in every)
    programs, schedule = first_micro_batch(parts, within), schedule_of(plan)
    cut = parts.stages(programs.programs[0])
    place = meshes_of(plan).place(WorldRank(rank))
    graph = parts.resharded.graph
    maker = next(schedule.ranks[n] for n, stage in enumerate(cut) if graph.loss in stage.ends)
    # What follows from the last micro-batch is done where the loss is made; the loss goes to all places.
    early, late = sums_of_batch(parts, within, programs)
    kept = [*early, *(late if place == maker else ())]
    for stage in schedule.held_by(place):
        kept += in_micro_batches(parts, within, programs, cut[stage].segment.graph)
    found = Multiset((c.kind, frozenset(c.axes), c.payload_bytes) for c in kept)
    others, size = len(schedule.actions) - 1, graph.types[graph.loss].size_bytes
    found["send" if place == maker else "receive", frozenset(), size] += others if place == maker else 1
    messages = Messages(cut, schedule)
    for action in messages.compute(place):
        for kind, listed in (("receive", messages.needed(action)), ("send", messages.sent(action))):
            for message in listed:
                size = cut[message.maker].segment.graph.types[message.value].size_bytes
                found[kind, frozenset(), size] += 1
    return found


def _peak(parts: Partition, rank: int, within: int, device: str) -> int:
    plan = parts.requested
    if not plan.stages:
        return peak(parts, within, optimizer=optimizer_on(device, 2), device=device, staged=False).bytes
    host = Cluster.local(1)  # what a CPU has beside a program does not depend on how many there are
    return peaks_of(parts, host, staged=False)[meshes_of(plan).place(WorldRank(rank))]


def show(ran: Ran) -> list[str]:
    """What was sent and predicted, kind by kind, and the memory."""
    lines = []
    for kind in sorted({k for k, _, _ in ran.sent | ran.expected}):
        mine, expected = (
            [(n, s) for (k, _, s), n in calls.items() if k == kind] for calls in (ran.sent, ran.expected)
        )
        count, size = (sum(n for n, _ in mine), sum(n * s for n, s in mine))
        asked, wanted = (sum(n for n, _ in expected), sum(n * s for n, s in expected))
        lines.append(
            f"{kind:15} {count:6,} {size / 1e6:12,.3f} MB   predicted {asked:6,} {wanted / 1e6:12,.3f} MB"
        )
    lines.append("each as predicted" if ran.sent == ran.expected else "NOT as predicted")
    off = 100 * (ran.expected_bytes / ran.peak_bytes - 1)
    had, expected = (f"{size / 1e6:19,.3f} MB" for size in (ran.peak_bytes, ran.expected_bytes))
    lines.append(f"{'peak':15} {had}   predicted {expected} ({off:+.2f} %)")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan, shard the narrow model by that plan, run one rank."""
    parser = argparse.ArgumentParser(
        prog="python -m bench one-rank",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", choices=sorted(CONFIGS), metavar="MODEL")
    parser.add_argument("--rows", nargs="+", default=[], help="rows whose name has one of these words")
    parser.add_argument("--nodes", type=int, default=2048, help="of eight H100")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--share", type=int, default=8, help="of the width, run here")
    parser.add_argument("--short", type=int, default=64, help="tokens of an example, run here")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument(
        "--float32", action="store_true", help="planned and run, where a CPU is slow in bfloat16"
    )
    parser.add_argument("--layers", type=int, help="planned and run, by default all")
    parser.add_argument("--mode", help="of planning, by default auto")
    parser.add_argument("--mesh", help="as of meshwright plan: dp=128,tp=8")
    parser.add_argument("--with", dest="techniques", default="", help="as of meshwright plan: pipeline=16")
    parser.add_argument("--megatron", action="store_true", help="shard products over tp as Megatron does")
    options = parser.parse_args(arguments)
    asked = [row for name, row in ROWS.items() if any(word in name for word in options.rows)]
    if options.model:
        asked.append(Row(options.model, 8 * options.nodes, options.batch, options.sequence, 0.0))
    if not asked:
        parser.error(f"a MODEL, or --rows of {', '.join(ROWS)}")
    asked_for = Asked(
        "sharding_propagation" if options.megatron else options.mode,
        mesh_sizes(options.mesh),
        MEGATRON if options.megatron else None,
        techniques_from(techniques_of([options.techniques])),
    )
    changes = {"dtype": "float32"} if options.float32 else {}
    changes |= {"num_hidden_layers": options.layers} if options.layers else {}
    how = (options.share, options.short, options.rank, asked_for, changes)
    right = [plan_and_run(row, *how) for row in asked]
    sys.exit(not all(right))


def plan_and_run(
    row: Row, share: int, short: int, rank: int, asked: Asked, changes: Mapping[str, Any]
) -> bool:
    """Print a plan and what one of its ranks did; whether it sent what was predicted. `share`: of the width; `short`:
    tokens of an example; `changes`: of the configuration."""
    published = {**CONFIGS[row.model], **changes}
    wide = captured_of(*built_from(published, row.batch, row.sequence), CACHE)
    cluster = Cluster.preset("h100", nodes=row.ranks // 8)
    started = time.perf_counter()
    plan = plan_captured(wide, asked.mesh, asked.mode, asked.pins, request_for(cluster), asked.techniques)
    took = time.perf_counter() - started
    print(f"{row.model} planned for {cluster.ranks:,} ranks in {took:.1f} s: {plan.ranks}")
    for what, text in (*claim_lines(plan.claims), ("techniques", str(plan.techniques))):
        print(f"{what:13} {text}")
    config = narrow(published, share, most_blocks(plan))
    fewest = least(row.sequence, row.sequence // short, {})
    captured, batch, cut, tokens = shortened(config, row.batch, fewest, wide.graph, plan)
    started = time.perf_counter()
    parts = lower(captured, cut)
    ran = run(parts, captured, batch, rank)
    took = time.perf_counter() - started
    widths = ", ".join(f"{config[name]:,} of {published[name]:,}" for name in WIDTHS)
    print(f"\nrank {rank:,}, widths {widths}, {tokens:,} of {row.sequence:,} tokens: {took:.1f} s")
    print("\n".join(show(ran)), end="\n\n", flush=True)
    return ran.sent == ran.expected


if __name__ == "__main__":
    main()
