"""Calls of torch that read values on the host, which a captured program cannot, as the same numbers without reading.

The cumulative averages of ``nn.BatchNorm2d(…, momentum=None)`` divide by a count of batches that is read to a Python
number; ``torch.cov`` and ``torch.corrcoef`` read whether there are examples enough.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.capture.export_errors import AS_IT_IS
from meshwright.capture.meta_init_record import user_line
from meshwright.errors import CaptureError

NORMS = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


class Cumulative(float):
    """The momentum of a batch norm during a capture that averages over all batches: its statistics are those of this
    batch alone, from which `_batch_norm` makes averages."""

    norm: NORMS

    @staticmethod
    def of(norm: NORMS) -> Cumulative:
        """Make that of a module."""
        made = Cumulative(1.0)
        made.norm = norm
        return made


@contextlib.contextmanager
def cumulative_norms(model: nn.Module) -> Iterator[None]:
    """Have no batch norm of a model read its count of batches."""
    found = [
        m
        for m in model.modules()
        if isinstance(m, NORMS) and m.momentum is None and m.training and m.num_batches_tracked is not None
    ]
    for norm in found:
        norm.momentum = Cumulative.of(norm)
    try:
        yield
    finally:
        for norm in found:
            norm.momentum = None


def _batch_norm(
    x: torch.Tensor,
    mean: torch.Tensor | None,
    var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    count = momentum.norm.num_batches_tracked if isinstance(momentum, Cumulative) else None
    if count is None or mean is None or var is None:
        return F.batch_norm(x, mean, var, weight, bias, training, float(momentum), eps)
    mean_now, var_now = torch.zeros_like(mean), torch.zeros_like(var)
    out = F.batch_norm(x, mean_now, var_now, weight, bias, training, 1.0, eps)
    count.add_((mean_now * 0).nan_to_num().sum().to(count.dtype))  # nothing, but of each micro-batch
    share = 1.0 / count.to(mean.dtype)
    mean.copy_(mean * (1 - share) + mean_now * share)
    var.copy_(var * (1 - share) + var_now * share)
    return out


def _cov(
    x: torch.Tensor,
    *,
    correction: int = 1,
    fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> torch.Tensor:
    rows = x.reshape(1, -1) if x.dim() < 2 else x
    given = [w for w in (fweights, aweights) if w is not None]
    if not given:
        centred = rows - rows.mean(1, keepdim=True)
        return (centred @ centred.mT.conj() / max(rows.shape[1] - correction, 0)).squeeze()
    weights = given[0] if len(given) == 1 else given[0] * given[1]
    total = weights.sum()
    lost = correction if aweights is None else correction * (weights * aweights).sum() / total
    centred = rows - (rows * weights).sum(1, keepdim=True) / total
    return (centred @ (centred * weights).mT.conj() / (total - lost).clamp(min=0)).squeeze()


def _corrcoef(x: torch.Tensor) -> torch.Tensor:
    found = _cov(x)
    if not found.dim():
        return found / found
    deviation = found.diagonal().sqrt()
    return (found / deviation[:, None] / deviation).clamp(-1, 1)


def _ctc_loss(*_: Any, **__: Any) -> torch.Tensor:
    raise CaptureError(
        "ctc_loss() cannot be captured",
        why="it reads the lengths on the host: what it computes depends on them",
        where=user_line(),
        hint=f"{AS_IT_IS}; or call it in an operator of your own, made with torch.library.custom_op and "
        "register_autograd, and give that a rule with mw.rule",
    )


STAND_INS: dict[Any, Callable[..., Any]] = {
    F.batch_norm: _batch_norm,
    torch.cov: _cov,
    torch.Tensor.cov: _cov,
    torch.corrcoef: _corrcoef,
    torch.Tensor.corrcoef: _corrcoef,
    F.ctc_loss: _ctc_loss,
    torch.ctc_loss: _ctc_loss,
}


def stand_in(func: Any, args: Any) -> Any:
    """Return what is called in place of a call of torch: mostly the same."""
    found = STAND_INS.get(func)
    real = found is not _cov and found is not _corrcoef
    return func if found is None or not (real or args[0].is_floating_point()) else found


__all__ = ["cumulative_norms", "stand_in"]
