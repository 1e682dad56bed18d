"""Rows of operators: work and seconds by size, forward and backward together where a model runs both.

Work is counted as `meshwright.cost.operators` does, so that a rate found here is the rate looked up there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn import functional as F

from meshwright.calibrate.bench import Bench, Call
from meshwright.calibrate.plan import Pace, Point
from meshwright.cost.operators import ELEMENT_FLOPS

TORCH_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
TOO_LONG = 0.15  # seconds of one call after which no larger size is tried, on any rank

Made = tuple[float, Call]  # the work of a call, and the call


def matmul(bench: Bench, dtype: str, size: int) -> Made:
    """The three products of a linear layer, forward and backward, all of size³."""
    x, w, g = (torch.randn(size, size, device=bench.device).to(TORCH_DTYPES[dtype]) for _ in range(3))

    def call() -> None:
        F.linear(x, w)
        g @ w
        g.t() @ x

    return 2.0 * size**3, call


def attention(bench: Bench, dtype: str, size: int) -> Made:
    """Fused attention of 8 sequences × heads of width 64 over `size` places, forward and backward."""
    q, k, v, g = (torch.randn(2, 4, size, 64, device=bench.device).to(TORCH_DTYPES[dtype]) for _ in range(4))
    wanted = [t.requires_grad_() for t in (q, k, v)]
    return 4.0 * 8 * size**2 * 64, lambda: torch.autograd.grad(
        F.scaled_dot_product_attention(q, k, v), wanted, g
    )


def convolution(bench: Bench, dtype: str, size: int) -> Made:
    """A 3 × 3 convolution with `size` channels on 4 images of 28 × 28, forward and backward."""
    kind = TORCH_DTYPES[dtype]
    x = torch.randn(4, size, 28, 28, device=bench.device).to(kind).requires_grad_()
    w = torch.randn(size, size, 3, 3, device=bench.device).to(kind).requires_grad_()
    g = torch.randn(4, size, 28, 28, device=bench.device).to(kind)
    return 2.0 * 4 * 28 * 28 * size**2 * 9, lambda: torch.autograd.grad(F.conv2d(x, w, padding=1), (x, w), g)


def memory(bench: Bench, dtype: str, size: int) -> Made:
    """Sums into a new tensor of `size` bytes: two are read, one is written."""
    a, b = (torch.ones(size // 4, device=bench.device) for _ in range(2))
    return 3.0 * size, lambda: a + b


def elements(bench: Bench, dtype: str, size: int) -> Made:
    """Pointwise arithmetic on `size` bytes: what outweighs memory traffic on a processor."""
    x = torch.randn(64, size // 256, device=bench.device)
    flops = sum(
        ELEMENT_FLOPS[f"aten.{n}"][0]
        for n in ("gelu.default", "silu.default", "softmax.int", "layer_norm.default")
    )

    def call() -> None:
        F.gelu(x)
        F.silu(x)
        F.softmax(x, -1)
        F.layer_norm(x, x.shape[-1:])

    return float(flops) * x.numel(), call


def update(bench: Bench, dtype: str, size: int) -> Made:
    """AdamW, fused, on parameters of `size` bytes: parameter, gradient and two moments read, all but the gradient
    written."""
    parameter = torch.nn.Parameter(torch.randn(size // 4, device=bench.device))
    parameter.grad = torch.randn_like(parameter)
    return 7.0 * size, torch.optim.AdamW([parameter], lr=1e-6, fused=True).step


def launch(bench: Bench, dtype: str, size: int) -> Made:
    """An operator on one element, recorded by autograd."""
    x, y = torch.ones(1, device=bench.device, requires_grad=True), torch.ones(1, device=bench.device)
    return 1.0, lambda: x * y


def host(bench: Bench, dtype: str, size: int) -> Made:
    """A copy from pinned memory of the host to the device."""
    source, target = (
        torch.empty(size, dtype=torch.uint8, pin_memory=True),
        torch.empty(size, dtype=torch.uint8, device=bench.device),
    )
    return float(size), lambda: target.copy_(source, non_blocking=True)


KIB, MIB = 1 << 10, 1 << 20
# class → (how it is made, launches and passes in one call, sizes on a processor, further sizes on an accelerator). The
# passes are what the work of a call is multiplied by: a linear's three products, attention's 2 + 5 halves.
Maker = Callable[[Bench, str, int], Made]
TABLE: dict[str, tuple[Maker, int, float, Sequence[int], Sequence[int]]] = {
    "launch": (launch, 0, 1.0, (1,), ()),
    "matmul": (matmul, 3, 3.0, (32, 64, 128, 256, 384, 512, 768, 1024), (2048, 4096, 8192)),
    "attention": (attention, 2, 3.5, (32, 64, 128, 256, 512), (1024, 2048, 4096)),
    "conv": (convolution, 2, 3.0, (8, 32, 64, 128), (256, 512)),
    "memory": (
        memory,
        1,
        1.0,
        (4 * KIB, 32 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB),
        (256 * MIB,),
    ),
    "elements": (elements, 4, 1.0, (64 * KIB, 256 * KIB), (16 * MIB, 64 * MIB)),
    "update": (update, 1, 1.0, (16 * KIB, 256 * KIB, 4 * MIB, 16 * MIB), (256 * MIB,)),
    "host": (host, 0, 1.0, (), (MIB, 64 * MIB)),
}


def names(bench: Bench) -> list[str]:
    """The rows that this device has, the launch first: the others are less it."""
    rows = [
        "launch",
        "matmul f32",
        "matmul bf16",
        "attention f32",
        "conv f32",
        "memory",
        "elements",
        "update",
    ]
    return [*rows, "attention bf16", "host"] if bench.device.type == "cuda" else rows


def measure(bench: Bench, name: str, pace: Pace) -> Iterator[Point]:
    """Points of a row, from small to large; it stops where one call takes too long."""
    kind, _, dtype = name.partition(" ")
    make, _, _, small, large = TABLE[kind]
    sizes = [*small, *(large if bench.device.type == "cuda" else ())]
    for size in sizes[::-1][:: pace.every][::-1]:
        work, call = make(bench, dtype or "f32", size)
        call()
        seconds = bench.seconds(call, pace.point_seconds)
        yield Point(work, seconds)
        if seconds > TOO_LONG:
            return
