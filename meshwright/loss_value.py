"""The loss that a step returns: a value, whose backward has run."""

from __future__ import annotations

from typing import Any, NoReturn

from meshwright.errors import RunError


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

__all__ = ["AFTER_BACKWARD"]
