"""Gradients of an eager model as means over the examples of all ranks, each with a batch of its own size."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from meshwright.runtime.communicator import Communicator


def mean_gradients(
    parameters: Sequence[torch.Tensor], weight: float, comm: Communicator, also: Sequence[float] = ()
) -> list[float]:
    """Replace gradients, which are means over `weight` examples, by those over the examples of all ranks; return the
    sums of what each gives `also`. Collective.

    A parameter without a gradient on any rank keeps none.
    """
    wide = functools.reduce(torch.promote_types, {p.dtype for p in parameters}, torch.float32)
    used = torch.tensor([weight, *(float(p.grad is not None) for p in parameters), *also], dtype=wide)
    flat = [
        (torch.zeros_like(p) if p.grad is None else p.grad).flatten().to(wide) * weight for p in parameters
    ]
    total = comm.all_reduce(torch.cat([used, *flat]), tuple(a.name for a in comm.mesh.axes))
    count, told = total[0], total[1 : len(used)].tolist()
    there, added = told[: len(parameters)], told[len(parameters) :]
    sums = total[len(used) :].split([p.numel() for p in parameters])
    for parameter, found, used_by in zip(parameters, sums, there, strict=True):
        parameter.grad = (found / count).view_as(parameter).to(parameter.dtype) if used_by else None
    return added


__all__ = ["mean_gradients"]
