"""The loss of a step: the function that computes it, and what the step returns, a value whose backward has run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from meshwright.errors import RunError

Loss = Callable[[Any, Any], torch.Tensor]


def default_loss(model: Any, batch: Any) -> torch.Tensor:
    """``model(**batch).loss`` for a mapping (as Hugging Face models return it), else ``model(batch)``."""
    if isinstance(batch, Mapping):
        result = model(**batch)
        return result.loss if hasattr(result, "loss") else result
    return model(batch)


def _backward(*_: Any, **__: Any) -> NoReturn:
    """Raise RunError when ``step(batch).backward()`` is called."""
    raise RunError(
        "backward() of a loss that a step returned",
        why="step(batch) has run forward, backward and the update; the loss is a value without a graph",
        hint="leave out loss.backward() and optimizer.step(); to add up gradients without an update: "
        "step(batch, update=False)",
    )


# Attributes of the tensor itself. They are no part of its state: what is written to a file is a plain tensor.
AFTER_BACKWARD = {"backward": _backward, "__getstate__": dict}

__all__ = ["AFTER_BACKWARD", "Loss", "default_loss"]
