"""Programs through `torch.compile`: chains of plain operators become kernels of their own.

What is more than a plain operator (collectives, our kernels, what is recomputed, offloaded or random) runs between the
compiled pieces as ever. So the order of collectives and the random numbers are those of the program as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

BACKEND = "inductor"


def compiled(module: Callable[..., Any]) -> Callable[..., Any]:
    """Return a program that compiles when it first runs. Errors in it name no line of the model.

    The module is changed: its submodules are marked to run as they are.
    """
    if not isinstance(module, fx.GraphModule):
        return module
    vars(module).pop("forward", None)  # it catches errors, and nothing can be compiled within that
    for child in module.children():
        child.forward = torch.compiler.disable(child.forward)
    return torch.compile(module, backend=BACKEND, dynamic=False)


__all__ = ["compiled"]
