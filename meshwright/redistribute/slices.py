"""Rectangles of positions in a tensor: what one rank takes of it, or where it puts something.

The parts of a tensor that the members of a group have, as few strided views of it.

Copying the part of each of thousands of members takes an operator each. Most parts differ only in where they lie, by as
much from one member to the next: of those one view of the tensor's memory shows all, and one of a buffer the chunks in
which they are sent. Uneven blocks are a few such views, and so is a part that lies in several runs.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
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
    """Select a full tensor."""
    return Selection(tuple(((0, n),) if n else () for n in shape), shape)


@dataclass(frozen=True)
class Grid:
    """Equal rectangles of a tensor, one per member, and their positions in a buffer of chunks.

    The first one starts at `first` [dims] of the tensor, in the chunk that starts at `chunk`, `inside` elements from
    its beginning. Members are numbered by digits, `counts` [digits]: each moves the rectangle by `moves` [digits][dims]
    and the chunk by `hops` [digits]. Within a rectangle there are `sizes` [n] elements along `dims` [n], `steps` [n]
    apart in that dim and `strides` [n] elements apart in the chunk.
    """

    counts: tuple[int, ...]
    moves: tuple[tuple[int, ...], ...]
    hops: tuple[int, ...]
    first: tuple[int, ...]
    chunk: int
    inside: int
    sizes: tuple[int, ...]
    dims: tuple[int, ...]
    steps: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Runs along a dim: the first starts at `start`, `local` elements into what is selected. `extents`: how many, how
    far apart in the dim, how far apart in what is selected; the slowest first."""

    start: int
    local: int
    extents: tuple[tuple[int, int, int], ...]


_Digits = tuple[tuple[int, tuple[int, ...], int], ...]  # count, move, hop; the slowest first
_Shape = tuple[int, tuple[tuple[int, int, int, int], ...]]  # inside; per extent size, dim, step, stride
_Piece = tuple[_Digits, _Shape, tuple[int, ...], int]  # the last two, first and chunk, differ by member


def grids_of(
    parts: Sequence[Selection], counts: Sequence[int], chunks: Sequence[int], written: bool = False
) -> tuple[Grid, ...]:
    """The parts of the members of a group. `counts`: the sizes of its axes, the slowest first; `chunks` [members]:
    where each one's chunk starts. `written`: parts that overlap are kept apart, so that each view can be written to."""
    leaves = [_pieces(part, at) for part, at in zip(parts, chunks, strict=True)]
    if written and sum(part.numel for part in parts) > math.prod(parts[0].of):
        found = [piece for leaf in leaves for piece in leaf]
    else:
        for count in reversed(counts):
            leaves = [_merged(leaves[n : n + count]) for n in range(0, len(leaves), count)]
        (found,) = leaves
    return tuple(map(_grid, found))


def _grid(piece: _Piece) -> Grid:
    digits, (inside, extents), first, chunk = piece
    counts, moves, hops = zip(*digits, strict=True) if digits else ((), (), ())
    sizes, dims, steps, strides = zip(*extents, strict=True) if extents else ((), (), (), ())
    return Grid(counts, moves, hops, first, chunk, inside, sizes, dims, steps, strides)


def _pieces(part: Selection, chunk: int) -> list[_Piece]:
    """The rectangles that one part is made of."""
    found: list[_Piece] = []
    strides = [math.prod(part.shape[d + 1 :]) for d in range(len(part.of))]
    for stretches in itertools.product(*map(stretches_of, part.runs)):
        inside = sum(s.local * stride for s, stride in zip(stretches, strides, strict=True))
        extents = tuple(
            (size, dim, step, local * strides[dim])
            for dim, s in enumerate(stretches)
            for size, step, local in s.extents
        )
        found.append(((), (inside, extents), tuple([s.start for s in stretches]), chunk))
    return found


def _merged(members: Sequence[list[_Piece]]) -> list[_Piece]:
    """The pieces of members: of those that follow one another and differ only in where they are, one each."""
    found: list[_Piece] = []
    at = 0
    while at < len(members):
        repeated = _Repeated(members[at])
        stop = at + 1
        while stop < len(members) and repeated.takes(members[stop]):
            stop += 1
        found += repeated.together()
        at = stop
    return found


class _Repeated:
    """Pieces of a member, and of those after it while they go on in the same way."""

    def __init__(self, pieces: list[_Piece]) -> None:
        self.pieces, self.last, self.count = pieces, pieces, 1
        self.by: list[tuple[tuple[int, ...], int]] | None = None  # per piece: from one member to the next

    def takes(self, pieces: list[_Piece]) -> bool:
        """Append a member if it continues the pattern of those before; return whether it does."""
        if [p[:2] for p in pieces] != [p[:2] for p in self.last]:
            return False
        by = [
            (tuple([b - a for a, b in zip(one[2], other[2], strict=True)]), other[3] - one[3])
            for one, other in zip(self.last, pieces, strict=True)
        ]
        if self.by is not None and by != self.by:
            return False
        if any(n < 0 for move, _ in by for n in move):  # a view cannot go backwards
            return False
        self.by, self.last, self.count = by, pieces, self.count + 1
        return True

    def together(self) -> Iterator[_Piece]:
        """The pieces of all of them."""
        if self.by is None:
            yield from self.pieces
            return
        for (digits, shape, first, chunk), (move, hop) in zip(self.pieces, self.by, strict=True):
            yield _joined(self.count, move, hop, digits), shape, first, chunk


def _joined(count: int, move: tuple[int, ...], hop: int, digits: _Digits) -> _Digits:
    """A digit before others: one with the next where that goes on as the next does."""
    if digits:
        inner, by, step = digits[0]
        if move == tuple([inner * n for n in by]) and hop == inner * step:
            return ((count * inner, by, step), *digits[1:])
    return ((count, move, hop), *digits)


@functools.lru_cache(maxsize=1 << 14)
def stretches_of(runs: Runs) -> tuple[_Stretch, ...]:
    """Write runs along a dim as few stretches: one if they have equal lengths and distances."""
    if not runs:
        return ()
    lengths = [n for _, n in runs]
    starts = [start for start, _ in runs]
    if len(set(lengths)) == 1 and (nested := _nested(starts)) is not None:
        local, extents = lengths[0], [(lengths[0], 1, 1)]
        for count, step in reversed(nested):
            extents.insert(0, (count, step, local))
            local *= count
        return (_Stretch(starts[0], 0, tuple(e for e in extents if e[0] > 1)),)
    period = _period(starts, lengths)
    times, local = len(runs) // period, sum(lengths[:period])
    found: list[_Stretch] = []
    inside = 0
    for start, length in runs[:period]:
        step = runs[period][0] - runs[0][0] if times > 1 else 0
        every = ((times, step, local), (length, 1, 1))
        found.append(_Stretch(start, inside, tuple(e for e in every if e[0] > 1)))
        inside += length
    return tuple(found)


def _nested(starts: Sequence[int]) -> list[tuple[int, int]] | None:
    """Starts that are at equal distances, in groups at equal distances, and so on: how many and how far, the slowest
    first; None where they are not."""
    if len(starts) == 1:
        return []
    step = starts[1] - starts[0]
    gaps = (n for n in range(1, len(starts)) if starts[n] - starts[n - 1] != step)
    count = next(gaps, len(starts))
    for at in range(0, len(starts), count):
        group = starts[at : at + count]
        if len(group) < count or any(b - a != step for a, b in itertools.pairwise(group)):
            return None
    outer = _nested(starts[::count])
    return None if outer is None else [*outer, (count, step)]


def _period(starts: Sequence[int], lengths: Sequence[int]) -> int:
    """After how many runs they come again, each as far on as the others; all of them where they do not."""
    for period in range(2, len(starts) // 2 + 1):
        if len(starts) % period:
            continue
        by = starts[period] - starts[0]
        if lengths[period:] == lengths[:-period] and all(
            starts[n] - starts[n - period] == by for n in range(period, len(starts))
        ):
            return period
    return len(starts)


__all__ = ["Grid", "Runs", "Selection", "everything", "grids_of", "stretches_of"]
