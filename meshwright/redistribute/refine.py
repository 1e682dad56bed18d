"""Brings two layouts of one tensor to common sub-dims: ``(4/a 8)`` and ``32/a`` → ``(4/a 8)`` twice.

If there is no common refinement (``(4/a 6)`` and ``(6/a 4)``, a concatenation sharded in other places) the answer is
None, and the planner moves such a dim in one exchange or gathers it first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from meshwright.core.layout import Cat, Dim, Item, SubDim, dim_axes, dim_size, local_indices, without_axes
from meshwright.core.mesh import Mesh
from meshwright.redistribute.steps import origin


def common_refinement(left: Dim, right: Dim, mesh: Mesh) -> tuple[Dim, Dim] | None:
    """Both dims over the same tree of sub-dims, each holding the same blocks as before; None if there is no such tree.

    Expects normalized dims (`layout.normalize_dim`): then each replicated stretch is one sub-dim, which can be split
    anywhere.
    """
    a, b = list(left), list(right)
    done_a: list[Item] = []
    done_b: list[Item] = []
    while a or b:
        if not a or not b:
            return None
        x, y = a.pop(0), b.pop(0)
        size_x, size_y = dim_size((x,)), dim_size((y,))
        if isinstance(x, SubDim) and size_x > size_y:
            if (cut := _cut(x, size_y, mesh)) is None:
                return None
            x, rest = cut
            a.insert(0, rest)
        elif isinstance(y, SubDim) and size_y > size_x:
            if (cut := _cut(y, size_x, mesh)) is None:
                return None
            y, rest = cut
            b.insert(0, rest)
        elif size_x != size_y:
            return None
        if (pair := _pair(x, y, mesh)) is None:
            return None
        done_a.append(pair[0])
        done_b.append(pair[1])
    return tuple(done_a), tuple(done_b)


def _pair(x: Item, y: Item, mesh: Mesh) -> tuple[Item, Item] | None:
    """Two items of one size over the same tree."""
    if isinstance(x, SubDim) and isinstance(y, SubDim):
        return x, y
    if isinstance(x, Cat) and isinstance(y, Cat):
        if [dim_size(p) for p in x.parts] != [dim_size(p) for p in y.parts]:
            return None
        parts = [common_refinement(p, q, mesh) for p, q in zip(x.parts, y.parts, strict=True)]
        if any(p is None for p in parts):
            return None
        return Cat(tuple(p[0] for p in parts if p)), Cat(tuple(p[1] for p in parts if p))
    if not dim_axes((x,)):
        return without_axes((y,), dim_axes((y,)))[0], y
    if not dim_axes((y,)):
        return x, without_axes((x,), dim_axes((x,)))[0]
    return None


def _cut(sub: SubDim, major: int, mesh: Mesh) -> tuple[SubDim, SubDim] | None:
    """``32/a`` as ``(major …, 32/major …)`` with the same blocks, where that is possible."""
    if sub.size % major or sub.groups:
        return None
    if major % mesh.count(sub.axes) == 0:
        return SubDim(major, sub.axes), SubDim(sub.size // major)
    for n in range(1, len(sub.axes)):
        if mesh.count(sub.axes[:n]) == major:
            return SubDim(major, sub.axes[:n]), SubDim(sub.size // major, sub.axes[n:])
    return None


def same_tree(old: Dim, new: Dim) -> bool:
    """Both dims are products and concatenations of the same sizes, whatever splits them."""
    if len(old) != len(new):
        return False
    return all(map(_same_item, old, new))


def _same_item(a: Item, b: Item) -> bool:
    match a, b:
        case SubDim(), SubDim():
            return a.size == b.size
        case Cat(), Cat():
            sizes = [[dim_size(p) for p in x.parts] for x in (a, b)]
            return sizes[0] == sizes[1] and all(map(same_tree, a.parts, b.parts))
        case _:
            return False


def same_elements(left: Dim, right: Dim, mesh: Mesh) -> bool:
    """Every rank holds the same indices along both, although they have no common refinement."""
    return all(np.array_equal(i, j) for i, j in _on_each_rank(left, right, mesh))


def holds(left: Dim, right: Dim, mesh: Mesh) -> bool:
    """Every rank holds along `left` all that it needs along `right`."""
    return all(np.isin(j, i, assume_unique=True).all() for i, j in _on_each_rank(left, right, mesh))


def _on_each_rank(left: Dim, right: Dim, mesh: Mesh) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    axes = dict.fromkeys((*dim_axes(left), *dim_axes(right)))
    for values in itertools.product(*(range(mesh.sizes[a]) for a in axes)):
        at = origin(mesh) | dict(zip(axes, values, strict=True))
        yield local_indices(left, mesh, at), local_indices(right, mesh, at)
