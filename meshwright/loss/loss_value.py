"""The loss of a step: the function that computes it, and what the step returns, a value whose backward has run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from meshwright.errors import CaptureError, RunError

Loss = Callable[[Any, Any], torch.Tensor]
EXAMPLE = "loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])"
GIVE_LOSS = f"{EXAMPLE}, or what yours is; for the command line: return model, batch, loss"


def default_loss(model: Any, batch: Any) -> torch.Tensor:
    """``model(**batch).loss`` for a mapping (as Hugging Face models return it), else ``model(batch)``."""
    if isinstance(batch, Mapping):
        result = model(**batch)
        return result.loss if hasattr(result, "loss") else result
    if not isinstance(batch, tuple | list):
        return model(batch)
    try:
        return model(batch)
    except (AttributeError, TypeError) as error:  # it takes parts of the batch
        raise CaptureError(
            "the model does not take the batch as it is",
            why=f"no loss was given, so model(batch) was called with a {type(batch).__name__}: {error!s:.200}",
            hint=GIVE_LOSS,
        ) from error


def scalar(value: Any) -> torch.Tensor:
    """A user's loss as a scalar. Raises CaptureError for what is none."""
    if isinstance(value, torch.Tensor) and not value.dim() and value.is_floating_point():
        return value
    from meshwright.capture.trace import scalar_of

    return scalar_of(value)


def trainable(value: Any, loss: Loss) -> torch.Tensor:
    """What `loss` has returned as a scalar with a gradient. Raises CaptureError for what is none."""
    try:
        found = scalar(value)
    except CaptureError as error:
        if loss is not default_loss:
            raise error.at(_where(loss)) from None
        raise CaptureError(
            "the output of the model is no loss",
            why=f"loss= was not given, so what the model returns for a batch is taken, or its .loss: {error.why}",
            hint=EXAMPLE,
        ) from None
    if not found.requires_grad:
        raise CaptureError(
            "the loss has no gradient",
            why="it depends on no trained parameter, or was detached from them by detach(), item() or no_grad()",
            where=_where(loss),
            hint="return the loss as torch computed it, of parameters with requires_grad",
        )
    return found


def _where(loss: Loss) -> str:
    """The file and line of a loss function, if it is written in Python."""
    code = getattr(inspect.unwrap(loss), "__code__", None)
    return "" if code is None or loss is default_loss else f"{code.co_filename}:{code.co_firstlineno}"


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

__all__ = ["AFTER_BACKWARD", "GIVE_LOSS", "Loss", "default_loss", "scalar", "trainable"]
