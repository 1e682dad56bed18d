"""Rates that a preset's device typically reaches in training, by kind of software, as if it had been calibrated.

A data sheet has peaks. `typical` adds rates that others have published for real products, attention and links, and
factors for how a program runs: ``eager`` operator by operator, ``compiled`` (a chain of pointwise operators becomes one
kernel) or ``fused`` (hand-written kernels, as Megatron's and Transformer Engine's). Sources:

[1] S. Bekman, "Machine Learning Engineering", compute/accelerator: maximum achievable matmul FLOPS, best shapes.
[2] The same, network: all-reduce and all-gather on NVLink reach 80-82 % of the sheet, networks about 80 %.
[3] Dao 2023, arXiv 2307.08691: FlashAttention-2, causal, width 128, forward and backward together.
[4] Shah et al. 2024, arXiv 2407.08608: FlashAttention-2 and -3, and cuDNN's, on H100.
[5] fitted to published training steps; `python -m bench published --left-out` evaluates each source with constants that
    were fitted to the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshwright.cost.cluster_data import Curve, Description, Measured
from meshwright.errors import ClusterError, did_you_mean


@dataclass(frozen=True)
class Rates:
    """Rates of one device in FLOP/s: bfloat16 products of the best shapes, and causal attention of long sequences
    (FlashAttention-2, and the ``fused`` kernels of cuDNN or FlashAttention-3).

    `sustained`: the time of products in training over that at the best shapes: other shapes, clocks under a full load,
    kernels that wait for each other.
    """

    products: float
    attention: float
    fused_attention: float
    sustained: float = 1.15


@dataclass(frozen=True)
class Execution:
    """Factors on the time of classes of work, beside the published rates, for one kind of software.

    `waited` is on collectives that the program waits for: Megatron hides a part of them behind the products.
    """

    products: float
    memory: float
    launch: float
    attention: float
    waited: float


RATES: Mapping[str, Rates] = {  # [1], [3], [4], [5]; attention of the last two is an estimate
    "NVIDIA A100-SXM4-80GB": Rates(271e12, 190e12, 190e12, 1.35),
    "NVIDIA A100-SXM4-40GB": Rates(271e12, 190e12, 190e12, 1.35),
    "NVIDIA H100-SXM5-80GB": Rates(794e12, 320e12, 530e12, 1.28),
    "NVIDIA H200-SXM-141GB": Rates(794e12, 320e12, 530e12, 1.28),
    "NVIDIA B200-SXM-180GB": Rates(1745e12, 700e12, 1000e12, 1.28),
    "AMD Instinct MI300X": Rates(668e12, 250e12, 250e12),
}
LINKS = 1 / 0.8  # [2] of the time at the sheet's rate
EXECUTIONS: Mapping[str, Execution] = {  # [5], from LINKS and a compiler that saves half of the traffic
    "eager": Execution(products=1.15, memory=1.05, launch=1.5, attention=1.0, waited=LINKS),
    "compiled": Execution(products=1.15, memory=0.6, launch=1.05, attention=1.0, waited=LINKS),
    "fused": Execution(products=1.0, memory=0.6, launch=1.05, attention=1.0, waited=1.0),
}
HIDDEN = 1.45  # [5] of the time at the sheet's rate, for collectives that overlap with computation
# An estimate: a collective holds some of the multiprocessors.
SLOWDOWN = {"compute": 1.08, "collective": 1.15}
HALF_SECONDS = {"matmul": 8e-6, "attention": 40e-6}  # at the full rate: half of it is reached by so much work
SIZES = tuple(10.0**exponent for exponent in range(8, 16))  # FLOPs of the points of a curve


def typical(found: Description, execution: str) -> Description:
    """Return a preset with what its device typically reaches. Raises ClusterError for an unknown execution."""
    if execution not in EXECUTIONS:
        raise ClusterError(
            f"there is no execution {execution!r}",
            why="executions: " + ", ".join(EXECUTIONS),
            hint=did_you_mean(str(execution), EXECUTIONS),
        )
    how, rates = EXECUTIONS[execution], RATES.get(found.device.name)
    curves: dict[str, Curve] = {}
    if rates is not None:
        for dtype in ("bf16", "f16"):
            curves[f"matmul {dtype}"] = _curve(rates.products, HALF_SECONDS["matmul"])
            attention = rates.fused_attention if execution == "fused" else rates.attention
            curves[f"attention {dtype}"] = _curve(attention, HALF_SECONDS["attention"])
    corrections = {
        "matmul": how.products * (rates.sustained if rates is not None else 1.0),
        "attention": how.attention,
        "memory": how.memory,
        "launch": how.launch,
        "waited": how.waited,
        "hidden": HIDDEN,
        "hidden_rows": HIDDEN,
    }
    return replace(found, measured=Measured(rates=curves, corrections=corrections, slowdown=SLOWDOWN))


def _curve(rate: float, half_seconds: float) -> Curve:
    """Return a rate that saturates with the work (Hockney's n½)."""
    return tuple((size, rate * size / (size + rate * half_seconds)) for size in SIZES)


__all__ = ["EXECUTIONS", "Execution", "typical"]
