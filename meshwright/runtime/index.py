"""Taking parts of a tensor, and putting them in their places."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.redistribute.slices import Grid, Selection


class Picker:
    """A selection, as narrows where it has one run and as an index where it has several."""

    def __init__(self, selection: Selection) -> None:
        self.shape = selection.shape
        self.cuts: list[tuple[int, int, int, torch.Tensor | None]] = []
        for dim in selection.cut_dims:
            runs = selection.runs[dim]
            start, length = runs[0] if runs else (0, 0)
            index = torch.from_numpy(selection.index(dim)) if len(runs) > 1 else None
            self.cuts.append((dim, start, length, index))

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Select from a tensor."""
        for dim, start, length, index in self.cuts:
            x = x.narrow(dim, start, length) if index is None else x.index_select(dim, index.to(x.device))
        return x

    def taken_in_place(self, x: torch.Tensor) -> torch.Tensor | None:
        """Select as a contiguous view of the tensor, or return None if there is none."""
        if any(index is not None for *_, index in self.cuts):
            return None
        found = self.take(x)
        return found if found.is_contiguous() else None

    def put(self, y: torch.Tensor, piece: torch.Tensor) -> None:
        """Write a piece to where it is selected."""
        view = y
        spread = [c for c in self.cuts if c[3] is not None]
        for dim, start, length, index in self.cuts:
            if index is None:
                view = view.narrow(dim, start, length)
        if not spread:
            view.copy_(piece)
        elif len(spread) == 1:
            dim, _, _, index = spread[0]
            assert index is not None
            view.index_copy_(dim, index.to(y.device), piece)
        else:
            where: list[torch.Tensor | slice] = [slice(None)] * y.dim()
            for place, (dim, _, _, index) in enumerate(spread):
                assert index is not None
                where[dim] = index.to(y.device).view([-1] + [1] * (len(spread) - place - 1))
            # Index tensors on several dims land in one block only when the dims between them are full
            # slices moved along.
            grid = torch.meshgrid(
                *[
                    i.reshape(-1)
                    if isinstance(i, torch.Tensor)
                    else torch.arange(view.shape[d], device=y.device)
                    for d, i in enumerate(where)
                ],
                indexing="ij",
            )
            view[grid] = piece


def spread(grids: Sequence[Grid], x: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy the parts of all members into their chunks of a buffer: (n,), or (members, n) with a row for each."""
    for grid in grids:
        _in_chunks(grid, buffer).copy_(_in_tensor(grid, x))


def bring(grids: Sequence[Grid], buffer: torch.Tensor, y: torch.Tensor) -> None:
    """Copy the chunks of all members from a buffer to where they belong in a tensor."""
    for grid in grids:
        _in_tensor(grid, y).copy_(_in_chunks(grid, buffer))


def _in_tensor(grid: Grid, x: torch.Tensor) -> torch.Tensor:
    """(*counts, *sizes), in the memory of the tensor."""
    by = x.stride()
    moves = [_dot(move, by) for move in grid.moves]
    steps = [step * by[dim] for step, dim in zip(grid.steps, grid.dims, strict=True)]
    start = x.storage_offset() + _dot(grid.first, by)
    return x.as_strided((*grid.counts, *grid.sizes), (*moves, *steps), start)


def _in_chunks(grid: Grid, buffer: torch.Tensor) -> torch.Tensor:
    """(*counts, *sizes), in the memory of the buffer."""
    apart = buffer.stride(0) if buffer.dim() == 2 else 1
    hops = [apart * hop for hop in grid.hops]
    start = buffer.storage_offset() + apart * grid.chunk + grid.inside
    return buffer.as_strided((*grid.counts, *grid.sizes), (*hops, *grid.strides), start)


def _dot(places: Sequence[int], strides: Sequence[int]) -> int:
    return sum(n * stride for n, stride in zip(places, strides, strict=True))


__all__ = ["Picker", "bring", "spread"]
