"""The seconds of an operator on a device: a roofline, with measured rates where the machine was calibrated.

An operator takes the longer of its arithmetic and its memory traffic, each at the rate reached for work of its size
(Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009), plus a fixed time
for each kernel it starts. All rates exclude that fixed time, `launch_seconds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.core.graph import DTYPES
from meshwright.cost.cluster import Curve, Device, Measured
from meshwright.cost.operator_tables import BIAS
from meshwright.cost.operators import Amount, Work


@dataclass(frozen=True)
class Share:
    """The share of a peak that work reaches: `large` for large work, and half of that at a size `half`.

    The curve is ``large · w / (w + half)`` (Hockney's n½). `half_seconds` is in seconds at the peak, so that it fits
    any device.
    """

    large: float
    half_seconds: float


# Where nothing is measured. Large matrix products reach 60-75 % of the data sheet in published reports (Megatron-LM,
# Narayanan et al. 2021, Table 1: 44-52 % of a full A100 step; PaLM, Chowdhery et al. 2022: 57.8 % of a full TPU step);
# FlashAttention-2 (Dao 2023) 50-73 % of an A100; STREAM copies 80-90 % of memory's data sheet.
# A kernel fills its pipeline in about the time of a launch: a few microseconds.
SHARES: dict[str, Share] = {
    "matmul": Share(0.70, 5e-6),
    "attention": Share(0.50, 10e-6),
    "causal": Share(0.50, 10e-6),
    "conv": Share(0.50, 10e-6),
    "memory": Share(0.80, 1e-6),
}
ARITHMETIC = ("matmul", "attention", "causal", "conv")
# Kinds that use the corrections of another kind, and its rates if they have none.
ALIKE = {"causal": "attention"}
# The extra cost, in operator launches (profiled), of a linear whose weight gradients are delayed: an autograd function
# of our own in forward and backward, then a place in the queue and a second pass to the parameters.
QUEUED = (2.0, 0.5, 1.5)
PRODUCTS_BACKWARD = 2.0  # of a layer: the gradients of its input and of its weight
NO_ISSUE = (0.0, 0.0)
NARROW = {"f16": "bf16", "bf16": "f16", "f8e4m3": "bf16", "f8e5m2": "bf16"}  # where a peak is not given


def seconds(work: Work, device: Device, measured: Measured | None = None) -> tuple[Amount, Amount]:
    """Return the seconds of one call, forward and backward. Vectorised over the amounts of `work`."""
    known = measured or Measured()
    if work.kind == "free":
        return (0.0, 0.0)
    if work.call in known.calls:
        return known.calls[work.call]
    factor = known.corrections.get(ALIKE.get(work.kind, work.kind), 1.0)
    starting = launch_seconds(device, known)
    halves: list[Amount] = []
    name = f"{work.name} {work.dtype}"
    slower = known.operators.get(name, (1.0, 1.0)) if work.name else (1.0, 1.0)
    summed = known.operators.get(f"{BIAS} {work.dtype}")
    starts = launches_of(work, device)
    for half, (flops, moved, launches, passes) in enumerate(
        (
            (work.flops_forward, work.bytes_forward, starts[0], work.passes_forward),
            (work.flops_backward, work.bytes_backward, starts[1], work.passes_backward),
        )
    ):
        busy = moved / memory_rate(moved, device, known)
        if work.kind in ARITHMETIC:
            rate = arithmetic_rate(work.kind, work.dtype, flops, device, known)
            busy = np.maximum(busy, flops / rate)
        elif np.any(flops):
            busy = np.maximum(busy, flops / element_rate(device, known))
        if np.any(passes):
            busy = busy + passes / memory_rate(passes, device, known)
        busy = slower[half] * busy
        if half and summed is not None and np.any(work.bias_bytes):
            busy = busy + summed[half] * work.bias_bytes / memory_rate(work.bias_bytes, device, known)
        halves.append(_plain(factor * busy + launches * starting))
    return halves[0], halves[1]


def launches_of(work: Work, device: Device) -> tuple[Amount, Amount]:
    """Return the kernels that an operator starts, forward and backward. An accelerator that was measured runs a
    memory-bound operator as one kernel, and one or two backward; a processor may run it as several."""
    counts = work.launches_forward, work.launches_backward
    if device.issue_seconds and work.kind == "memory":
        return _plain(np.minimum(counts[0], 1.0)), _plain(np.minimum(counts[1], 2.0))
    return counts


def update_seconds(
    elements: Amount, states: int, device: Device, measured: Measured | None = None, itemsize: int = 4
) -> Amount:
    """Return the seconds of an optimizer's update of `elements` parameters with `states` moments each.

    It reads parameter, gradient and states, and writes parameter and states.
    """
    known = measured or Measured()
    moved = elements * itemsize * float(2 + states + 1 + states)
    curve = known.rates.get("update")
    rate = at(curve, moved) if curve else memory_rate(moved, device, known)
    return _plain(known.corrections.get("update", 1.0) * (moved / rate) + launch_seconds(device, known))


def launch_seconds(device: Device, measured: Measured) -> float:
    """Return the seconds to start one operator in a training step."""
    return device.launch_seconds * measured.corrections.get("launch", 1.0)


def issue_seconds(device: Device, measured: Measured) -> float:
    """Return the host's seconds to issue one operator of a training step; 0 where they do not count."""
    return device.issue_seconds * measured.corrections.get("issue", 1.0)


def issued_seconds(work: Work, device: Device, measured: Measured) -> tuple[float, float]:
    """Return the host's seconds to issue one operator, forward and backward; 0 where they do not count."""
    issue = issue_seconds(device, measured)
    forward, backward = (float(count) for count in launches_of(work, device))
    if not measured.issues or not issue:
        return issue * forward, issue * backward
    if work.kind == "free":
        forward, backward = measured.issues.get("free", NO_ISSUE)
        return issue * forward, issue * backward
    known = measured.issues.get(work.name) or measured.issues.get(ALIKE.get(work.kind, work.kind), (1.0, 1.0))
    usual = PRODUCTS_BACKWARD if work.kind == "matmul" else 1.0  # kernels that this is for
    bias = measured.issues.get("bias", NO_ISSUE) if np.any(work.bias_bytes) else NO_ISSUE
    backward -= float(bias is not NO_ISSUE)  # its sum is a kernel of its own
    return issue * forward * known[0], issue * (backward / usual * known[1] + sum(bias))


def update_issue_seconds(device: Device, measured: Measured) -> float:
    """Return the host's seconds to update one parameter."""
    return issue_seconds(device, measured) * measured.issues.get("update", NO_ISSUE)[0]


def step_issue_seconds(device: Device, measured: Measured) -> float:
    """Return the host's seconds for a step beside those to issue its operators."""
    once = device.issue_seconds * measured.issues.get("step", NO_ISSUE)[0]
    return once * measured.corrections.get("step", 1.0)


def memory_rate(moved: Amount, device: Device, measured: Measured) -> Amount:
    """Return the bytes per second of an operator that moves so many bytes."""
    curve = measured.rates.get("memory")
    if curve:
        return at(curve, moved)
    return _share("memory", moved, device.memory_bytes_per_s)


def arithmetic_rate(kind: str, dtype: str, flops: Amount, device: Device, measured: Measured) -> Amount:
    """Return the FLOP/s of an operator of a kind with so many FLOPs."""
    for name in (kind, ALIKE.get(kind, kind)):
        if curve := measured.rates.get(f"{name} {dtype}"):
            return at(curve, flops)
    near = measured.rates.get(f"matmul {dtype}")
    if near:  # as far below the measured products as the default shares are
        return at(near, flops) * (SHARES[kind].large / SHARES["matmul"].large)
    return _share(kind, flops, peak_flops(device, dtype))


def element_rate(device: Device, measured: Measured) -> float:
    """Return the FLOP/s of pointwise arithmetic: the end of the ``elements`` curve, else a quarter of the peak.

    Pointwise operators do without fused multiply-add, and half of the rest goes into loads and stores.
    """
    curve = measured.rates.get("elements")
    if curve:
        return curve[-1][1]
    products = measured.rates.get("matmul f32")
    return 0.25 * (max(r for _, r in products) if products else peak_flops(device, "f32"))


def peak_flops(device: Device, dtype: str) -> float:
    """Return the peak FLOP/s of a dtype, or of the nearest known one, or half of f32's for each doubling of size."""
    if dtype in device.flops:
        return device.flops[dtype]
    near = NARROW.get(dtype, "")
    if near in device.flops:
        return device.flops[near]
    base = device.flops.get("f32") or max(device.flops.values())
    return base * min(4 / DTYPES.get(dtype, 4), 1.0)


def at(curve: Curve, amount: Amount) -> Amount:
    """Interpolate a measured rate linearly over the logarithm of the work; it is constant beyond the ends."""
    works: Sequence[float] = [w for w, _ in curve]
    rates: Sequence[float] = [r for _, r in curve]
    logarithm: np.ndarray = np.log(np.maximum(amount, 1e-9))
    return np.interp(logarithm, np.log(np.maximum(works, 1e-9)), rates)


def _share(kind: str, amount: Amount, peak: float) -> Amount:
    share = SHARES[kind]
    half = share.half_seconds * peak
    return np.maximum(share.large * peak * amount / (amount + half), share.large * peak * 1e-6)


def _plain(amount: Amount) -> Amount:
    """Return a float if the amount is a single number."""
    return float(amount) if np.ndim(amount) == 0 else amount


__all__ = [
    "ALIKE",
    "arithmetic_rate",
    "at",
    "element_rate",
    "issue_seconds",
    "issued_seconds",
    "launch_seconds",
    "launches_of",
    "memory_rate",
    "peak_flops",
    "seconds",
    "step_issue_seconds",
    "update_issue_seconds",
    "update_seconds",
]
