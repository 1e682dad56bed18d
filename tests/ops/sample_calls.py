"""What a sample of an operator is written with: tensors to be made, and the calls that were added so far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.ops.prove import Sample, sample

F64 = torch.float64
Build = Callable[[], Sample]


def f(*shape: int) -> torch.Tensor:
    """Floats that want a gradient."""
    return torch.randn(shape, dtype=F64).requires_grad_()


def p(*shape: int) -> torch.Tensor:
    """Floats in (0.1, 0.9)."""
    return (torch.rand(shape, dtype=F64) * 0.8 + 0.1).requires_grad_()


def i(high: int, *shape: int) -> torch.Tensor:
    """Integers in [0, high)."""
    return torch.randint(high, shape)


def b(*shape: int) -> torch.Tensor:
    """Booleans."""
    return torch.rand(shape) < 0.6


SAMPLES: dict[str, list[Build]] = {}


def fresh(value: Any) -> Any:
    """An argument whose tensors are made now."""
    if isinstance(value, list | tuple):
        return type(value)(map(fresh, value))
    return value() if callable(value) and not isinstance(value, torch.dtype) else value


def add(op: str, *args: Any, **kwargs: Any) -> None:
    """One more sample; tensors among the arguments are given by functions so that each use is fresh."""

    def build() -> Sample:
        torch.manual_seed(1)
        return sample(op, *fresh(args), **{k: fresh(v) for k, v in kwargs.items()})

    SAMPLES.setdefault(op, []).append(build)


def twice(op: str, *args: Any, **kwargs: Any) -> None:
    """A sample in which one value is read twice."""

    def build() -> Sample:
        torch.manual_seed(1)
        x = f(4, 6)
        return sample(op, x, x, *fresh(args), **kwargs)

    SAMPLES.setdefault(op, []).append(build)


def T(make: Callable[..., torch.Tensor], *shape: int) -> Callable[[], torch.Tensor]:
    """A tensor to be made."""
    return lambda: make(*shape)
