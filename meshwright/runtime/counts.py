"""Sums of counts under way beside the model: started where a count is made, waited for before the first reader.

A count of targets is a fact of the batch, which a program makes first. The loss reads it, so that ranks need not wait
for each other before they have computed the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.runtime.communicator import Work
from meshwright.runtime.rank import Rank
from meshwright.runtime.reshard import say


class CountStart(torch.nn.Module):
    """Starts the sum of a count over a group. It has no gradient."""

    def __init__(self, rank: Rank, axes: Sequence[str], told: str) -> None:
        """`told`: what the record of the rank says of it."""
        super().__init__()
        self.rank, self.axes, self.told = rank, axes, told
        self.work: Work | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's count, in the memory where the sum will be."""
        say(self.told)
        total = x.detach().clone(memory_format=torch.contiguous_format)
        self.work = self.rank.comm.all_reduce_start(total, self.axes)
        return total


class CountWait(torch.nn.Module):
    """Waits for the sum."""

    def __init__(self, start: CountStart) -> None:
        super().__init__()
        self._start = (start,)  # not a submodule: it is the start's own place in the program

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        """The sum."""
        (start,) = self._start
        assert start.work is not None
        total, start.work = start.work.wait(), None
        return total


__all__ = ["CountStart", "CountWait"]
