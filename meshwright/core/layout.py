"""What a rank holds of a tensor: its dims, where it is pending, and where its gradient is pending.

A *dim* is a product of items, major first. An item is a `SubDim` (a size and the axes that split it, major first) or a
`Cat` (a concatenation of dims). So GPT-2's fused qkv is ``(3 32/tp)``, flattened tokens are ``(4/dp 16)``, and a
grouped-query qkv is ``{32/tp | 8/tp | 8/tp}``. A sub-dim of n elements cut over axes a, b is cut by a into blocks of
``ceil(n / size(a))`` (the last one shorter), and each block by b in the same way; so leaving out the minor axis always
gives the layout on the remaining ones (`docs/explanation/decisions/0002-nested-blocks.md`).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from meshwright.core.hashed import hashed_once
from meshwright.core.mesh import Mesh
from meshwright.errors import LayoutError

Coordinate = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SubDim:
    """`size` elements, split over `axes` (major first); whole when there are none. `groups`: the elements go in groups
    of these sizes, and are only cut between them; so blocks may be as uneven as they are."""

    size: int
    axes: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()

    def __str__(self) -> str:
        groups = f":{'+'.join(map(str, self.groups))}" if self.groups else ""
        return f"{self.size}{groups}/{'.'.join(self.axes)}" if self.axes else f"{self.size}{groups}"

    @property
    def pieces(self) -> int:
        """How many blocks there may be at most."""
        return len(self.groups) or self.size

    def on(self, axes: Iterable[str]) -> SubDim:
        """The same elements over other axes."""
        return SubDim(self.size, tuple(axes), self.groups)

    def block(self, mesh: Mesh, at: Coordinate) -> tuple[int, int]:
        """Start and length of what the rank at a coordinate holds."""
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
    """The layout of one value. `pending`: axes on which each rank holds one term of a sum. `grad`: so for its gradient.

    The value is whole (equal on all ranks) on every axis that is neither in `dims` nor in `pending`. Pending axes are
    kept sorted, so equal layouts compare equal.
    """

    dims: tuple[Dim, ...]
    pending: tuple[str, ...] = ()
    grad: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "pending", tuple(sorted(set(self.pending))))
        object.__setattr__(self, "grad", tuple(sorted(set(self.grad))))

    @staticmethod
    def whole(shape: Iterable[int]) -> TensorLayout:
        """Equal on all ranks."""
        return TensorLayout(tuple((SubDim(n),) for n in shape))

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(dim_size(d) for d in self.dims)

    @functools.cached_property
    def split_axes(self) -> tuple[str, ...]:
        """Axes that split some dim, in order of first use."""
        return tuple(dict.fromkeys(a for d in self.dims for a in dim_axes(d)))

    @property
    def forward(self) -> TensorLayout:
        """Without the gradient half."""
        return replace(self, grad=())

    @property
    def backward(self) -> TensorLayout:
        """The layout of the gradient, as a value of its own."""
        return TensorLayout(self.dims, self.grad)

    def local_shape(self, mesh: Mesh, at: Coordinate) -> tuple[int, ...]:
        """The shape that the rank at a coordinate holds."""
        return tuple(local_size(d, mesh, at) for d in self.dims)

    def indices(self, mesh: Mesh, at: Coordinate) -> tuple[np.ndarray, ...]:
        """Per dim, the global indices that the rank at a coordinate holds, in the order it holds them."""
        return tuple(local_indices(d, mesh, at) for d in self.dims)

    def __str__(self) -> str:
        text = "[" + ", ".join(show_dim(d) for d in self.dims) + "]"
        text += f" pending {'.'.join(self.pending)}" if self.pending else ""
        return text + (f" grad {'.'.join(self.grad)}" if self.grad else "")


# ---------------------------------------------------------------- dims


def show_dim(dim: Dim) -> str:
    """``32/tp``, ``(3 32/tp)``, ``{32/tp | 8/tp}``."""
    inner = " ".join(map(str, dim)) or "1"
    return f"({inner})" if len(dim) > 1 else inner


def dim_size(dim: Dim) -> int:
    """Global number of elements along a dim."""
    return math.prod(i.size if isinstance(i, SubDim) else sum(dim_size(p) for p in i.parts) for i in dim)


def dim_axes(dim: Dim) -> tuple[str, ...]:
    """Axes that split a dim, each once, in order of first use."""
    return tuple(dict.fromkeys(a for leaf in leaves(dim) for a in leaf.axes))


def leaves(dim: Dim) -> Iterator[SubDim]:
    """The sub-dims of a dim, left to right."""
    for item in dim:
        if isinstance(item, SubDim):
            yield item
        else:
            for part in item.parts:
                yield from leaves(part)


def map_leaves(dim: Dim, change: Callable[[SubDim], SubDim]) -> Dim:
    """A dim with each sub-dim replaced."""
    return tuple(
        change(i) if isinstance(i, SubDim) else Cat(tuple(map_leaves(p, change) for p in i.parts))
        for i in dim
    )


def without_axes(dim: Dim, axes: Iterable[str]) -> Dim:
    """A dim whole on the given axes."""
    gone = set(axes)
    return map_leaves(dim, lambda s: s.on(a for a in s.axes if a not in gone))


def axes_onto(tree: Dim, dim: Dim) -> Dim | None:
    """A dim of other sizes, sharded over the axes of `dim`; None where it is not made of as many sub-dims."""
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
    """The layout seen on some axes alone, whole on the others."""
    kept = set(axes)
    dims = tuple(map_leaves(d, lambda s: s.on(a for a in s.axes if a in kept)) for d in layout.dims)
    return TensorLayout(
        dims, tuple(a for a in layout.pending if a in kept), tuple(a for a in layout.grad if a in kept)
    )


def block(size: int, axes: Iterable[str], mesh: Mesh, at: Coordinate) -> tuple[int, int]:
    """Start and length of the block of a sub-dim held at a coordinate."""
    start, length = 0, size
    for axis in axes:
        step = -(-length // mesh.sizes[axis])
        offset = min(step * at[axis], length)
        start, length = start + offset, min(step, length - offset)
    return start, length


def local_size(dim: Dim, mesh: Mesh, at: Coordinate) -> int:
    """The number of elements along a dim that the rank at a coordinate holds."""
    return math.prod(
        i.block(mesh, at)[1] if isinstance(i, SubDim) else sum(local_size(p, mesh, at) for p in i.parts)
        for i in dim
    )


def local_indices(dim: Dim, mesh: Mesh, at: Coordinate) -> np.ndarray:
    """Global indices along a dim that the rank at a coordinate holds, in the order it holds them."""
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
    """The shortest way to write the same blocks: drops sub-dims of size 1, joins what is cut as one.

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
    """The two are one sub-dim: evenly cut and then whole, or cut to single elements and then cut further."""
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


def normalize(layout: TensorLayout, mesh: Mesh) -> TensorLayout:
    """A shorter way to write a layout. Layouts with equal normal forms put the same elements on each rank.

    The converse holds for products of evenly cut sub-dims on meshes without axes of size 1.
    """
    return TensorLayout(tuple(normalize_dim(d, mesh) for d in layout.dims), layout.pending, layout.grad)


def verify(layout: TensorLayout, mesh: Mesh, what: str = "the layout") -> TensorLayout:
    """Check the laws and return the layout. Raises LayoutError naming the axis and the numbers.

    Laws: known axes; no axis twice in a value (along any path through concatenations); split and pending are exclusive;
    no more blocks than elements.
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
                    f"{what} cuts {sub.pieces} {kind} of dim {number} into {mesh.count(sub.axes)} blocks",
                    why=f"{show_dim(dim)} over {mesh.show(sub.axes)}",
                    hint=f"at most {sub.pieces} blocks, or keep it whole",
                )
    for axis in (*layout.pending, *layout.grad):
        if axis not in mesh.sizes:
            raise LayoutError(
                f"{what} is pending on {axis!r}, which the mesh does not have", why=f"mesh: {mesh}"
            )
        if axis in seen:
            raise LayoutError(f"{what} is both split and pending on axis {axis!r}", why=f"{layout}")
    if both := set(layout.pending) & set(layout.grad):
        raise LayoutError(
            f"{what} is pending on {sorted(both)} forward and backward",
            why="a pending value has a whole gradient",
        )
    return layout


def _paths(dim: Dim) -> Iterator[tuple[SubDim, ...]]:
    """Every way through the concatenations of a dim, as the sub-dims met."""
    if not dim:
        yield ()
        return
    head, *rest = dim
    options = [(head,)] if isinstance(head, SubDim) else [p for part in head.parts for p in _paths(part)]
    for option in options:
        for tail in _paths(tuple(rest)):
            yield (*option, *tail)


# ---------------------------------------------------------------- parse

_TOKEN = re.compile(r"\s*(?:(\d+(?::[\d+]+)?(?:/[\w.]+)?)|([\[\](){}|,])|(pending|grad)\s+([\w.]+))")


def parse_layout(text: str) -> TensorLayout:
    """``[(4/dp 16), {32/tp | 8/tp}] pending cp grad tp`` → TensorLayout. Raises LayoutError."""
    tokens, place = [], 0
    text = text.strip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise LayoutError(f"{text!r} is not a layout", why=f"unexpected {text[place:][:20]!r}")
        tokens.append(match.groups())
        place = match.end()
    halves = {kind: tuple(axes.split(".")) for _, _, kind, axes in tokens if kind}
    flat = [a or b for a, b, kind, _ in tokens if not kind]
    try:
        dims, rest = _parse_dims(flat)
    except (IndexError, RecursionError, ValueError):
        raise LayoutError(
            f"{text!r:.80} is not a layout", hint="write it like [(4/dp 16), 32/tp] pending cp"
        ) from None
    if rest:
        raise LayoutError(f"{text!r} is not a layout", why=f"unexpected {rest[0]!r}")
    return TensorLayout(dims, halves.get("pending", ()), halves.get("grad", ()))


def _parse_dims(tokens: list[str]) -> tuple[tuple[Dim, ...], list[str]]:
    if tokens[0] != "[":
        raise ValueError
    dims, tokens = [], tokens[1:]
    while tokens[0] != "]":
        dim, tokens = _parse_dim(tokens)
        dims.append(dim)
        if tokens[0] == ",":
            tokens = tokens[1:]
    return tuple(dims), tokens[1:]


def _parse_dim(tokens: list[str]) -> tuple[Dim, list[str]]:
    if tokens[0] == "(":
        dim, tokens = _parse_items(tokens[1:])
        if tokens[0] != ")":
            raise ValueError
        return dim, tokens[1:]
    item, tokens = _parse_item(tokens)
    return (() if item == SubDim(1) else (item,)), tokens


def _parse_items(tokens: list[str]) -> tuple[Dim, list[str]]:
    items = []
    while tokens[0] not in (")", "|", "}"):
        item, tokens = _parse_item(tokens)
        items.append(item)
    return tuple(items), tokens


def _parse_item(tokens: list[str]) -> tuple[Item, list[str]]:
    head, tokens = tokens[0], tokens[1:]
    if head == "{":
        parts = []
        while True:
            part, tokens = _parse_items(tokens)
            parts.append(() if part == (SubDim(1),) else part)
            head, tokens = tokens[0], tokens[1:]
            if head == "}":
                return Cat(tuple(parts)), tokens
    count, _, axes = head.partition("/")
    size, _, groups = count.partition(":")
    split = tuple(axes.split(".")) if axes else ()
    return SubDim(int(size), split, tuple(map(int, groups.split("+"))) if groups else ()), tokens
