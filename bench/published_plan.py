"""A published run as a plan that is not searched: its mesh, Megatron's pins, ZeRO level, schedule, micro-batches.

Parameters are bfloat16 with `STATES` bfloat16 states each: a float32 copy and two float32 moments, as published runs
keep them. What a plan cannot express raises `Skipped` with the reason.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, replace
from typing import Any

from bench.models import CACHE
from bench.published_model import build
from bench.published_rows import Run
from meshwright.compile import captured_of, lower, plan_captured
from meshwright.core.techniques import techniques_from
from meshwright.cost.cluster import Cluster
from meshwright.cost.execution import RATES
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
FUSED = ("te ", "te/", "fused", "apex", "liger", "flash-attn")  # packages of hand-written kernels
# Policies that recompute about half of a layer's products (the perceptron's) beside all that is cheap: torchtitan saves
# every second product and what collectives returned, MaxText and Paxml all but the perceptron's.
HALF = ("(op)", "except_mlp", "qkv/out")

NEW_KERNELS = ("FA3", "FA4", "cuDNN", "TE")  # as quick as a device's fused attention
TRITON = (
    0.6  # FlashAttention of 2022 in Triton over FlashAttention-2: Dao 2023, arXiv 2307.08691, figures 4 to 6
)


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
    away = {"offload": ("optimizer",)} if "offload" in (run.distributed_optimizer or "") else {}
    return {"optimizer_parallel": level, **shards, **each, **away}


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
    wanted = run.activation_recompute or "none"
    if wanted in ("none", "full"):
        return {} if wanted == "none" else {"recompute": "full"}
    if any(word in wanted for word in HALF):
        return {"recompute": {"*.mlp": "full", "blocks.*": "selective"}, "recompute_communication": False}
    return {"recompute": "selective"}


def fused_attention(run: Run) -> bool:
    """Whether attention is one kernel, as FlashAttention's."""
    return "no flash" not in (run.attention_kernel or "")


def execution_of(run: Run) -> str:
    """The kind of software that a run used, as its source says."""
    words = (run.compiled or "").lower()
    if "xla" in words or words.startswith("torch.compile"):
        return "compiled"
    return "fused" if any(word in words for word in FUSED) else "eager"


def partition_of(run: Run) -> Partition:
    """The program of a run's plan, without any cluster. Raises Skipped, or MeshwrightError for what cannot be."""
    wanted = asked(run)
    model, batch, loss = build(run.model, run.gbs_seqs or 1, run.seq, fused=fused_attention(run))
    captured = captured_of(model, batch, loss, CACHE)
    techniques = techniques_from(wanted.techniques)
    return lower(captured, plan_captured(captured, wanted.mesh, wanted.mode, wanted.pins, None, techniques))


def accumulated_bytes(run: Run, parts: Partition) -> float:
    """Bytes of a rank's float32 gradients beside the bfloat16 ones, where a run accumulates in float32."""
    if "fp32 grad" not in run.precision:
        return 0.0
    weights = parts.resharded.graph.input_of("parameter")
    elements = sum(math.prod(entry.type.shape) for entry in weights)
    return 4.0 * elements / ((run.tp or 1) * (run.pp or 1))


def _with_kernel(cluster: Cluster, kernel: str, execution: str) -> Cluster:
    """The cluster with attention at the rate of the kernel that a source names, where it names one."""
    rates = RATES.get(cluster.device.name)
    if rates is None or not kernel:
        return cluster
    wanted = rates.fused_attention if any(name in kernel for name in NEW_KERNELS) else rates.attention
    if "triton" in kernel:
        wanted *= TRITON
    today = rates.fused_attention if execution == "fused" else rates.attention
    known = cluster.measured.corrections
    factors = {**known, "attention": known.get("attention", 1.0) * today / wanted}
    return replace(cluster, measured=replace(cluster.measured, corrections=factors))


def _limited(cluster: Cluster) -> Cluster:
    """torchtitan's H100: 96 GB of HBM2e (2.4 TB/s), and 500 W of 700, at which the clock falls with the root."""
    slower = math.sqrt(700 / 500)
    known = cluster.measured.corrections
    factors = {name: known.get(name, 1.0) * slower for name in ("matmul", "attention")}
    return replace(
        cluster,
        device=replace(cluster.device, memory_bytes=96_000_000_000, memory_bytes_per_s=2.4e12),
        measured=replace(cluster.measured, corrections={**known, **factors}),
    )


def cluster_of(run: Run, execution: str = "") -> Cluster:
    """The preset of a run's device, with the network that its source names."""
    each = min(run.gpus_per_node, run.n_gpus)
    nodes = run.n_gpus // each
    cluster = Cluster.preset(PRESETS[run.device], nodes=nodes, ranks_per_node=each, execution=execution)
    if execution:
        cluster = _with_kernel(cluster, run.attention_kernel or "", execution)
    if "500W" in run.device:
        cluster = _limited(cluster)
    found = SPEED.search(run.interconnect or "")
    if found is None or len(cluster.levels) == 1:
        return cluster
    count, speed, unit, per = found.groups()
    bits = float(speed) * (1e12 if unit == "Tb" else 1e9) * int(count or 1)
    rate = bits / 8 / (1 if per == "per GPU" else run.gpus_per_node)
    outer, *inner = cluster.levels
    return replace(cluster, levels=(replace(outer, bytes_per_s=rate), *inner))
