"""Redistribution of dims that are split between groups of elements (rows of a table by the columns that read them).

Such blocks have any length, which no schedule covers. A dim that keeps its groups stays in place; one that loses them
is gathered first, and one that gets some is sliced last."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from meshwright.core.layout import Dim, SubDim, TensorLayout, dim_axes, dim_size, leaves, map_leaves
from meshwright.core.mesh import Mesh
from meshwright.redistribute.steps import Step

Between = Callable[[TensorLayout, TensorLayout], tuple[Step, ...]]


def has_groups(layout: TensorLayout) -> bool:
    """True if some dim is split between groups."""
    return any(map(_grouped, layout.dims))


def _grouped(dim: Dim) -> bool:
    return any(leaf.groups for leaf in leaves(dim))


def past_groups(src: TensorLayout, dst: TensorLayout, mesh: Mesh, between: Between) -> tuple[Step, ...]:
    """The steps from `src` to `dst`; `between` finds those of layouts without groups."""
    pairs = list(zip(src.dims, dst.dims, strict=True))
    stays = [one == other and _grouped(one) for one, other in pairs]
    gathered = [_grouped(one) and not stay for (one, _), stay in zip(pairs, stays, strict=True)]
    cut = [_grouped(other) and not stay for (_, other), stay in zip(pairs, stays, strict=True)]
    first, last = _whole(src, gathered), _whole(dst, cut)
    steps: list[Step] = []
    if axes := _axes(src, gathered, mesh):
        steps.append(Step("all_gather", axes, src, first))
    for step in between(_plain(first), _plain(last)):
        before, after = (_as_held(layout, src, stays) for layout in (step.before, step.after))
        steps.append(replace(step, before=before, after=after))
    if axes := _axes(dst, cut, mesh):
        steps.append(Step("slice", axes, last, dst))
    return tuple(steps)


def _whole(layout: TensorLayout, which: Iterable[bool]) -> TensorLayout:
    dims = ((SubDim(dim_size(d)),) if w else d for d, w in zip(layout.dims, which, strict=True))
    return replace(layout, dims=tuple(dims))


def _axes(layout: TensorLayout, which: Iterable[bool], mesh: Mesh) -> tuple[str, ...]:
    found = {a for d, w in zip(layout.dims, which, strict=True) if w for a in dim_axes(d)}
    return mesh.sort(a for a in found if mesh.sizes[a] > 1)


def _plain(layout: TensorLayout) -> TensorLayout:
    """Drop the groups of a layout: dims that stay in place may then count as any split over their axes."""
    return replace(layout, dims=tuple(map_leaves(d, lambda s: SubDim(s.size, s.axes)) for d in layout.dims))


def _as_held(layout: TensorLayout, src: TensorLayout, stays: Iterable[bool]) -> TensorLayout:
    dims: list[Dim] = []
    for dim, held, stay in zip(layout.dims, src.dims, stays, strict=True):
        assert not stay or dim_axes(dim) == dim_axes(held), "a dim that keeps its groups was moved"
        dims.append(held if stay else dim)
    return replace(layout, dims=tuple(dims))
