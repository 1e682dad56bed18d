"""The ranks that share a stage of a pipeline, as the communicator of their program; and messages along the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshwright.pipeline.meshes import Meshes
from meshwright.runtime.communicator.protocol import Communicator, Work


class InStage:
    """A communicator whose mesh and rank are those within a stage. Collectives are those of the `whole` world, which
    knows the same axes; `place` is where along the pipeline this rank is."""

    def __init__(self, whole: Communicator, meshes: Meshes) -> None:
        self.whole, self.meshes = whole, meshes
        self.mesh, self.rank = meshes.stage, meshes.within(whole.rank)
        self.place, self.places = meshes.place(whole.rank), meshes.places

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    def send_to(self, x: torch.Tensor, place: int, tag: int) -> Work:
        """Start a message to the rank of another place that has this one's number within its stages."""
        return self.whole.send_start(x, self.meshes.at(place, self.rank), tag)

    def receive_from(self, into: torch.Tensor, place: int, tag: int) -> Work:
        """Start to receive one from there."""
        return self.whole.receive_start(into, self.meshes.at(place, self.rank), tag)

    def from_first(
        self, x: torch.Tensor | None, empty: Callable[[], torch.Tensor], holders: Sequence[int], tag: int
    ) -> torch.Tensor:
        """A value on all places: those that lack it get that of the first of its holders into an `empty` tensor. All
        call it."""
        if self.place not in holders:
            return self.receive_from(empty(), holders[0], tag).wait()
        assert x is not None
        lacking = [p for p in range(self.places) if p not in holders] if self.place == holders[0] else []
        for work in [self.send_to(x, p, tag) for p in lacking]:
            work.wait()
        return x

    def sum_over(self, x: torch.Tensor, places: Sequence[int], tag: int) -> torch.Tensor:
        """The sum over some places, this one among them: a new tensor, of the same bits on all of them."""
        others = [p for p in places if p != self.place]
        empty = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in others)
        arriving = {p: self.receive_from(e, p, tag) for p, e in zip(others, empty, strict=True)}
        sending = [self.send_to(x, p, tag) for p in others]
        terms = {p: x if p == self.place else arriving[p].wait() for p in places}
        first, *rest = sorted(terms)
        total = terms[first].clone(memory_format=torch.contiguous_format)
        for place in rest:
            total += terms[place]
        for work in sending:
            work.wait()
        return total
