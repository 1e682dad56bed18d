"""Taking parts of a tensor, and putting them in their places."""

from __future__ import annotations

import torch

from meshwright.redistribute.grids import Grid
from meshwright.redistribute.positions import Selection


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
        """What is selected of a tensor."""
        for dim, start, length, index in self.cuts:
            x = x.narrow(dim, start, length) if index is None else x.index_select(dim, index.to(x.device))
        return x

    def taken_in_place(self, x: torch.Tensor) -> torch.Tensor | None:
        """What is selected as a stretch of the tensor's own memory, if it is one."""
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
            # Index tensors on several dims land in one block only when the dims between them are whole
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


def all_parts(grid: Grid, x: torch.Tensor) -> torch.Tensor:
    """The parts of all members: (*counts, *shape), in the memory of the tensor that they are parts of."""
    start = x.storage_offset() + sum(n * step for n, step in zip(grid.first, x.stride(), strict=True))
    strides = [sum(n * s for n, s in zip(move, x.stride(), strict=True)) for move in grid.moves]
    return x.as_strided((*grid.counts, *grid.shape), (*strides, *x.stride()), start)


__all__ = ["Picker", "all_parts"]
