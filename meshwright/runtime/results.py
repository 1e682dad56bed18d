"""Results of a program put together from what ranks, micro-batches and stages of a pipeline have made."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch

from meshwright import heartbeat
from meshwright.core.layout import Dim, TensorLayout, dim_axes, without_axes
from meshwright.core.mesh import Mesh
from meshwright.partition import Partition
from meshwright.redistribute import redistribute
from meshwright.redistribute.index_maps import exchange
from meshwright.redistribute.steps import Step
from meshwright.runtime.collectives import Handle
from meshwright.runtime.dtypes import TORCH_DTYPES
from meshwright.runtime.index import Picker
from meshwright.runtime.pipeline_rank import Pipeline
from meshwright.runtime.rank import Rank
from meshwright.runtime.reshard import Mover


class Results:
    """The results of one rank's program, by label.

    `layouts`: label → how the ranks hold a result; its axes in time are micro-batches. `values`: label → its name in
    the program.
    """

    def __init__(self, parts: Partition, rank: Rank, handle: Handle, pipe: Pipeline | None) -> None:
        self.parts, self.rank, self.handle, self.pipe = parts, rank, handle, pipe
        found = parts.resharded
        self.layouts = {label: found.layouts[value] for label, value in found.graph.outputs}
        self.values = dict(found.graph.outputs)

    def is_sum(self, label: str) -> bool:
        """True if a result is a sum over micro-batches."""
        return not set(self.parts.plan.mesh.time).isdisjoint(self.layouts[label].partial)

    def pieces(
        self, made: Mapping[str, torch.Tensor], in_time: Mapping[tuple[str, int], torch.Tensor]
    ) -> dict[str, list[torch.Tensor]]:
        """Label → this rank's shard of the result in each micro-batch; none where its stages do not make it.
        `made`: what the step has made, sums over micro-batches among it. `in_time`: (value, micro-batch) → what that
        one has made."""
        found: dict[str, list[torch.Tensor]] = {}
        for label, value in self.values.items():
            if self.is_sum(label):
                found[label] = [made[value]] if value in made else []
            else:
                numbers = range(self.parts.micro_batches)
                found[label] = [in_time[value, m] for m in numbers if (value, m) in in_time]
                if not found[label] and value in made:  # a weight as it is
                    found[label] = [made[value]]
        return found

    def together(
        self, label: str, pieces: Sequence[torch.Tensor], gather: bool, share: bool, tag: int = 0
    ) -> torch.Tensor | None:
        """A result from its pieces. With `gather` the full tensor, else what this rank holds of it, its micro-batches
        one after the other. In a pipeline all ranks get it with `share`; without it (and without `gather`) ranks whose
        stages do not make it get None. Collective. `tag`: of its message between stages."""
        layout, mesh = self.layouts[label], self.parts.plan.mesh
        full = self.is_sum(label)  # what was added up is full on all ranks that made it
        found: torch.Tensor | None = None
        if pieces and full:
            found = pieces[-1]
        elif pieces and gather:
            found = self._joined([self.gathered(x, layout, m) for m, x in enumerate(pieces)], layout)
        elif pieces:
            found = _after(pieces, layout, mesh)
        if self.pipe is None or not share or not (gather or full):
            return found
        kind = self.parts.resharded.graph.types[self.values[label]]
        empty = functools.partial(
            torch.empty, kind.shape, dtype=TORCH_DTYPES[kind.dtype], device=self.rank.device
        )
        maker = self.pipe.maker(self.values[label])
        found = found if found is None else found.contiguous()
        return self.pipe.comm.from_first(found, empty, (maker,), tag)

    def gathered(self, x: torch.Tensor, layout: TensorLayout, micro_batch: int) -> torch.Tensor:
        """A result of one micro-batch as this rank holds it, put together over the ranks. Collective."""
        mesh = self.parts.plan.mesh
        for step in _gathering(layout, mesh, x.element_size()):
            heartbeat.of("a result put together")
            number = self.parts.of_rank(self.rank.comm.rank)[micro_batch]
            x = Mover(exchange(step, mesh, number))(x, self.handle)
        return x

    def _joined(self, pieces: list[torch.Tensor], layout: TensorLayout) -> torch.Tensor:
        """The results of all micro-batches in their places."""
        if len(pieces) == 1:
            return pieces[0]
        mesh, parts = self.parts.plan.mesh, _in_time(layout, self.parts.plan.mesh)
        if not parts.split_axes:
            return pieces[-1]
        step = Step("all_gather", mesh.sort(parts.split_axes), parts, TensorLayout.replicated(layout.shape))
        places = exchange(step, mesh, self.parts.of_rank(self.rank.comm.rank)[0]).place
        found = pieces[0].new_empty(layout.shape)
        for place, piece in zip(places, pieces, strict=True):
            Picker(place).put(found, piece)
        return found


@functools.lru_cache(maxsize=1 << 10)
def _gathering(layout: TensorLayout, mesh: Mesh, itemsize: int) -> tuple[Step, ...]:
    """The steps that put a result of one micro-batch together over the ranks. Cached: a decoder asks for each token."""
    return redistribute(layout.forward, _in_time(layout, mesh), mesh, itemsize)


def _in_time(layout: TensorLayout, mesh: Mesh) -> TensorLayout:
    """A layout whose dims are sharded into micro-batches alone."""
    ranks = {a for a in layout.split_axes if a not in mesh.time}
    return TensorLayout(tuple(without_axes(d, ranks) for d in layout.dims))


def _after(pieces: Sequence[torch.Tensor], layout: TensorLayout, mesh: Mesh) -> torch.Tensor:
    """A rank's shards of all micro-batches, one after the other in the dim that they shard."""

    def sharded(dim: Dim) -> bool:
        return not set(mesh.time).isdisjoint(dim_axes(dim))

    dims = [number for number, dim in enumerate(layout.dims) if sharded(dim)]
    return torch.cat(list(pieces), dims[0]) if len(pieces) > 1 and dims else pieces[-1]


__all__ = ["Results"]
