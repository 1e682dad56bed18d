"""Layouts: how a tensor is distributed over the ranks of a mesh.

On each axis of the mesh a tensor is *sharded* (the axis splits one of its dims), *partial* (each rank holds one term of
a sum) or *replicated*; its gradient is partial on axes of its own.

A *dim* is a product of items, major first. An item is a `SubDim` (a size and the axes that split it, major first) or a
`Cat` (a concatenation of dims). So GPT-2's fused qkv is ``(3 32/tp)``, flattened tokens are ``(4/dp 16)``, and a
grouped-query qkv is ``{32/tp | 8/tp | 8/tp}``. A sub-dim of n elements split over axes a, b is split by a into blocks
of ``ceil(n / size(a))`` (the last one shorter), and each block by b in the same way. So leaving out the minor axis
always gives the layout on the remaining ones (`docs/explanation/decisions/0002-nested-blocks.md`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from meshwright.core.hashed import hashed_once
from meshwright.core.mesh import Mesh
from meshwright.errors import LayoutError

Coordinate = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SubDim:
    """`size` elements, split over `axes` (major first); unsharded without axes.

    `groups` divides the elements into groups of these sizes. Blocks end only between groups, so they may be uneven.
    """

    size: int
    axes: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()

    def __str__(self) -> str:
        groups = f":{'+'.join(map(str, self.groups))}" if self.groups else ""
        return f"{self.size}{groups}/{'.'.join(self.axes)}" if self.axes else f"{self.size}{groups}"

    @property
    def pieces(self) -> int:
        """The largest possible number of blocks."""
        return len(self.groups) or self.size

    def on(self, axes: Iterable[str]) -> SubDim:
        """Return the same elements split over other axes."""
        return SubDim(self.size, tuple(axes), self.groups)

    def block(self, mesh: Mesh, at: Coordinate) -> tuple[int, int]:
        """Return start and length of the block at a coordinate."""
        start, length = block(self.pieces, self.axes, mesh, at)
        if not self.groups:
            return start, length
        return sum(self.groups[:start]), sum(self.groups[start : start + length])


@dataclass(frozen=True, slots=True)
class Cat:
    """A concatenation of dims."""

    parts: tuple[Dim, ...]

    def __str__(self) -> str:
        return "{" + " | ".join(" ".join(map(str, p)) or "1" for p in self.parts) + "}"


Item = SubDim | Cat
Dim = tuple[Item, ...]  # the product of its items; () is a dim of size 1


@hashed_once
@dataclass(frozen=True)
class TensorLayout:
    """The layout of one value and its gradient.

    `partial` has the axes on which the value is partial: each rank holds one term of a sum (as in DTensor's `Partial`).
    `grad` has the axes on which its gradient is partial. The value is replicated on every axis that is neither in
    `dims` nor in `partial`. Partial axes are sorted, so equal layouts compare equal.
    """

    dims: tuple[Dim, ...]
    partial: tuple[str, ...] = ()
    grad: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "partial", tuple(sorted(set(self.partial))))
        object.__setattr__(self, "grad", tuple(sorted(set(self.grad))))

    @staticmethod
    def replicated(shape: Iterable[int]) -> TensorLayout:
        """Return the replicated layout of a shape."""
        return TensorLayout(tuple((SubDim(n),) for n in shape))

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(dim_size(d) for d in self.dims)

    @functools.cached_property
    def split_axes(self) -> tuple[str, ...]:
        """The axes that split some dim, in order of first use."""
        return tuple(dict.fromkeys(a for d in self.dims for a in dim_axes(d)))

    @property
    def forward(self) -> TensorLayout:
        """The layout without its gradient."""
        return self._forward if self.grad else self

    @functools.cached_property
    def _forward(self) -> TensorLayout:
        return replace(self, grad=())

    @property
    def backward(self) -> TensorLayout:
        """The layout of the gradient, as that of a value."""
        return TensorLayout(self.dims, self.grad)

    def local_shape(self, mesh: Mesh, at: Coordinate) -> tuple[int, ...]:
        """Return the shape of the shard at a coordinate."""
        return _local_shape(self, mesh, tuple([at[axis] for axis in self.split_axes]))

    def indices(self, mesh: Mesh, at: Coordinate) -> tuple[np.ndarray, ...]:
        """Return, per dim, the global indices of the shard at a coordinate, in its order."""
        return tuple(local_indices(d, mesh, at) for d in self.dims)

    def __str__(self) -> str:
        text = "[" + ", ".join(show_dim(d) for d in self.dims) + "]"
        text += f" partial {'.'.join(self.partial)}" if self.partial else ""
        return text + (f" grad {'.'.join(self.grad)}" if self.grad else "")


@functools.lru_cache(maxsize=1 << 14)
def _local_shape(layout: TensorLayout, mesh: Mesh, place: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a shard, by its place on the axes that split the layout: layers share these."""
    at = dict(zip(layout.split_axes, place, strict=True))
    return tuple(local_size(d, mesh, at) for d in layout.dims)


# ---------------------------------------------------------------- dims


def show_dim(dim: Dim) -> str:
    """Return the text of a dim: ``32/tp``, ``(3 32/tp)``, ``{32/tp | 8/tp}``."""
    inner = " ".join(map(str, dim)) or "1"
    return f"({inner})" if len(dim) > 1 else inner


def dim_size(dim: Dim) -> int:
    """Return the global number of elements along a dim."""
    return math.prod(i.size if isinstance(i, SubDim) else sum(dim_size(p) for p in i.parts) for i in dim)


def dim_axes(dim: Dim) -> tuple[str, ...]:
    """Return the axes that split a dim, each once, in order of first use."""
    return tuple(dict.fromkeys(a for leaf in leaves(dim) for a in leaf.axes))


def leaves(dim: Dim) -> Iterator[SubDim]:
    """Yield the sub-dims of a dim, left to right."""
    for item in dim:
        if isinstance(item, SubDim):
            yield item
        else:
            for part in item.parts:
                yield from leaves(part)


def map_leaves(dim: Dim, change: Callable[[SubDim], SubDim]) -> Dim:
    """Return a dim with each sub-dim replaced."""
    return tuple(
        change(i) if isinstance(i, SubDim) else Cat(tuple(map_leaves(p, change) for p in i.parts))
        for i in dim
    )


def without_axes(dim: Dim, axes: Iterable[str]) -> Dim:
    """Return a dim without the given axes."""
    gone = set(axes)
    return map_leaves(dim, lambda s: s.on(a for a in s.axes if a not in gone))


def axes_onto(tree: Dim, dim: Dim) -> Dim | None:
    """Return `tree` sharded over the axes of `dim`; None unless both have the same structure of sub-dims."""
    if len(tree) != len(dim):
        return None
    found: list[Item] = []
    for item, like in zip(tree, dim, strict=True):
        if isinstance(item, SubDim) and isinstance(like, SubDim):
            if bool(item.groups) != bool(like.groups):
                return None
            found.append(item.on(like.axes))
            continue
        if not (isinstance(item, Cat) and isinstance(like, Cat)) or len(item.parts) != len(like.parts):
            return None
        parts = [axes_onto(one, other) for one, other in zip(item.parts, like.parts, strict=True)]
        if None in parts:
            return None
        found.append(Cat(tuple(part for part in parts if part is not None)))
    return tuple(found)


def only_axes(layout: TensorLayout, axes: Iterable[str]) -> TensorLayout:
    """Return the layout restricted to some axes; it is replicated on the others."""
    kept = set(axes)
    dims = tuple(map_leaves(d, lambda s: s.on(a for a in s.axes if a in kept)) for d in layout.dims)
    return TensorLayout(
        dims, tuple(a for a in layout.partial if a in kept), tuple(a for a in layout.grad if a in kept)
    )


def block(size: int, axes: Iterable[str], mesh: Mesh, at: Coordinate) -> tuple[int, int]:
    """Return start and length of the block of a sub-dim at a coordinate."""
    start, length = 0, size
    for axis in axes:
        step = -(-length // mesh.sizes[axis])
        offset = min(step * at[axis], length)
        start, length = start + offset, min(step, length - offset)
    return start, length


def local_size(dim: Dim, mesh: Mesh, at: Coordinate) -> int:
    """Return the number of elements along a dim in the shard at a coordinate."""
    return math.prod(
        i.block(mesh, at)[1] if isinstance(i, SubDim) else sum(local_size(p, mesh, at) for p in i.parts)
        for i in dim
    )


def local_indices(dim: Dim, mesh: Mesh, at: Coordinate) -> np.ndarray:
    """Return the global indices along a dim in the shard at a coordinate, in its order."""
    result = np.zeros(1, dtype=np.int64)
    for item in dim:
        if isinstance(item, SubDim):
            start, length = item.block(mesh, at)
            inner, size = np.arange(start, start + length), item.size
        else:
            starts = np.cumsum([0] + [dim_size(p) for p in item.parts])
            inner = np.concatenate(
                [s + local_indices(p, mesh, at) for s, p in zip(starts, item.parts, strict=False)]
            )
            size = int(starts[-1])
        result = (result[:, None] * size + inner[None, :]).reshape(-1)
    return result


def normalize_dim(dim: Dim, mesh: Mesh) -> Dim:
    """Return the shortest way to write the same blocks: drop sub-dims of size 1, join those split as one.

    ``(4/tp 8)`` becomes ``32/tp`` where tp divides 4, ``(2/a 8/b)`` becomes ``16/a.b`` where a is 2;
    ``{8 | 8}`` becomes ``16``; ``{8/tp | 8/tp}`` becomes ``(2 8/tp)``.
    """
    items: list[Item] = []
    for item in dim:
        for piece in (item,) if isinstance(item, SubDim) else _normalize_cat(item, mesh):
            if isinstance(piece, SubDim) and piece.size == 1:
                continue
            last = items[-1] if items else None
            if isinstance(piece, SubDim) and isinstance(last, SubDim) and _joins(last, piece, mesh):
                items[-1] = SubDim(last.size * piece.size, last.axes + piece.axes)
            else:
                items.append(piece)
    return tuple(items)


def _joins(major: SubDim, minor: SubDim, mesh: Mesh) -> bool:
    """Return whether two sub-dims are one: evenly split and then unsharded, or split to the last element."""
    blocks = mesh.count(major.axes)
    if major.groups or minor.groups:
        return False
    return major.size == blocks or (not minor.axes and major.size % blocks == 0)


def _normalize_cat(cat: Cat, mesh: Mesh) -> Dim:
    parts: list[Dim] = []
    for part in (normalize_dim(p, mesh) for p in cat.parts):
        nested = part[0].parts if len(part) == 1 and isinstance(part[0], Cat) else (part,)
        for piece in nested:
            if parts and not dim_axes(piece) and not dim_axes(parts[-1]):
                parts[-1] = (SubDim(dim_size(parts[-1]) + dim_size(piece)),)
            elif dim_size(piece):
                parts.append(piece)
    if len(parts) == 1:
        return parts[0]
    if parts and all(p == parts[0] for p in parts):
        return (SubDim(len(parts)), *parts[0])
    return (Cat(tuple(parts)),)


@functools.lru_cache(maxsize=1 << 14)
def normalize(layout: TensorLayout, mesh: Mesh) -> TensorLayout:
    """Return a shorter way to write a layout. Layouts with equal normal forms put the same elements on each rank.

    The converse holds for products of evenly split sub-dims on meshes without axes of size 1.
    """
    return TensorLayout(tuple(normalize_dim(d, mesh) for d in layout.dims), layout.partial, layout.grad)


def verify(layout: TensorLayout, mesh: Mesh, what: str = "the layout") -> TensorLayout:
    """Check the laws and return the layout. Raises LayoutError naming the axis and the numbers.

    Laws: axes of the mesh; no axis twice in a value (along any path through concatenations); not both split and partial
    on an axis; no more blocks than elements.
    """
    seen: dict[str, int] = {}
    for number, dim in enumerate(layout.dims):
        for path in _paths(dim):
            used = [a for s in path for a in s.axes]
            if len(used) != len(set(used)):
                raise LayoutError(f"{what} uses an axis twice in dim {number}", why=f"{show_dim(dim)}")
        for axis in dim_axes(dim):
            if axis not in mesh.sizes:
                raise LayoutError(
                    f"{what} names the axis {axis!r}, which the mesh does not have", why=f"mesh: {mesh}"
                )
            if axis in seen:
                raise LayoutError(
                    f"{what} uses axis {axis!r} twice, in dims {seen[axis]} and {number}",
                    why=f"{layout}",
                    hint="an axis can split one dim of a tensor; use another axis for one of them",
                )
            seen[axis] = number
        for sub in leaves(dim):
            if sub.groups and (sum(sub.groups) != sub.size or min(sub.groups) < 0):
                raise LayoutError(
                    f"{what} groups {sub.size} elements of dim {number} wrongly",
                    why=f"{' + '.join(map(str, sub.groups))} is {sum(sub.groups)}",
                )
            kind = "groups" if sub.groups else "elements"
            if sub.axes and sub.pieces < mesh.count(sub.axes):
                raise LayoutError(
                    f"{what} splits {sub.pieces} {kind} of dim {number} into {mesh.count(sub.axes)} blocks",
                    why=f"{show_dim(dim)} over {mesh.show(sub.axes)}",
                    hint=f"at most {sub.pieces} blocks, or leave it unsharded",
                )
    for axis in (*layout.partial, *layout.grad):
        if axis not in mesh.sizes:
            raise LayoutError(
                f"{what} is partial on {axis!r}, which the mesh does not have", why=f"mesh: {mesh}"
            )
        if axis in seen:
            raise LayoutError(f"{what} is both split and partial on axis {axis!r}", why=f"{layout}")
    if both := set(layout.partial) & set(layout.grad):
        raise LayoutError(
            f"{what} is partial on {sorted(both)} forward and backward",
            why="a partial value has a replicated gradient",
        )
    return layout


def _paths(dim: Dim) -> Iterator[tuple[SubDim, ...]]:
    """Yield every path through the concatenations of a dim, as its sub-dims."""
    if not dim:
        yield ()
        return
    head, *rest = dim
    options = [(head,)] if isinstance(head, SubDim) else [p for part in head.parts for p in _paths(part)]
    for option in options:
        for tail in _paths(tuple(rest)):
            yield (*option, *tail)


# ---------------------------------------------------------------- parse
