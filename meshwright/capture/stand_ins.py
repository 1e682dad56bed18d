"""Calls of torch whose meaning a trace would miss, as the same numbers by other calls.

The cumulative averages of ``nn.BatchNorm2d(…, momentum=None)`` divide by a count of batches that is read to a Python
number; ``torch.cov`` and ``torch.corrcoef`` read whether there are examples enough. The operator of ``instance_norm``
updates the running statistics unseen. A dropout that does nothing returns what it is given, itself. What an autocast
casts inside is in `autocast`, and losses are in `losses`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.capture.autocast import composed
from meshwright.capture.export_errors import AS_IT_IS
from meshwright.capture.losses import composed_loss
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


def _instance_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    out = F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    if use_input_stats:
        var, mean = torch.var_mean(input.detach(), tuple(range(2, input.dim())))
        for running, now in ((running_mean, mean), (running_var, var)):
            if running is not None:
                running.mul_(1 - momentum).add_(now.mean(0), alpha=momentum)
    return out


def _cov(
    input: torch.Tensor,
    *,
    correction: int = 1,
    fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> torch.Tensor:
    rows = input.reshape(1, -1) if input.dim() < 2 else input
    given = [w for w in (fweights, aweights) if w is not None]
    if not given:
        centred = rows - rows.mean(1, keepdim=True)
        return (centred @ centred.mT / max(rows.shape[1] - correction, 0)).squeeze()
    weights = given[0] if len(given) == 1 else given[0] * given[1]
    total = weights.sum()
    lost = correction if aweights is None else correction * (weights * aweights).sum() / total
    centred = rows - (rows * weights).sum(1, keepdim=True) / total
    return (centred @ (centred * weights).mT / (total - lost).clamp(min=0)).squeeze()


def _corrcoef(input: torch.Tensor) -> torch.Tensor:
    found = _cov(input)
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
    F.instance_norm: _instance_norm,
    torch.cov: _cov,
    torch.Tensor.cov: _cov,
    torch.corrcoef: _corrcoef,
    torch.Tensor.corrcoef: _corrcoef,
    F.ctc_loss: _ctc_loss,
    torch.ctc_loss: _ctc_loss,
}


OF_FLOATS = (_cov, _corrcoef)

# Dropouts by name → whether they train where nothing says so.
IDLE = {"dropout": True, "dropout1d": True, "dropout2d": True, "dropout3d": True, "feature_dropout": True}
IDLE |= {"alpha_dropout": False, "feature_alpha_dropout": False}


def stand_in(func: Any, args: Any, kwargs: Any) -> Callable[..., Any]:
    """Return what is called in place of a call of torch: mostly the same."""
    given = {**dict(zip(("input", "p", "training"), args, strict=False)), **kwargs}
    if _is_idle_dropout(getattr(func, "__name__", ""), given):
        return lambda *_, **__: given["input"]
    found = STAND_INS.get(func) or composed(func, args, kwargs) or composed_loss(func, args, kwargs)
    if found is None or (found in OF_FLOATS and not given["input"].is_floating_point()):
        return func
    return found


def _is_idle_dropout(name: str, given: Mapping[str, Any]) -> bool:
    """Return whether a call returns what it is given, itself: whoever writes into the result in place writes there."""
    if name not in IDLE or "input" not in given:
        return False
    share = given.get("p", 0.5)
    trains = given.get("training", given.get("train", IDLE[name]))
    return (not trains and 0 <= share <= 1) or share == 0


__all__ = ["cumulative_norms", "stand_in"]
