"""Rows of operators: work and seconds by size, forward and backward together where a model runs both.

Work is counted as `meshwright.cost.operators` does, so that a rate found here is the rate looked up there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from meshwright.calibrate.bench import Bench, Call
from meshwright.calibrate.plan import Pace, Point
from meshwright.cost.operator_tables import ELEMENT_FLOPS
from meshwright.cost.operators import TILE

TORCH_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
TOO_LONG = 0.15  # seconds of one call after which no larger size is tried, on any rank
KIB, MIB = 1 << 10, 1 << 20
# In a training step a tensor has left the caches before it is used again, so calls go round several of them.
ROUND_BYTES, MOST_TENSORS = 64 * MIB, 32
# A product of some size takes its time from its operands' way into the nearest caches, or from its work: over one layer
# in a loop 64³ takes three fifths of what it takes over several, and from 384³ on both take as long.
PRODUCT_BYTES = 4 * MIB


@dataclass(frozen=True)
class TimedCall:
    """A call that makes `passes` passes over so much `work` each."""

    work: float
    call: Call
    passes: float = 1.0


def matmul(bench: Bench, dtype: str, size: int) -> TimedCall:
    """The three products of linear layers, forward and backward, all of size³."""
    kind = TORCH_DTYPES[dtype]
    count = _tensors(3 * size**2 * kind.itemsize, PRODUCT_BYTES)
    layers = [
        tuple(torch.randn(size, size, device=bench.device).to(kind) for _ in range(3)) for _ in range(count)
    ]
    return TimedCall(
        2.0 * size**3, lambda: [(F.linear(x, w), g @ w, g.t() @ x) for x, w, g in layers], 3 * count
    )


def attention(bench: Bench, dtype: str, size: int, causal: bool = False) -> TimedCall:
    """Fused attention over `size` places in heads of width 64, laid out as a model's projections leave them: two
    products forward, five backward. With a causal mask half of the pairs count; a processor goes through all of a
    block of 512 keys all the same, so it is a row of its own."""
    batch, heads = (4, 16) if bench.device.type == "cuda" else (2, 4)  # a small one leaves most of a GPU idle
    shape, kind = (batch, size, heads, 64), TORCH_DTYPES[dtype]
    q, k, v, g = (torch.randn(shape, device=bench.device).to(kind).transpose(1, 2) for _ in range(4))
    wanted = [t.requires_grad_() for t in (q, k, v)]

    def call() -> object:
        return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=causal), wanted, g)

    return TimedCall((0.5 if causal else 1.0) * 4 * batch * heads * size**2 * 64, call, 3.5)


def convolution(bench: Bench, dtype: str, size: int) -> TimedCall:
    """A 3 × 3 convolution with `size` channels on images of 28 × 28, forward and both gradients; on an accelerator, of
    more images, and the mean with one of 1 × 1, of which networks have as many."""
    kind, cuda = TORCH_DTYPES[dtype], bench.device.type == "cuda"
    images = 32 if cuda else 4
    x = torch.randn(images, size, 28, 28, device=bench.device).to(kind).requires_grad_()
    g = torch.randn(images, size, 28, 28, device=bench.device).to(kind)
    windows = [
        torch.randn(size, size, width, width, device=bench.device).to(kind).requires_grad_()
        for width in ((3, 1) if cuda else (3,))
    ]
    work = 2.0 * images * 28 * 28 * size * sum(w[0].numel() for w in windows) / len(windows)

    def call() -> object:
        return [torch.autograd.grad(F.conv2d(x, w, padding=w.shape[-1] // 2), (x, w), g) for w in windows]

    return TimedCall(work, call, 3 * len(windows))


def memory(bench: Bench, dtype: str, size: int) -> TimedCall:
    """Sums into a new tensor of `size` bytes: two are read, one is written."""
    count = _tensors(3 * size)
    pairs = [[torch.ones(size // 4, device=bench.device) for _ in range(2)] for _ in range(count)]
    return TimedCall(3.0 * size, lambda: [a + b for a, b in pairs], count)


def elements(bench: Bench, dtype: str, size: int) -> TimedCall:
    """Pointwise arithmetic on `size` bytes: what outweighs memory traffic on a processor."""
    x = torch.randn(64, size // 256, device=bench.device)
    names = ("gelu.default", "silu.default", "softmax.int", "layer_norm.default")
    work = float(sum(ELEMENT_FLOPS[f"aten.{n}"][0] for n in names)) * x.numel()
    return TimedCall(work, lambda: (F.gelu(x), F.silu(x), F.softmax(x, -1), F.layer_norm(x, x.shape[-1:])))


def update(bench: Bench, dtype: str, size: int) -> TimedCall:
    """AdamW, fused, on parameters of `size` bytes: parameter, gradient and two moments are read, all but the gradient
    written."""
    count = _tensors(7 * size)
    parameters = [torch.nn.Parameter(torch.randn(size // 4, device=bench.device)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return TimedCall(7.0 * size, torch.optim.AdamW(parameters, lr=1e-6, fused=True).step, count)


def launch(bench: Bench, dtype: str, size: int) -> TimedCall:
    """An operator on one element, recorded by autograd."""
    x, y = torch.ones(1, device=bench.device, requires_grad=True), torch.ones(1, device=bench.device)
    return TimedCall(1.0, lambda: x * y)


def host(bench: Bench, dtype: str, size: int) -> TimedCall:
    """A copy from pinned memory of the host to the device."""
    source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device=bench.device)
    return TimedCall(float(size), lambda: target.copy_(source, non_blocking=True))


def _tensors(size_bytes: int, round_bytes: int = ROUND_BYTES) -> int:
    return max(1, min(MOST_TENSORS, round_bytes // size_bytes))


# class → (how it is made, launches in one pass, sizes on a processor, further sizes on an accelerator)
TABLE: dict[str, tuple[Callable[[Bench, str, int], TimedCall], float, Sequence[int], Sequence[int]]] = {
    "launch": (launch, 0, (1,), ()),
    "issue": (launch, 0, (1,), ()),
    "matmul": (matmul, 1, (32, 64, 128, 256, 384, 512, 768, 1024), (2048, 4096, 8192)),
    "attention": (attention, 2 / 3.5, (32, 64, 128, 256, 512), (1024, 2048, 4096)),
    "causal": (
        functools.partial(attention, causal=True),
        2 / 3.5,
        (32, 128, 256, 512, 1024),
        (2048, 4096),
    ),
    "conv": (convolution, 2 / 3, (8, 32, 64, 128), (256, 512)),
    "memory": (memory, 1, (4 * KIB, 32 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB), (256 * MIB,)),
    "elements": (elements, 4, (64 * KIB, 256 * KIB), (16 * MIB, 64 * MIB)),
    "update": (update, 1, (16 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB), (256 * MIB,)),
    "host": (host, 0, (), (MIB, 64 * MIB)),
}


def names(bench: Bench) -> list[str]:
    """The rows that this device has, the launch first: the others are less it. An accelerator's pointwise arithmetic is
    as quick as its memory."""
    rows = [
        "launch",
        "matmul f32",
        "matmul bf16",
        "attention f32",
        "causal f32",
        "conv f32",
        "memory",
        "update",
    ]
    if bench.device.type == "cuda":
        return [*rows, "issue", "conv bf16", "attention bf16", "causal bf16", "host"]
    return [*rows, "elements"]


def measure(bench: Bench, name: str, pace: Pace) -> Iterator[Point]:
    """Points of a row, work and seconds of one pass, from small to large; it stops where one call takes too long."""
    kind, _, dtype = name.partition(" ")
    make, _, small, large = TABLE[kind]
    sizes = [*small, *(large if bench.device.type == "cuda" else ())]
    if kind in ("attention", "causal") and bench.device.type == "cuda":
        sizes = [size for size in sizes if size >= TILE]  # smaller ones take as long
    for size in pace.chosen(sizes):
        made = make(bench, dtype or "f32", size)
        made.call()
        timed = bench.host_seconds if kind == "issue" else bench.seconds
        seconds = timed(made.call, pace.point_seconds)
        yield Point(made.work, seconds / made.passes)
        if seconds > TOO_LONG:
            return
