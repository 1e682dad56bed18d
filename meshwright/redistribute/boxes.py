"""Lists the rectangles of the full tensor that a rank holds; saving and loading work on them.

Most shards are one rectangle. A fused qkv weight ``(3 32/tp)`` is three, a concatenation one for each of its parts.
`{32/tp | 8}` holds a replicated part beside a sharded one, so each box records the axes that determine its position.
Ranks with equal coordinates on these axes hold the very same box, all others none of its elements: blocks do not
overlap."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.core.layout import Cat, Dim, SubDim, TensorLayout, dim_size
from meshwright.core.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of a full tensor: start and length per dim (none for a tensor without dims)."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def meets(self, other: Box) -> Box | None:
        """The rectangle that two have in common; None where they have nothing."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        ends = zip(self.start, self.shape, other.start, other.shape, strict=True)
        shape = tuple(min(a + n, b + m) - s for s, (a, n, b, m) in zip(start, ends, strict=True))
        return Box(start, shape) if all(n > 0 for n in shape) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Where it lies in a tensor that holds an outer box."""
        pairs = zip(self.start, outer.start, self.shape, strict=True)
        return tuple(slice(s - o, s - o + n) for s, o, n in pairs)

    def cut(self, parts: int) -> tuple[Box, ...]:
        """Into so many along the first dim that has as many elements, else the longest. Some may have no element."""
        if parts <= 1 or not self.shape:
            return (self,)
        dim = next((d for d, n in enumerate(self.shape) if n >= parts), self.shape.index(max(self.shape)))
        edges = [self.shape[dim] * n // parts for n in range(parts + 1)]
        return tuple(
            Box(
                (*self.start[:dim], self.start[dim] + a, *self.start[dim + 1 :]),
                (*self.shape[:dim], b - a, *self.shape[dim + 1 :]),
            )
            for a, b in itertools.pairwise(edges)
        )


def full_box(shape: tuple[int, ...]) -> Box:
    """Return the box that covers a full tensor."""
    return Box((0,) * len(shape), shape)


@dataclass(frozen=True, slots=True)
class HeldBox:
    """A box that a rank holds. `here`: its position in the rank's local tensor; `axes`: the axes that determine its
    position in the full tensor."""

    box: Box
    here: Box
    axes: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Run:
    """Elements along a dim that follow one another, there and here."""

    start: int
    length: int
    axes: frozenset[str] = frozenset()


def held_boxes(layout: TensorLayout, mesh: Mesh, rank: int) -> tuple[HeldBox, ...]:
    """List the boxes that a rank holds of a value that is not partial. Empty boxes are left out."""
    at = tuple(sorted((a, n) for a, n in mesh.coordinate(rank).items() if a in layout.split_axes))
    dims = [_runs(dim, mesh, at) for dim in layout.dims]
    found: list[HeldBox] = []
    for runs in itertools.product(*dims):
        shape = tuple(run.length for run, _ in runs)
        axes = frozenset(a for run, _ in runs for a in run.axes)
        box = Box(tuple(run.start for run, _ in runs), shape)
        found.append(HeldBox(box, Box(tuple(here for _, here in runs), shape), axes))
    return tuple(found)


@functools.lru_cache(maxsize=1 << 12)
def _runs(dim: Dim, mesh: Mesh, at: tuple[tuple[str, int], ...]) -> tuple[tuple[_Run, int], ...]:
    """The runs of a dim, each with its place in what the rank holds."""
    found: list[tuple[_Run, int]] = []
    here = 0
    for run in _runs_of(dim, mesh, dict(at)):
        found.append((run, here))
        here += run.length
    return tuple(found)


def _runs_of(dim: Dim, mesh: Mesh, at: Mapping[str, int]) -> list[_Run]:
    if not dim:
        return [_Run(0, 1)]
    inner, size = _runs_of(dim[1:], mesh, at), dim_size(dim[1:])
    full = len(inner) == 1 and inner[0].length == size
    found: list[_Run] = []
    for run in _heads(dim[0], mesh, at):
        if full:
            found.append(_Run(run.start * size, run.length * size, run.axes | inner[0].axes))
            continue
        for index in range(run.start, run.start + run.length):
            found += [_Run(index * size + i.start, i.length, run.axes | i.axes) for i in inner]
    return found


def _heads(item: SubDim | Cat, mesh: Mesh, at: Mapping[str, int]) -> list[_Run]:
    if isinstance(item, SubDim):
        start, length = item.block(mesh, at)
        cut = frozenset(a for a in item.axes if mesh.sizes[a] > 1)
        return [_Run(start, length, cut)] if length else []
    found: list[_Run] = []
    offset = 0
    for part in item.parts:
        found += [_Run(offset + r.start, r.length, r.axes) for r in _runs_of(part, mesh, at)]
        offset += dim_size(part)
    return found


__all__ = ["Box", "HeldBox", "full_box", "held_boxes"]
