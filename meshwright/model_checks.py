"""Checks of a model and its loss that every step makes. It imports little: a worker that joins a job shall be quick."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.errors import CaptureError, a_type


def check_model(model: Any) -> None:
    """Raise CaptureError for what is no module."""
    if not isinstance(model, torch.nn.Module):
        raise CaptureError(
            f"the model is {a_type(model)}, not a torch.nn.Module",
            why="its parameters and the names of its modules are what a plan speaks of",
            hint="pass the module; what is computed from it goes into loss=lambda model, batch: …",
        )


def check_function(name: str, given: Any, like: str) -> None:
    """Raise CaptureError for a loss, or outputs, that cannot be called."""
    if not callable(given):
        raise CaptureError(
            f"{name}={given!r} is no function",
            why=f"it is {a_type(given)}; what is captured is what {name}(model, batch) computes",
            hint=f"{name}={like}, or leave it out for what the model returns",
        )


__all__ = ["check_function", "check_model"]
