"""Parameters and buffers that a stage of a forward pass reads and other places of the pipeline have: in evaluation a
module may read what training reads in an earlier stage, or nowhere but where it is made."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from meshwright.core.layout import TensorLayout
from meshwright.core.rank_numbers import PipelineRank, WorldRank
from meshwright.redistribute.across_meshes import MeshLayout, Route
from meshwright.runtime.communicator import Work
from meshwright.runtime.dtypes import TORCH_DTYPES
from meshwright.runtime.pipeline_rank import Pipeline
from meshwright.runtime.rank import Rank


def lacking(pipe: Pipeline, held: Sequence[Collection[str]]) -> dict[str, tuple[PipelineRank, ...]]:
    """Input → the places whose stages read it and that do not have it. `held`: the inputs that each rank has."""
    having = _having(pipe, held)
    read = {name for stage in pipe.cut for name in stage.reads}
    kept = {i.name for i in pipe.parts.resharded.graph.inputs if i.role in ("parameter", "buffer")}
    found = {
        name: tuple(p for p in pipe.holders[name] if name not in having[p]) for name in sorted(read & kept)
    }
    return {name: places for name, places in found.items() if places}


def _having(pipe: Pipeline, held: Sequence[Collection[str]]) -> dict[PipelineRank, Collection[str]]:
    """The inputs that the ranks of each place have."""
    return {pipe.meshes.place(WorldRank(number)): names for number, names in enumerate(held)}


class LentWeights:
    """What the places of a pipeline lend one another for a forward pass. `rooms`: input → this rank's memory for it,
    filled by `bring`."""

    def __init__(
        self,
        pipe: Pipeline,
        rank: Rank,
        leaves: Mapping[str, torch.Tensor],
        held: Sequence[Collection[str]],
        first_tag: int,
    ) -> None:
        """`leaves`: input → what this rank has. `held`: the inputs that each rank has. Messages have tags from
        `first_tag` on, as many as there are lent tensors."""
        self.pipe, self.leaves, self.first_tag = pipe, leaves, first_tag
        self.takers, having = lacking(pipe, held), _having(pipe, held)
        self.givers = {name: min(p for p in having if name in having[p]) for name in self.takers}
        self.rooms: dict[str, torch.Tensor] = {}
        for name in (n for n, places in self.takers.items() if pipe.comm.place in places):
            kind = pipe.parts.resharded.graph.types[name]
            layout = TensorLayout(pipe.parts.resharded.layouts[name].dims)
            shape = MeshLayout(layout, pipe.parts.ranks).shape(pipe.comm.rank)
            self.rooms[name] = torch.empty(shape, dtype=TORCH_DTYPES[kind.dtype], device=rank.device)

    def bring(self) -> None:
        """Bring the values of now. Collective."""
        comm, sending = self.pipe.comm, list[Work]()
        for number, (name, takers) in enumerate(self.takers.items()):
            giver, tag = self.givers[name], self.first_tag + number
            if comm.place == giver:
                x = self.leaves[name].detach().contiguous()
                sending += [comm.send_to(x, p, tag, self._route(name, giver, p)) for p in takers]
            elif comm.place in takers:
                room = self.rooms[name]
                came = comm.receive_from(room, giver, tag, self._route(name, giver, comm.place)).wait()
                if came.data_ptr() != room.data_ptr():
                    room.copy_(came)
        for work in sending:
            work.wait()

    def _route(self, name: str, giver: PipelineRank, taker: PipelineRank) -> Route | None:
        laid = self.pipe.held(name)
        return None if laid is None else Route(laid(giver), laid(taker))


__all__ = ["LentWeights", "lacking"]
