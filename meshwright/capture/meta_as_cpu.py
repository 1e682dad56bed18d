"""Trace a model on the meta device as one on the CPU, without memory for it.

A tensor that code makes on the way, such as the list in ``x[..., [-2]]``, is a constant of the program. Beside tensors
on the meta device it is made there, and its values are lost. A trace reads shapes alone, so for its time the tensors of
the model and of the batch can be CPU tensors whose memory was given back, or never touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from meshwright.capture.pytree import leaves, rebuild


@contextmanager
def meta_as_cpu(model: torch.nn.Module, batch: Any) -> Iterator[Any]:
    """Within it, parameters and buffers of `model` on the meta device are on the CPU; yields the batch likewise."""
    before: list[tuple[torch.nn.Module, str, torch.Tensor]] = []
    made: dict[int, torch.Tensor] = {}  # ties stay ties
    for module in model.modules():
        for name, x in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if x.is_meta:
                before.append((module, name, x))
                made[id(x)] = _without_memory(x)
    try:
        for module, name, x in before:
            setattr(module, name, made[id(x)])
        yield rebuild(batch, [_untouched(x) if x.is_meta else x for _, x in leaves(batch)])
    finally:
        for module, name, x in before:
            setattr(module, name, x)


def _untouched(x: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor of the same shape, strides and dtype, whose memory nobody has written to: it takes none."""
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
    return made.requires_grad_(x.requires_grad)


def _without_memory(x: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor of the same class, shape, strides, dtype and attributes, whose storage is empty."""
    made = _untouched(x)
    made.untyped_storage().resize_(0)
    if isinstance(x, torch.nn.Parameter):
        made = torch.nn.Parameter(made.detach(), requires_grad=x.requires_grad)
    vars(made).update(vars(x))
    return made


__all__ = ["meta_as_cpu"]
