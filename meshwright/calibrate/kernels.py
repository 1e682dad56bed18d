"""Rows of single operators of an accelerator: how much longer they take than their bytes and FLOPs.

A roofline knows the bytes of a norm's backward, not that its kernel reads them in an order that takes five times as
long. Each operator is captured by itself, for its work, and run at one size that fills the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.calibrate.bench import Bench
from meshwright.calibrate.operators import TORCH_DTYPES
from meshwright.calibrate.plan import Pace, Point
from meshwright.calibrate.step_rows import works
from meshwright.compile import captured_of, lower, plan_captured
from meshwright.core.mesh import Mesh
from meshwright.cost.operator_tables import BIAS, MASKED, UNFUSED
from meshwright.cost.operators import Work
from meshwright.errors import MeshwrightError

PREFIX = "operator "  # of the names of rows


@dataclass(frozen=True)
class Size:
    """The sizes of what is measured."""

    rows: int = 8192
    width: int = 1024
    tokens: int = 32768
    images: int = 32
    channels: int = 256

    def shape(self, letters: str) -> tuple[int, ...]:
        """The shape that letters stand for: rows, half of them, width, half of it, tokens, images, attention."""
        known = {
            "r": (self.rows,), "s": (self.rows // 2,), "w": (self.width,), "v": (self.width // 2,),
            "t": (self.tokens,), "i": (self.images, self.channels, 28, 28), "c": (self.channels,),
            "a": (4, 16, self.width, 64), "g": (4, 4, self.width, 64),
        }  # fmt: skip
        return tuple(n for letter in letters for n in known[letter])


SIZE = Size()


@dataclass(frozen=True)
class Call:
    """A call on parameters, whose shapes `Size.shape` spells."""

    function: Callable[[Operator], torch.Tensor]
    shapes: tuple[str, ...] = ("rw",)


class Operator(nn.Module):
    """One call, on parameters, so that backward computes all gradients."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call.function
        shapes = [SIZE.shape(letters) for letters in call.shapes]
        self.x = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)
        self.ids = nn.Buffer(torch.randint(0, min(shapes[0]), (SIZE.rows // 2,)))
        self.mask = nn.Buffer(torch.ones(4, 1, SIZE.width, SIZE.width, dtype=torch.bool))
        self.mean, self.variance = nn.Buffer(torch.zeros(shapes[-1])), nn.Buffer(torch.ones(shapes[-1]))

    def forward(self) -> torch.Tensor:
        """The result."""
        return self.call(self)


OPERATORS: Mapping[str, Call] = {
    "layer_norm": Call(lambda o: F.layer_norm(o.x[0], o.x[1].shape, o.x[1], o.x[2]), ("rw", "w", "w")),
    "rms_norm": Call(lambda o: F.rms_norm(o.x[0], o.x[1].shape, o.x[1]), ("rw", "w")),
    "gelu": Call(lambda o: F.gelu(o.x[0])),
    "silu": Call(lambda o: F.silu(o.x[0])),
    "relu": Call(lambda o: F.relu(o.x[0])),
    "add": Call(lambda o: o.x[0] + o.x[1], ("rw", "rw")),
    "mul": Call(lambda o: o.x[0] * o.x[1], ("rw", "rw")),
    "cat": Call(lambda o: torch.cat([o.x[0], o.x[1]], -1), ("rv", "rv")),
    "cross_entropy_loss": Call(lambda o: F.cross_entropy(o.x[0], o.ids), ("st",)),
    "embedding": Call(lambda o: F.embedding(o.ids, o.x[0]), ("tw",)),
    "_native_batch_norm_legit_functional": Call(
        lambda o: F.batch_norm(o.x[0], o.mean, o.variance, o.x[1], o.x[2], training=True), ("i", "c", "c")
    ),
    UNFUSED: Call(
        lambda o: F.scaled_dot_product_attention(*o.x, is_causal=True, enable_gqa=True), ("a", "g", "g")
    ),
    MASKED: Call(lambda o: F.scaled_dot_product_attention(*o.x, attn_mask=o.mask), ("a", "a", "a")),
}


def names(bench: Bench) -> list[str]:
    """The rows that this device has. Attention of grouped heads has no kernel in f32 alone."""
    if bench.device.type != "cuda":
        return []
    kinds = [(name, dtype) for name in (BIAS, *OPERATORS) for dtype in TORCH_DTYPES]
    return [f"{PREFIX}{name} {dtype}" for name, dtype in kinds if (name, dtype) != (UNFUSED, "bf16")]


def measure(bench: Bench, row: str, pace: Pace) -> tuple[Iterator[Point], dict[str, Any]]:
    """Seconds forward and backward, and the work that the cost model counts. No points, and the reason, of an operator
    that cannot be run here: a calibration does without."""
    try:
        return _measured(bench, row, pace)
    except (RuntimeError, MeshwrightError) as error:
        return iter(()), {"left out": str(error)}


def _measured(bench: Bench, row: str, pace: Pace) -> tuple[Iterator[Point], dict[str, Any]]:
    name, dtype = row.removeprefix(PREFIX).split()
    if name == BIAS:
        x = torch.randn(SIZE.shape("rw"), device=bench.device).to(TORCH_DTYPES[dtype])
        seconds = bench.seconds(lambda: x.sum(0), pace.point_seconds / 2)
        work = Work("memory", dtype, 0.0, 0.0, 0.0, float(x.nbytes), 0.0, 1.0)
        return iter([Point(1.0, 0.0), Point(1.0, seconds)]), {"work": asdict(work)}
    with bench.device:
        model = Operator(OPERATORS[name]).to(TORCH_DTYPES[dtype])
    work = _work(model, name)
    made = model()
    gradient, inputs = torch.randn_like(made), list(model.x)

    def forward() -> object:
        with torch.no_grad():
            return model()

    def backward() -> object:
        return torch.autograd.grad(made, inputs, gradient, retain_graph=True)

    points = [Point(1.0, bench.seconds(half, pace.point_seconds / 2)) for half in (forward, backward)]
    return iter(points), {"work": asdict(work)}


def _work(model: Operator, name: str) -> Work:
    """The work of the operator, as the cost model counts it."""
    batch = {"scale": torch.ones((), device=model.x[0].device)}
    captured = captured_of(model, batch, lambda model, batch: (model() * batch["scale"]).float().sum())
    plan = plan_captured(captured, Mesh.of(rank=1), "stand_alone", None)
    found = [work for work in works(lower(captured, plan), "cuda").values() if work.name == name]
    if not found:
        raise RuntimeError(f"{name} was captured as something else")
    return max(found, key=lambda work: float(work.bytes_forward))  # the loss may have another, on one element


__all__ = ["OPERATORS", "PREFIX", "measure", "names"]
