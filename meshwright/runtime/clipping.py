"""Clipping by the norm of all gradients, wherever their parts are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from meshwright import heartbeat
from meshwright.runtime.communicator import Communicator
from meshwright.runtime.pipeline_rank import Pipeline


def clip_by_global_norm(
    counted: Iterable[tuple[torch.Tensor, tuple[str, ...]]],
    scaled: Sequence[torch.Tensor],
    limit: float,
    comm: Communicator,
    device: torch.device,
    stages: tuple[Pipeline, int] | None = None,
) -> torch.Tensor:
    """Scale the gradients `scaled` so that their global 2-norm is at most `limit`, as `torch.nn.utils.clip_grad_norm_`
    does on one device. `counted`: those that count here, with the axes that shard each. `stages`: the pipeline and a
    tag for its message, if there is one.

    Each element counts once: squares are added over the axes that shard a gradient, and not over those that replicate
    it. Returns the norm before clipping.
    """
    by_axes: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for gradient, axes in counted:
        by_axes.setdefault(axes, []).append(gradient)
    total: torch.Tensor | None = None
    for axes, gradients in by_axes.items():
        squares = [torch.linalg.vector_norm(g).to(device) ** 2 for g in gradients]
        part = torch.stack(squares).sum()
        heartbeat.of("the norm of all gradients")
        part = comm.all_reduce(part, axes) if axes else part
        total = part if total is None else total + part
    if stages is not None:
        pipe, tag = stages
        mine = torch.zeros((), device=device) if total is None else total
        total = pipe.comm.sum_over(mine.double(), pipe.meshes.every_place, tag).to(mine.dtype)
    if total is None:
        return torch.zeros(())
    norm = total.sqrt()
    if math.isinf(limit):
        return norm
    scale = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for gradient in scaled:
        gradient.mul_(scale.to(gradient.device))
    return norm


def global_norms(
    gradients: Mapping[str, tuple[torch.Tensor, tuple[str, ...]]], comm: Communicator, device: torch.device
) -> dict[str, torch.Tensor]:
    """Name → the 2-norm of a full gradient. `gradients`: this rank's shard of each, with the axes that shard it.
    Collective."""
    by_axes: dict[tuple[str, ...], list[str]] = {}
    for name, (_, axes) in gradients.items():
        by_axes.setdefault(axes, []).append(name)
    found: dict[str, torch.Tensor] = {}
    for axes, names in by_axes.items():
        squares = torch.stack([torch.linalg.vector_norm(gradients[n][0]).to(device) ** 2 for n in names])
        heartbeat.of("the norms of gradients")
        squares = comm.all_reduce(squares, axes) if axes else squares
        found |= dict(zip(names, squares.sqrt().unbind(), strict=True))
    return {name: found[name] for name in gradients}


__all__ = ["clip_by_global_norm", "global_norms"]
