"""A rank whose collectives are done when they are called: alone in its world, or one of many that only counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from meshwright.core.mesh import Mesh
from meshwright.runtime.communicator.protocol import Done, Work


class AtOnce:
    """Starts of a communicator whose collectives are done when they are called."""

    all_gather: Callable[..., torch.Tensor]
    reduce_scatter: Callable[..., torch.Tensor]
    all_to_all: Callable[..., torch.Tensor]
    shift: Callable[..., torch.Tensor]

    def all_gather_start(
        self, x_n: torch.Tensor, axes: Sequence[str], into: torch.Tensor | None = None
    ) -> Work:
        """See `Communicator`."""
        rows = self.all_gather(x_n, axes)
        return Done(rows if into is None else into.copy_(rows), x_n)

    def reduce_scatter_start(self, x_mn: torch.Tensor, axes: Sequence[str]) -> Work:
        """See `Communicator`."""
        return Done(self.reduce_scatter(x_mn, axes), x_mn)

    def all_to_all_start(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], axes: Sequence[str]
    ) -> Work:
        """See `Communicator`."""
        return Done(self.all_to_all(x, send, receive, axes), x)

    def shift_start(self, x: torch.Tensor, axes: Sequence[str], by: int = 1) -> Work:
        """See `Communicator`."""
        return Done(self.shift(x, axes, by), x)


@dataclass
class Alone(AtOnce):
    """A world of one rank, without communication."""

    mesh: Mesh
    rank: int = 0

    def part(self, ranks: Sequence[int], mesh: Mesh) -> Alone:
        """The same rank on another mesh of one."""
        return Alone(mesh)

    def all_reduce(self, x: torch.Tensor, axes: Sequence[str], op: str = "sum") -> torch.Tensor:
        """The value itself."""
        return x.clone()

    def all_reduce_start(self, x: torch.Tensor, axes: Sequence[str], op: str = "sum") -> Work:
        """The value itself."""
        return Done(x)

    def broadcast(self, x: torch.Tensor, source: int) -> None:
        """Nothing: it is the source."""

    def broadcast_start(self, x: torch.Tensor, source: int, axes: Sequence[str]) -> Work:
        """Nothing: it is the source."""
        return Done(x)

    def all_gather(self, x_n: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
        """One row."""
        return x_n.clone()[None]

    def reduce_scatter(self, x_mn: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
        """The only row."""
        return x_mn[0].clone()

    def all_to_all(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], axes: Sequence[str]
    ) -> torch.Tensor:
        """The value itself."""
        return x.clone()

    def shift(self, x: torch.Tensor, axes: Sequence[str], by: int = 1) -> torch.Tensor:
        """The value itself."""
        return x.clone()

    def send_start(self, x: torch.Tensor, to: int, tag: int) -> Work:
        """Nobody is there."""
        raise AssertionError(f"a message to rank {to} from the only one")

    def receive_start(self, into: torch.Tensor, source: int, tag: int) -> Work:
        """Nobody is there."""
        raise AssertionError(f"a message from rank {source} to the only one")


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

    def _count(self, kind: str, axes: Sequence[str], size_bytes: int) -> None:
        self.calls.append((kind, tuple(axes), size_bytes))

    def all_reduce(self, x: torch.Tensor, axes: Sequence[str], op: str = "sum") -> torch.Tensor:
        """See `Communicator`."""
        self._count("all_reduce", axes, x.numel() * x.element_size())
        return x.clone()

    def all_reduce_start(self, x: torch.Tensor, axes: Sequence[str], op: str = "sum") -> Work:
        """See `Communicator`."""
        self._count("all_reduce", axes, x.numel() * x.element_size())
        return Done(x)

    def broadcast(self, x: torch.Tensor, source: int) -> None:
        """See `Communicator`."""
        self.broadcast_start(x, source, [a.name for a in self.mesh.axes])

    def broadcast_start(self, x: torch.Tensor, source: int, axes: Sequence[str]) -> Work:
        """See `Communicator`."""
        self._count("broadcast", axes, x.numel() * x.element_size())
        return Done(x)

    def all_gather(self, x_n: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
        """See `Communicator`."""
        members = self.mesh.count(axes)
        self._count("all_gather", axes, members * x_n.numel() * x_n.element_size())
        return x_n.expand(members, -1).clone()

    def reduce_scatter(self, x_mn: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
        """See `Communicator`."""
        self._count("reduce_scatter", axes, x_mn.numel() * x_mn.element_size())
        return x_mn[0].clone()

    def all_to_all(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], axes: Sequence[str]
    ) -> torch.Tensor:
        """See `Communicator`."""
        self._count("all_to_all", axes, x.numel() * x.element_size())
        return x.new_zeros(sum(receive))

    def shift(self, x: torch.Tensor, axes: Sequence[str], by: int = 1) -> torch.Tensor:
        """See `Communicator`."""
        self._count("shift", axes, x.numel() * x.element_size())
        return x.clone()

    def send_start(self, x: torch.Tensor, to: int, tag: int) -> Work:
        """See `Communicator`."""
        self._count("send", (), x.numel() * x.element_size())
        return Done(x)

    def receive_start(self, into: torch.Tensor, source: int, tag: int) -> Work:
        """See `Communicator`. What arrives is zero."""
        self._count("receive", (), into.numel() * into.element_size())
        return Done(into.zero_())
