"""The interface through which a program reaches other ranks, and handles of started collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from meshwright.core.collectives import CollectiveKind
from meshwright.core.mesh import Mesh
from meshwright.runtime.communicator.by_record import Methods, with_collectives


class Work(Protocol):
    """A collective under way: `wait()` returns its result."""

    def wait(self) -> torch.Tensor: ...


@dataclass
class Done:
    """A collective that has already finished. `sent` lives until it is waited for, as where it takes its time."""

    result: torch.Tensor
    sent: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """The result."""
        self.sent = None
        return self.result


@dataclass
class Later:
    """A collective under way whose result is put together when it is waited for, which is done once."""

    finish: Callable[[], torch.Tensor]

    def wait(self) -> torch.Tensor:
        """The result."""
        return self.finish()


class Communicator(Protocol):
    """The interface through which a program reaches other ranks. `axes` are prime axes, the slowest given first."""

    mesh: Mesh
    rank: int

    def all_reduce(self, x: torch.Tensor, axes: Sequence[str], op: str = "sum") -> torch.Tensor:
        """The sum (or "prod", "max", "min") over the group, as a new tensor."""
        ...

    def all_reduce_start(self, x: torch.Tensor, axes: Sequence[str], op: str = "sum") -> Work:
        """Start a sum over the group *in place* of a buffer that the caller owns."""
        ...

    def all_gather(self, x_n: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
        """The members' flat tensors (n,), stacked in group order: (members, n)."""
        ...

    def reduce_scatter(self, x_mn: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
        """The sum over the group of everybody's row for this member: (members, n) → (n,)."""
        ...

    def all_to_all(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], axes: Sequence[str]
    ) -> torch.Tensor:
        """Send consecutive stretches of a flat tensor, `send[m]` elements to member m; receive `receive[m]`
        from each."""
        ...

    def shift(self, x: torch.Tensor, axes: Sequence[str], by: int = 1) -> torch.Tensor:
        """The tensor of the member `by` places before this one; the first follows the last. All have one shape."""
        ...

    def broadcast(self, x: torch.Tensor, source: int) -> None:
        """Overwrite a tensor, on all ranks of the mesh, by that of one of them."""
        ...

    def broadcast_start(self, x: torch.Tensor, source: int, axes: Sequence[str]) -> Work:
        """Start to overwrite a contiguous tensor on the ranks of the group by that of one of them."""
        ...

    def all_gather_start(
        self, x_n: torch.Tensor, axes: Sequence[str], into: torch.Tensor | None = None
    ) -> Work:
        """Start an `all_gather`, whose result is written `into` a tensor that may hold `x_n` as this rank's row. Until
        it is waited for nobody writes to `x_n`; so with the two below. All members start their collectives in one
        order, and wait in any."""
        ...

    def reduce_scatter_start(self, x_mn: torch.Tensor, axes: Sequence[str]) -> Work:
        """Start a `reduce_scatter`."""
        ...

    def all_to_all_start(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], axes: Sequence[str]
    ) -> Work:
        """Start an `all_to_all`."""
        ...

    def shift_start(self, x: torch.Tensor, axes: Sequence[str], by: int = 1) -> Work:
        """Start a `shift`."""
        ...

    def send_start(self, x: torch.Tensor, to: int, tag: int) -> Work:
        """Start a message to one rank of the world. Until it is waited for nobody writes to `x`."""
        ...

    def receive_start(self, into: torch.Tensor, source: int, tag: int) -> Work:
        """Start to receive what a rank sends under a tag. `into` is the caller's buffer for it, which the result need
        not be. Messages of one tag between two ranks arrive in the order in which they were sent."""
        ...

    def part(self, ranks: Sequence[int], mesh: Mesh) -> Communicator:
        """Some ranks of the world, this one among them, as a mesh of their own: collectives over its axes. Messages
        stay those of the world."""
        ...


if TYPE_CHECKING:

    class Typed(Any):
        """A class whose collectives are given to it: a type checker does not look for them."""

else:
    Typed = object


def _waited(kind: CollectiveKind) -> Methods:
    def run(self: Any, *args: Any, **options: Any) -> torch.Tensor:
        return getattr(self, kind.start)(*args, **options).wait()

    return {kind.name: run}


@with_collectives(_waited)
class Waited(Typed):
    """Collectives of a communicator that can start them: started, and waited for at once."""
