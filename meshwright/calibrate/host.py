"""Rows of what an accelerator's host takes to issue an operator, forward and backward, by kind.

A product with its weights takes the host several times as long as a pointwise operator, and a view takes it some time
though the device does nothing. Each row is a chain of one kind on tiny tensors, so that the host is never ahead; a
factor from full steps (``issue``) says how much longer all of them take there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from meshwright.calibrate.bench import Bench
from meshwright.calibrate.plan import Pace, Point

PREFIX = "host "  # of the names of rows
LENGTH = 16  # of a chain: what starting backward takes is little beside it
BIASED, UPDATE = "biased", "update"  # products with a bias; a parameter's update


@dataclass(frozen=True)
class Chain:
    """One link of a chain: a call on what the link before has made, of this `shape`, and on `leaves` of its own. It has
    many `operators`."""

    link: Callable[..., torch.Tensor]
    leaves: tuple[tuple[int, ...], ...] = ()
    shape: tuple[int, ...] = (2, 4, 8)
    operators: int = 1


CHAINS: Mapping[str, Chain] = {
    "matmul": Chain(F.linear, ((8, 8),)),
    BIASED: Chain(F.linear, ((8, 8), (8,))),
    "memory": Chain(lambda x, y: F.gelu(x * y), ((2, 4, 8),), operators=2),
    "layer_norm": Chain(lambda x, w, b: F.layer_norm(x, (8,), w, b), ((8,), (8,))),
    "attention": Chain(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), shape=(1, 2, 8, 8)),
    "conv": Chain(lambda x, w: F.conv2d(x, w, padding=1), ((4, 4, 3, 3),), (1, 4, 8, 8)),
    "free": Chain(lambda x: x.view(2, 4, 2, 4).transpose(1, 2).transpose(1, 2).view(2, 4, 8), operators=4),
}


def names(bench: Bench) -> list[str]:
    """The rows that this device has."""
    return [PREFIX + name for name in (*CHAINS, UPDATE)] if bench.device.type == "cuda" else []


def measure(bench: Bench, row: str, pace: Pace) -> Iterator[Point]:
    """Seconds of the host for one operator forward, and forward and backward; of the update of one parameter."""
    name = row.removeprefix(PREFIX)
    if name == UPDATE:
        one, all_ = (
            bench.host_seconds(_update(bench.device, count), pace.point_seconds, 10)
            for count in (1, 1 + LENGTH)
        )
        yield Point(1.0, max(all_ - one, 0.0) / LENGTH)
        return
    chain = CHAINS[name]
    x = torch.ones(chain.shape, device=bench.device, requires_grad=True)
    leaves = [
        [torch.ones(shape, device=bench.device, requires_grad=True) for shape in chain.leaves]
        for _ in range(LENGTH)
    ]
    wanted = [x, *(leaf for some in leaves for leaf in some)]

    def forward() -> torch.Tensor:
        made = x
        for some in leaves:
            made = chain.link(made, *some)
        return made

    gradient = torch.ones_like(forward())
    for call in (forward, lambda: torch.autograd.grad(forward(), wanted, gradient)):
        seconds = bench.host_seconds(call, pace.point_seconds, 10)
        yield Point(1.0, seconds / (LENGTH * chain.operators))


def _update(device: torch.device, count: int) -> Callable[[], object]:
    parameters = [torch.nn.Parameter(torch.ones(8, device=device)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return torch.optim.AdamW(parameters, lr=1e-6, fused=True).step


def issues(points: Mapping[str, tuple[Point, ...]], issue_seconds: float) -> dict[str, tuple[float, float]]:
    """Return the factors of `Measured.issues` from the rows that were measured."""
    found: dict[str, tuple[float, float]] = {}
    if not issue_seconds:
        return found
    for name, row in points.items():
        if not name.startswith(PREFIX):
            continue
        first, *rest = (point.seconds / issue_seconds for point in row)
        found[name.removeprefix(PREFIX)] = _factor(first), _factor(rest[0] - first if rest else 0.0)
    if BIASED in found:
        (forward, backward), (plain, plain_backward) = found.pop(BIASED), found.get("matmul", (1.0, 1.0))
        found["bias"] = _factor(forward - plain), _factor(backward - plain_backward)
    return found


def _factor(value: float) -> float:
    return float(f"{min(max(value, 0.01), 1000.0):.4g}")


__all__ = ["PREFIX", "issues", "measure", "names"]
