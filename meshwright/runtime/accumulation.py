"""Gradients of weights as they are used, added up over micro-batches before they go where the weights are stored."""

from __future__ import annotations

from collections.abc import Collection

import torch


class Accumulation:
    """The sums of a step, by the name of the reshard that will send each. `last`: whether the micro-batch that runs is
    the last one."""

    def __init__(self, names: Collection[str]) -> None:
        self.names, self.last = frozenset(names), True
        self._sums: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        """Forget the last step."""
        self._sums = {}

    def added(self, name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        """Add a gradient; return the full sum in the last micro-batch, None before that. Never writes to the
        gradient."""
        total = self._sums.pop(name, None)
        if total is not None:
            total.add_(gradient)
        elif self.last:
            return gradient
        else:
            total = gradient.clone(memory_format=torch.contiguous_format)
        if self.last:
            return total
        self._sums[name] = total
        return None


__all__ = ["Accumulation"]
