"""Limits of the norm of all gradients of a step, and what servers and workers compute of it."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping

import torch

from meshwright.core.type_guards import is_number
from meshwright.errors import ServerError
from meshwright.servers import messages as m
from meshwright.servers.rounds import Gradients

Rows = tuple[torch.Tensor, torch.Tensor]

MOST = sys.float_info.max  # stands for infinity, which JSON does not have: the norm is only measured
EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_


def limit_of(clip_norm: object, staleness: int | None, outside: bool) -> m.Limit | None:
    """What a job declares. `outside`: parameters on no server count, too. Raises ServerError."""
    if clip_norm is None:
        return None
    if not (is_number(clip_norm) and clip_norm > 0):
        raise ServerError(
            f"clip_norm={clip_norm!r}",
            why="gradients are scaled down to that norm: a number above 0 is expected",
            hint="clip_norm=1.0, math.inf to only compute the norm, or leave it out",
        )
    if staleness != 0 and outside:
        raise ServerError(
            f"clip_norm={clip_norm!r} with staleness={staleness!r}, and parameters on no server",
            why="these are updated by the gradients of all workers, and each push is an update of its own",
            hint="staleness=0, or all parameters on servers: mw.on_server(model)",
        )
    return m.Limit(min(float(clip_norm), MOST), outside)


def unknown_norm(limit: m.Limit | None) -> ServerError:
    """The error of a step whose gradients have no norm yet."""
    why = "clip_norm= was not given" if limit is None else "no step has been done"
    hint = "clip_norm=math.inf computes it without clipping" if limit is None else "step(batch)"
    return ServerError("the norm of the gradients is not known", why=why, hint=hint)


def shown_limit(limit: m.Limit | None) -> float | None:
    """The ``clip_norm=`` of a step."""
    return None if limit is None else math.inf if limit.norm >= MOST else limit.norm


def other_norm(clip_norm: object) -> ServerError:
    """The error of a step whose limit is assigned to."""
    return ServerError(
        f"step.clip_norm = {clip_norm!r} of a step with parameters on servers",
        why="servers clip, too, by the limit that the job was started with",
        hint="clip_norm= when the step is built; to change it, step.save(path) and a new job that resumes there",
    )


def factor(norm: float, limit: m.Limit | None) -> float:
    """By which gradients of this norm are multiplied."""
    if limit is None or limit.norm >= MOST:
        return 1.0
    return norm if math.isnan(norm) else min(1.0, limit.norm / (norm + EPS))


def clipped(
    dense: Mapping[str, torch.Tensor], rows: Mapping[str, Rows], limit: m.Limit
) -> tuple[float, dict[str, torch.Tensor], dict[str, Rows]]:
    """The norm of the gradients of one push, and these, scaled. `rows`: ids, each once, with their gradients."""
    norm = math.sqrt(squares_of([*dense.values(), *(x for _, x in rows.values())]))
    scale = factor(norm, limit)
    return (
        norm,
        {n: x * scale for n, x in dense.items()},
        {n: (ids, x * scale) for n, (ids, x) in rows.items()},
    )


def squares(mean: Gradients) -> float:
    """The sum of squares of all elements."""
    return squares_of([*mean.dense.values(), *(rows for _, rows in mean.rows.values())])


def squares_of(tensors: list[torch.Tensor]) -> float:
    """The sum of squares of the elements of these tensors, in float64."""
    flat = [x.coalesce().values() if x.is_sparse else x for x in tensors if x.numel()]
    norms = [float(torch.linalg.vector_norm(x, dtype=torch.float64)) for x in flat if x.numel()]
    return sum(norm * norm for norm in norms)  # infinite rather than an OverflowError


__all__ = ["MOST", "clipped", "factor", "limit_of", "squares", "squares_of", "unknown_norm"]
