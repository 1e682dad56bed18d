"""Constants of a model on the meta device, which have no values to make part of a program."""

from __future__ import annotations

import torch

from meshwright.errors import CaptureError


class MetaConstant(CaptureError):
    """A tensor on the meta device that is no parameter or buffer, so that its values are missing from the program.

    `name`: what the model calls the tensor.
    """

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the model reads {name}, a tensor on the meta device",
            why="it is not a parameter or buffer, so its values become part of the program, and it has none",
            hint="register_buffer(…, persistent=False) makes it a buffer of the model",
        )


def check_values(tensor: torch.Tensor, name: str) -> None:
    """Raise MetaConstant if a constant has no values. An empty one has nothing to lack."""
    if tensor.is_meta and tensor.numel():
        raise MetaConstant(name)


__all__ = ["MetaConstant", "check_values"]
