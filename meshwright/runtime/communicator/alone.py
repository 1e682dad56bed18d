"""A rank whose collectives are done when they are called: alone in its world, or one of many that only counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.core.collectives import CollectiveKind
from meshwright.core.mesh import Mesh
from meshwright.runtime.communicator.by_record import Call, Methods, with_collectives
from meshwright.runtime.communicator.protocol import Done, Typed, Work


def _started(kind: CollectiveKind) -> Methods:
    def start(self: Any, x: torch.Tensor, *args: Any, **options: Any) -> Work:
        return Done(getattr(self, kind.name)(x, *args, **options), x)

    return {kind.start: start}


@with_collectives(_started)
class AtOnce(Typed):
    """Starts of a communicator whose collectives are done when they are called."""

    def all_gather_start(
        self, x_n: torch.Tensor, axes: Sequence[str], into: torch.Tensor | None = None
    ) -> Work:
        """See `Communicator`."""
        rows = self.all_gather(x_n, axes)
        return Done(rows if into is None else into.copy_(rows), x_n)


def _of_one(kind: CollectiveKind) -> Methods:
    def run(self: Any, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if kind.chunks != "padded":
            return x.clone()
        return x[0].clone() if kind.splits else x.clone()[None]

    return {kind.name: run}


@with_collectives(_of_one)
@dataclass
class Alone(AtOnce):
    """A world of one rank, without communication."""

    mesh: Mesh
    rank: int = 0

    def part(self, ranks: Sequence[int], mesh: Mesh) -> Alone:
        """The same rank on another mesh of one."""
        return Alone(mesh)

    def all_reduce_start(self, x: torch.Tensor, axes: Sequence[str], op: str = "sum") -> Work:
        """The value itself."""
        return Done(x)

    def broadcast(self, x: torch.Tensor, source: int) -> None:
        """Nothing: it is the source."""

    def broadcast_start(self, x: torch.Tensor, source: int, axes: Sequence[str]) -> Work:
        """Nothing: it is the source."""
        return Done(x)


def _counted(kind: CollectiveKind) -> Methods:
    def run(self: Counter, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        call = Call.of(kind, x, *args[: 3 if kind.chunks == "own" else 1], **options)
        members = self.mesh.count(call.axes)
        self.count(kind.name, call.axes, call.sent_bytes(members))
        return call.shaped(members)

    return {kind.name: run}


@with_collectives(_counted)
@dataclass
class Counter(AtOnce):
    """Adds up what one rank out of thousands would send, and answers with values of the right shape.

    `calls` lists (kind, axes, payload bytes) in the order of execution. The payload is the tensor that enters an
    all-reduce, all-to-all or reduce-scatter and the tensor that leaves an all-gather.
    """

    mesh: Mesh
    rank: int = 0
    calls: list[tuple[str, tuple[str, ...], int]] = field(default_factory=list)

    def part(self, ranks: Sequence[int], mesh: Mesh) -> Counter:
        """See `Communicator`. What is sent there is counted here."""
        return Counter(mesh, ranks.index(self.rank), self.calls)

    def count(self, kind: str, axes: Sequence[str], size_bytes: int) -> None:
        """Note a call."""
        self.calls.append((kind, tuple(axes), size_bytes))

    def all_reduce_start(self, x: torch.Tensor, axes: Sequence[str], op: str = "sum") -> Work:
        """See `Communicator`."""
        self.count("all_reduce", axes, x.numel() * x.element_size())
        return Done(x)

    def broadcast(self, x: torch.Tensor, source: int) -> None:
        """See `Communicator`."""
        self.broadcast_start(x, source, [a.name for a in self.mesh.axes])

    def broadcast_start(self, x: torch.Tensor, source: int, axes: Sequence[str]) -> Work:
        """See `Communicator`."""
        self.count("broadcast", axes, x.numel() * x.element_size())
        return Done(x)

    def send_start(self, x: torch.Tensor, to: int, tag: int) -> Work:
        """See `Communicator`."""
        self.count("send", (), x.numel() * x.element_size())
        return Done(x)

    def receive_start(self, into: torch.Tensor, source: int, tag: int) -> Work:
        """See `Communicator`. What arrives is zero."""
        self.count("receive", (), into.numel() * into.element_size())
        return Done(into.zero_())
