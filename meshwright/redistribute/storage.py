"""Storage layouts: how to shard a tensor that ranks hold replicated, so that each stores a part of it (ZeRO)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwright.core.layout import Cat, Dim, Item, SubDim, TensorLayout
from meshwright.core.mesh import Mesh
from meshwright.redistribute.steps import largest_size


@dataclass(frozen=True)
class _Place:
    """Sub-dims that are sharded together: one item of a dim, or the first of every part of a concatenation."""

    dim: int
    item: int
    leaves: tuple[SubDim, ...]


def repeated_axes(layout: TensorLayout, mesh: Mesh) -> tuple[str, ...]:
    """The axes on which every rank holds the same, in mesh order."""
    gone = {*layout.split_axes, *layout.partial}
    return tuple(a.name for a in mesh.axes if a.size > 1 and a.name not in gone)


def runs_of(axes: Sequence[str]) -> list[tuple[str, ...]]:
    """Every run of some axes, those that end with the innermost first, the longest of each first."""
    return [tuple(axes[start:end]) for end in range(len(axes), 0, -1) for start in range(end)]


def run_of(axes: Sequence[str], ranks: int, mesh: Mesh) -> tuple[str, ...]:
    """The innermost run of axes that makes `ranks` parts; where none does, the one that makes most parts below that."""
    sizes = {run: mesh.count(run) for run in runs_of(axes) if mesh.count(run) <= ranks}
    most = max(sizes.values(), default=0)
    return next((run for run, size in sizes.items() if size == most), ())


def stored(use: TensorLayout, axes: Iterable[str], mesh: Mesh) -> TensorLayout:
    """Shard `use` over more axes, as the minor ones of some dims; its gradient stays partial on the rest.

    One dim takes all axes where one divides evenly, else where one has elements enough (the one that leaves the least
    on a rank), else several dims share them. Axes that no dim has elements for are left out.
    """
    # A replicated gradient is sliced first, then scattered over the axes on which it is partial.
    run = sorted(mesh.sort(axes), key=lambda a: a in use.grad)
    found = _cut_once(use, tuple(run), mesh)
    if found is None:
        found = use
        for axis in sorted(run, key=lambda a: mesh.sizes[a], reverse=True):
            found = _cut_once(found, (axis,), mesh) or found
    return TensorLayout(found.dims, (), tuple(a for a in use.grad if a not in found.split_axes))


def _cut_once(layout: TensorLayout, axes: tuple[str, ...], mesh: Mesh) -> TensorLayout | None:
    """Shard one place of a layout over axes; None if no place has enough elements."""
    options: list[tuple[bool, int, int, int, TensorLayout]] = []
    for place in _places(layout):
        blocks = [mesh.count((*leaf.axes, *axes)) for leaf in place.leaves]
        if any(leaf.size < count for leaf, count in zip(place.leaves, blocks, strict=True)):
            continue
        uneven = any(leaf.size % count for leaf, count in zip(place.leaves, blocks, strict=True))
        cut = _with_axes(layout, place, axes)
        options.append((uneven, largest_size(cut, mesh), place.dim, place.item, cut))
    return min(options, key=lambda o: o[:-1])[-1] if options else None


def _places(layout: TensorLayout) -> list[_Place]:
    found: list[_Place] = []
    for number, dim in enumerate(layout.dims):
        for index, item in enumerate(dim):
            if isinstance(item, SubDim) and item.groups:
                continue  # its blocks are as uneven as its groups: shard another dim
            if isinstance(item, SubDim):
                found.append(_Place(number, index, (item,)))
            else:
                heads = [part[0] for part in item.parts if part]
                if heads and all(isinstance(head, SubDim) for head in heads):
                    leaves = tuple(head for head in heads if isinstance(head, SubDim))
                    found.append(_Place(number, index, leaves))
    return found


def _with_axes(layout: TensorLayout, place: _Place, axes: tuple[str, ...]) -> TensorLayout:
    dim = layout.dims[place.dim]
    cut = (*dim[: place.item], _cut_item(dim[place.item], axes), *dim[place.item + 1 :])
    grad = tuple(a for a in layout.grad if a not in axes)
    dims = (*layout.dims[: place.dim], cut, *layout.dims[place.dim + 1 :])
    return TensorLayout(dims, layout.partial, grad)


def _cut_item(item: Item, axes: tuple[str, ...]) -> Item:
    if isinstance(item, SubDim):
        return item.on((*item.axes, *axes))
    parts: list[Dim] = []
    for part in item.parts:
        head = part[0] if part else None
        parts.append((_cut_item(head, axes), *part[1:]) if head is not None else part)
    return Cat(tuple(parts))
