"""Equal parts of a tensor, one for each member of a group, as one strided view of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.redistribute.positions import Selection


@dataclass(frozen=True)
class Grid:
    """The equal parts of all members of a group, as one view of the tensor: of thousands of members it takes the time
    of one. A member's number has a digit for each axis of the group, and every digit moves the part by as much.

    `counts` [axes]: how large a digit is; `moves` [axes][dims]: what it moves by; `first` [dims]: where the first
    member's part starts.
    """

    counts: tuple[int, ...]
    moves: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]
    shape: tuple[int, ...]


def grid_of(parts: Sequence[Selection], counts: Sequence[int]) -> Grid | None:
    """The parts of the members of a group as a grid, None where they are none. `counts`: the sizes of its axes, the
    slowest first."""
    shape = parts[0].shape
    if any(part.shape != shape or any(len(runs) != 1 for runs in part.runs) for part in parts):
        return None
    starts = [tuple(runs[0][0] for runs in part.runs) for part in parts]
    first, moves = starts[0], []
    for place in range(len(counts)):
        one = starts[math.prod(counts[place + 1 :])] if counts[place] > 1 else first
        moves.append(tuple(b - a for a, b in zip(first, one, strict=True)))
    for start, digits in zip(starts, itertools.product(*map(range, counts)), strict=True):
        for dim, at in enumerate(start):
            if at != first[dim] + sum(n * move[dim] for n, move in zip(digits, moves, strict=True)):
                return None
    return Grid(tuple(counts), tuple(moves), first, shape)


def fills(grid: Grid, parts: Sequence[Selection]) -> bool:
    """Whether the parts are all of the tensor, each element once."""
    of, shape = parts[0].of, grid.shape
    tiles = all(n and size % n == 0 for n, size in zip(shape, of, strict=True))
    starts = {tuple(runs[0][0] for runs in part.runs) for part in parts}
    return (
        tiles
        and len(starts) == len(parts) == math.prod(of) // math.prod(shape)
        and all(at % n == 0 for start in starts for at, n in zip(start, shape, strict=True))
    )


__all__ = ["Grid", "fills", "grid_of"]
