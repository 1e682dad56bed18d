"""The gradients of one round as one: a mean over its pushes, weighted by their examples; rows of one id summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from meshwright.servers.shards import Options


@dataclass(frozen=True, slots=True)
class Gradients:
    """Of one push. `rows`: by table, ids and their gradients."""

    weight: float
    dense: dict[str, torch.Tensor] = field(default_factory=dict)
    rows: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    options: dict[str, Options] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A push that counts once its worker commits it. `clock`: of the worker."""

    clock: int
    gradients: Gradients


def mean(pushes: Sequence[Gradients]) -> Gradients:
    """The gradients of several pushes as those of one; nothing where they have no examples."""
    weight = sum(push.weight for push in pushes)
    if not weight:
        return Gradients(0.0)
    dense = {
        name: mean_dense(name, pushes) for name in dict.fromkeys(n for push in pushes for n in push.dense)
    }
    rows = {name: mean_rows(name, pushes) for name in dict.fromkeys(n for push in pushes for n in push.rows)}
    return Gradients(weight, dense, rows, pushes[0].options)


def mean_dense(name: str, pushes: Sequence[Gradients]) -> torch.Tensor:
    """The mean gradient of a parameter that some push has; the others count as zero."""
    if len(pushes) == 1:
        return pushes[0].dense[name]
    total = sum(push.weight for push in pushes)
    parts = [push.dense[name] * (push.weight / total) for push in pushes if name in push.dense]
    return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]


def mean_rows(name: str, pushes: Sequence[Gradients]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, each once and in order, and their mean gradients."""
    total = sum(push.weight for push in pushes)
    found = [(push.weight / total, *push.rows[name]) for push in pushes if name in push.rows]
    ids = torch.cat([ids for _, ids, _ in found])
    rows = torch.cat([rows if share == 1.0 else rows * share for share, _, rows in found])
    return sum_rows(ids, rows)


def sum_rows(ids: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [n], each once and in order, and the sums of their rows [n, …]."""
    if ids.numel() < 2 or bool((ids[1:] > ids[:-1]).all()):  # as a worker sends them
        return ids, rows
    unique, where = torch.unique(ids, return_inverse=True)
    return unique, torch.zeros((len(unique), *rows.shape[1:]), dtype=rows.dtype).index_add_(0, where, rows)


__all__ = ["Gradients", "Prepared", "mean", "mean_dense", "mean_rows", "sum_rows"]
