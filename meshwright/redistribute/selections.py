"""Rectangles of positions in a tensor: what one rank takes of it, or where it puts something."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

Runs = tuple[tuple[int, int], ...]  # (start, length), ascending, apart


@dataclass(frozen=True)
class Selection:
    """A rectangle of positions in a tensor of shape `of`: per dim the runs that are selected."""

    runs: tuple[Runs, ...]
    of: tuple[int, ...]

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is selected."""
        return tuple(sum(n for _, n in runs) for runs in self.runs)

    @functools.cached_property
    def numel(self) -> int:
        """The number of elements selected."""
        return math.prod(self.shape)

    @functools.cached_property
    def cut_dims(self) -> tuple[int, ...]:
        """The dims along which less than everything is selected; a runtime need not touch the others."""
        return tuple(d for d, (n, size) in enumerate(zip(self.shape, self.of, strict=True)) if n != size)

    @property
    def everything(self) -> bool:
        """The selection is the tensor itself."""
        return not self.cut_dims

    def index(self, dim: int) -> np.ndarray:
        """The positions along a dim, ascending."""
        return np.concatenate(
            [np.arange(s, s + n) for s, n in self.runs[dim]] or [np.zeros(0, dtype=np.int64)]
        )


def everything(shape: tuple[int, ...]) -> Selection:
    """The selection of a whole tensor."""
    return Selection(tuple(((0, n),) if n else () for n in shape), shape)


__all__ = ["Runs", "Selection", "everything"]
