"""A published run as a plan that is not searched: its mesh, Megatron's pins, ZeRO level, schedule, micro-batches.

Parameters are bfloat16 with `STATES` bfloat16 states each: a float32 copy and two float32 moments, as published runs
keep them. What a plan cannot express raises `Skipped` with the reason.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from typing import Any

from bench.models import CACHE
from bench.published_model import build
from bench.published_rows import Run
from meshwright.compile import captured_of, lower, plan_captured
from meshwright.core.techniques import techniques_from
from meshwright.cost.cluster import Cluster
from meshwright.partition import Partition
from meshwright.pipeline.meshes import AXIS

STATES = 6  # of two bytes: 12 bytes a parameter beside the weight and the gradient
PRESETS = {
    "A100-80GB SXM": "a100-80",
    "A100-40GB": "a100-40",
    "H100-80GB SXM": "h100",
    "H100-96GB HBM2e SXM (500W)": "h100",
    "H200-141GB SXM": "h200",
    "B200-192GB SXM": "b200",
    "MI300X/MI300 (8x)": "mi300x",
    "Ascend 910B (Atlas 900 A2 PODc)": "ascend-910b",
}
SPEED = re.compile(r"(?:(\d+)x)?(\d+(?:\.\d+)?) ?(Gb|Tb)/s (?:[\w-]+ )?(per GPU|per node)")
GROUP = re.compile(
    r"(?:FSDP (\d+) (?:in node )?x DP|ZeRO-1 (?:in groups of|group) (\d+)|shard in node of (\d+))"
)
# How Megatron shards a transformer over an axis: Shoeybi et al., arXiv 1909.08053; norms by sequence with
# sequence parallelism: Korthikanti et al., arXiv 2205.05198.
MEGATRON = {
    **{f"*.{name}": {"n": "tp"} for name in ("q", "k", "v", "gate", "up")},
    **{f"*.{name}": {"k": "tp"} for name in ("o", "down")},
    "head": {"n": "tp"},
    "tokens": {"v": "tp"},
}
SEQUENCE = {name: {"a1": "tp"} for name in ("*.norm1", "*.norm2", "norm")}


class Skipped(Exception):
    """A run that no plan of ours expresses; the message says why."""


@dataclass(frozen=True)
class Asked:
    """What a run asks for, as of `mw.plan`."""

    mesh: dict[str, int]
    mode: str
    pins: dict[str, dict[str, str]]
    techniques: dict[str, Any]


def asked(run: Run) -> Asked:
    """The mesh, pins and techniques of a run. Raises Skipped."""
    _check(run)
    tp, stages = run.tp or 1, (run.pp or 1) * (run.virtual_pp or 1)
    mesh = {"dp": run.dp or 1, **({"tp": tp} if tp > 1 else {})}
    if stages > 1:
        mesh = {AXIS: run.pp or 1, **mesh}
    pins = dict(MEGATRON) if tp > 1 else {}
    if tp > 1 and not run.model.glu:
        del pins["*.gate"]
    if tp > 1 and run.sequence_parallel:
        pins |= SEQUENCE
    mode = "sharding_propagation" if pins else "data_parallel"
    return Asked(mesh, mode, pins, {**_storage(run), **_schedule(run, stages), **_recompute(run)})


def _check(run: Run) -> None:
    degrees = (run.tp or 1) * (run.pp or 1) * (run.cp or 1) * (run.dp or 0)
    reasons = {
        f"no preset of {run.device}": run.device not in PRESETS,
        f"{run.precision} products": "8" in run.precision or "nvfp4" in run.precision,
        "experts": run.model.moe is not None,
        f"attention: {run.model.attn}": bool(run.model.attn) and "ALiBi" not in str(run.model.attn),
        "context parallelism": (run.cp or 1) > 1,
        "the batch is not known": not (run.gbs_seqs and run.micro_batch and run.dp),
        f"{run.n_gpus} devices are not tp × pp × cp × dp": degrees != run.n_gpus,
        "heads of a broken width": run.model.head_dim % 1 != 0,
    }
    for reason, holds in reasons.items():
        if holds:
            raise Skipped(reason)
    if run.gbs_seqs != (run.micro_batch or 1) * (run.dp or 1) * (run.grad_accum or 1):
        raise Skipped("the batch is not micro-batch × dp × accumulation")


def _storage(run: Run) -> dict[str, Any]:
    level = run.zero_level or 0
    if level == 0 or run.dp == 1:
        return {}
    group = GROUP.search(run.dp_sharding or "")
    size = int(next(filter(None, group.groups()))) if group else 0
    shards = {"shard_size": size} if 1 < size < (run.dp or 1) else {}
    each = {"gradient_accumulation_shard": True} if level > 1 and (run.grad_accum or 1) > 1 else {}
    return {"optimizer_parallel": level, **shards, **each}


def _schedule(run: Run, stages: int) -> dict[str, Any]:
    micro = {"micro_batches": run.grad_accum} if (run.grad_accum or 1) > 1 else {}
    if stages == 1:
        return micro
    if (run.pp_schedule or "").split(" ")[0] not in ("", "1F1B", "interleaved"):
        raise Skipped(f"schedule {run.pp_schedule}")
    ends = [round(stage * run.model.layers / stages) for stage in range(stages + 1)]
    named = {_layers(a, b - 1): stage for stage, (a, b) in enumerate(itertools.pairwise(ends))}
    kind = "interleaved" if (run.virtual_pp or 1) > 1 else "1f1b"
    return {"pipeline": stages, "schedule": kind, "stages": named, "micro_batches": run.grad_accum or 1}


def _layers(first: int, last: int) -> str:
    if last < first:
        raise Skipped("a stage without a layer")
    return f"blocks.{first}-{last}" if last > first else f"blocks.{first}"


def _recompute(run: Run) -> dict[str, Any]:
    asked = run.activation_recompute or "none"
    if asked in ("none", "full"):
        return {} if asked == "none" else {"recompute": "full"}
    return {"recompute": "selective"}


def fused_attention(run: Run) -> bool:
    """Whether attention is one kernel, as FlashAttention's."""
    return "no flash" not in (run.attention_kernel or "")


def partition_of(run: Run) -> Partition:
    """The program of a run's plan, without any cluster. Raises Skipped, or MeshwrightError for what cannot be."""
    wanted = asked(run)
    model, batch, loss = build(run.model, run.gbs_seqs or 1, run.seq, fused=fused_attention(run))
    captured = captured_of(model, batch, loss, CACHE)
    techniques = techniques_from(wanted.techniques)
    return lower(captured, plan_captured(captured, wanted.mesh, wanted.mode, wanted.pins, None, techniques))


def cluster_of(run: Run) -> Cluster:
    """The preset of a run's device, with the network that its source names."""
    each = min(run.gpus_per_node, run.n_gpus)
    cluster = Cluster.preset(PRESETS[run.device], nodes=run.n_gpus // each, ranks_per_node=each)
    found = SPEED.search(run.interconnect or "")
    if found is None or len(cluster.levels) == 1:
        return cluster
    count, speed, unit, per = found.groups()
    bits = float(speed) * (1e12 if unit == "Tb" else 1e9) * int(count or 1)
    rate = bits / 8 / (1 if per == "per GPU" else run.gpus_per_node)
    outer, *inner = cluster.levels
    return replace(cluster, levels=(replace(outer, bytes_per_s=rate), *inner))
