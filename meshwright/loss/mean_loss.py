"""Whether a loss is a mean over the rows of a batch: then the gradients of shares of it make up that of all rows."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch

from meshwright.errors import BatchError
from meshwright.loss.evaluation import without_trace
from meshwright.loss.example_count import Share, Weight, weight_of
from meshwright.loss.loss_value import Loss, scalar

SMALL = 0.1  # a smaller loss is a difference of larger numbers, with their rounding
HINT = (
    'weight=lambda batch: (batch["labels"] != -100).sum() counts the labels of a share that the loss does not ignore; '
    "divide a sum over rows by their number; mw.parameter_server(…) trains batches of each worker's own"
)


def check_mean(
    model: torch.nn.Module, loss: Loss, weight: Weight, batch: Any, share: Share, workers: int
) -> None:
    """Raise BatchError if the loss of a batch is not the weighted mean of the losses of its shares.

    All workers have the same batch and values, so all find the same. A loss is not checked if it cannot be computed in
    evaluation mode, or has other values each time.
    """
    shares = [share(batch, worker, workers) for worker in range(workers)]
    found: list[tuple[float, float, float]] = []
    with without_trace(model) as watch, contextlib.suppress(Exception):
        found.append(_values(model, loss, weight, batch, shares))
        if not _close(*found[0], watch.rounding):
            found.append(_values(model, loss, weight, batch, shares))
    if len(found) < 2 or not watch.repeats or not math.isfinite(found[0][0]):
        return
    (of_all, mean, size), again = found
    if _close(of_all, again[0], size, watch.rounding) and _close(mean, again[1], size, watch.rounding):
        raise BatchError(
            f"the loss of the batch is {of_all:.6g}, and the mean of the losses of the workers' shares {mean:.6g}",
            why="the loss is not a mean over the rows of a batch, so the mean of the workers' gradients is not its "
            "gradient",
            hint=HINT,
        )


def _values(
    model: torch.nn.Module, loss: Loss, weight: Weight, batch: Any, shares: Sequence[Any]
) -> tuple[float, float, float]:
    """The loss of a batch, the mean of those of its shares, and that of their absolute values."""
    of_all = _value(loss(model, batch))
    counts = [weight_of(weight, share) for share in shares]
    losses = [
        (count / sum(counts), _value(loss(model, share)))
        for count, share in zip(counts, shares, strict=True)
        if count
    ]
    return of_all, sum(part * x for part, x in losses), sum(part * abs(x) for part, x in losses)


def _value(given: Any) -> float:
    return float(scalar(given[0] if isinstance(given, tuple) and len(given) == 2 else given))


def _close(one: float, other: float, size: float, rounding: float) -> bool:
    """Whether two values are the same but for rounding. NaN equals itself: of labels that are all ignored."""
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return abs(one - other) <= rounding * (SMALL + max(abs(one), size if math.isfinite(size) else 0.0))


__all__ = ["check_mean"]
