"""The ranks that share a stage of a pipeline, as the communicator of their program; and messages along the pipeline."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from meshwright.core.layout import TensorLayout
from meshwright.core.rank_numbers import PipelineRank, StageRank, WorldRank
from meshwright.pipeline.meshes import Meshes
from meshwright.redistribute.across_meshes import MeshLayout, Route, arriving, leaving
from meshwright.runtime.communicator.protocol import Communicator, Later, Work
from meshwright.runtime.index import Picker

if TYPE_CHECKING:
    Base = Communicator
else:  # methods that are inherited would hide those of `collectives`
    Base = object


class InStage(Base):
    """A communicator whose mesh and rank are those within a stage; `place` is where along the pipeline this rank is.

    Its `collectives` are those of the `whole` world, which knows the same axes, or, where places have meshes of their
    own, of the ranks of this one. Messages then go to all ranks of another place that hold some of the same elements,
    by a route; without one a tensor is replicated on both sides.
    """

    def __init__(self, whole: Communicator, meshes: Meshes) -> None:
        self.whole, self.meshes = whole, meshes
        me = WorldRank(whole.rank)
        self.place, self.places = meshes.place(me), meshes.places
        self.mesh, self.rank = meshes.mesh_at(self.place), meshes.within(me)
        self.collectives = whole.part(meshes.ranks_at(self.place), self.mesh) if meshes.own else whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self.collectives, name)

    def send_to(self, x: torch.Tensor, place: PipelineRank, tag: int, route: Route | None = None) -> Work:
        """Start a message to the rank of another place that has this one's number within its stages, or by a route."""
        if not self.meshes.own:
            return self.whole.send_start(x, self.meshes.at(place, StageRank(self.rank)), tag)
        route = route or self._route(x, self.place, place)
        return self._spread(x, place, tag, _leaving(route.there, route.first, self.rank))

    def receive_from(
        self, into: torch.Tensor, place: PipelineRank, tag: int, route: Route | None = None
    ) -> Work:
        """Start to receive one from there."""
        if not self.meshes.own:
            return self.whole.receive_start(into, self.meshes.at(place, StageRank(self.rank)), tag)
        route = route or self._route(into, place, self.place)
        if route.parts is not None:
            return self._receive_parts(into, place, tag, route.there, route.parts, route.here)
        return self._collect(into, place, tag, _arriving(route.there, route.here, self.rank))

    def _receive_parts(
        self,
        into: torch.Tensor,
        place: PipelineRank,
        tag: int,
        there: MeshLayout,
        parts: MeshLayout,
        here: MeshLayout,
    ) -> Work:
        """Start to receive a part, and those that the other ranks of this place receive: who waits for it passes its
        part on to them."""
        inside = _arriving(parts, here, self.rank)
        mine = next((picker for sender, picker in inside if sender == self.rank), None)
        room = None if mine is None else mine.taken_in_place(into)
        part = into.new_empty(parts.shape(self.rank)) if room is None else room
        first = self._collect(part, place, tag, _arriving(there, parts, self.rank))
        others = self._collect(into, self.place, tag, [p for p in inside if p[0] != self.rank])
        receivers = [p for p in _leaving(parts, here, self.rank) if p[0] != self.rank]

        def put() -> torch.Tensor:
            came = first.wait()
            sending = self._spread(came, self.place, tag, receivers)
            if mine is not None and (room is None or came.data_ptr() != room.data_ptr()):
                mine.put(into, came)
            rest = others.wait()
            if rest.data_ptr() != into.data_ptr():  # all of it from one rank, which lays it where it likes
                into.copy_(rest)
            sending.wait()
            return into

        return Later(put)

    def _spread(
        self, x: torch.Tensor, place: PipelineRank, tag: int, pieces: Sequence[tuple[int, Picker]]
    ) -> Work:
        """Start to send pieces of a tensor to ranks of a place."""
        return _All(
            [
                self.whole.send_start(picker.take(x), self.meshes.at(place, StageRank(receiver)), tag)
                for receiver, picker in pieces
            ],
            x,
        )

    def _collect(
        self, into: torch.Tensor, place: PipelineRank, tag: int, pieces: Sequence[tuple[int, Picker]]
    ) -> Work:
        """Start to receive pieces of a tensor from ranks of a place."""
        if len(pieces) == 1 and not pieces[0][1].cuts:
            return self.whole.receive_start(into, self.meshes.at(place, StageRank(pieces[0][0])), tag)
        works: list[tuple[torch.Tensor | None, Picker, Work]] = []
        for sender, picker in pieces:
            inside = picker.taken_in_place(into)
            buffer = into.new_empty(picker.shape) if inside is None else inside
            works.append(
                (
                    inside,
                    picker,
                    self.whole.receive_start(buffer, self.meshes.at(place, StageRank(sender)), tag),
                )
            )

        def put() -> torch.Tensor:
            for inside, picker, work in works:
                piece = work.wait()
                if inside is None or piece.data_ptr() != inside.data_ptr():
                    picker.put(into, piece)
            return into

        return Later(put)

    def _route(self, x: torch.Tensor, source: PipelineRank, to: PipelineRank) -> Route:
        layout = TensorLayout.replicated(tuple(x.shape))
        return Route(
            MeshLayout(layout, self.meshes.mesh_at(source)), MeshLayout(layout, self.meshes.mesh_at(to))
        )

    def from_first(
        self,
        x: torch.Tensor | None,
        empty: Callable[[], torch.Tensor],
        holders: Sequence[PipelineRank],
        tag: int,
    ) -> torch.Tensor:
        """A value on all places: those that lack it get that of the first of its holders into an `empty` tensor. All
        call it."""
        if self.place not in holders:
            return self.receive_from(empty(), holders[0], tag).wait()
        assert x is not None
        lacking = [p for p in self.meshes.every_place if p not in holders] if self.place == holders[0] else []
        for work in [self.send_to(x, p, tag) for p in lacking]:
            work.wait()
        return x

    def sum_over(
        self,
        x: torch.Tensor,
        places: Sequence[PipelineRank],
        tag: int,
        laid: Callable[[PipelineRank], MeshLayout] | None = None,
    ) -> torch.Tensor:
        """The sum over some places, this one among them: a new tensor, of the same bits on all of them. `laid`: how the
        ranks of each hold it, where they have meshes of their own."""

        def route(source: PipelineRank, to: PipelineRank) -> Route | None:
            return None if laid is None else Route(laid(source), laid(to))

        others, mine = [p for p in places if p != self.place], self.place
        empty = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in others)
        arriving = {
            p: self.receive_from(e, p, tag, route(p, mine)) for p, e in zip(others, empty, strict=True)
        }
        sending = [self.send_to(x, p, tag, route(mine, p)) for p in others]
        terms = {p: x if p == self.place else arriving[p].wait() for p in places}
        first, *rest = sorted(terms)
        total = terms[first].clone(memory_format=torch.contiguous_format)
        for place in rest:
            total += terms[place]
        for work in sending:
            work.wait()
        return total


@dataclass
class _All:
    """Messages to several ranks."""

    works: list[Work]
    result: torch.Tensor

    def wait(self) -> torch.Tensor:
        for work in self.works:
            work.wait()
        return self.result


@functools.lru_cache(maxsize=1 << 12)
def _leaving(here: MeshLayout, there: MeshLayout, rank: int) -> list[tuple[int, Picker]]:
    return [(receiver, Picker(piece)) for receiver, piece in leaving(here, there, rank)]


@functools.lru_cache(maxsize=1 << 12)
def _arriving(there: MeshLayout, here: MeshLayout, rank: int) -> list[tuple[int, Picker]]:
    return [(sender, Picker(piece)) for sender, piece in arriving(there, here, rank)]
