"""What lives beside a message while a collective is under way, by who carries it: as the communicators have it
(`runtime/communicator`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.mesh import Mesh
from meshwright.partition.heap import Heap, Storage


@dataclass
class Scatter:
    """A reduce-scatter under way: what comes, until it is waited for."""

    heap: Heap
    received: Storage
    sum_bytes: int  # of a sum that is no part of what comes; 0 where it is

    def wait(self) -> Storage:
        """The sum, held once."""
        if not self.sum_bytes:
            return self.received
        total = self.heap.new(self.sum_bytes)
        self.heap.drop(self.received)
        return total


def scatter(heap: Heap, message_bytes: int, members: int, staged: bool) -> Scatter:
    """A reduce-scatter starts. `staged`: all rows come before they are added up, as between processes on a CPU; of two
    the one that comes becomes the sum."""
    row = message_bytes // members
    if staged and members > 2:
        return Scatter(heap, heap.new(message_bytes), row)
    return Scatter(heap, heap.new(row), 0)


def gather(heap: Heap, message_bytes: int, mesh: Mesh, axes: Sequence[str], staged: bool) -> Storage:
    """An all-gather starts; the memory of what comes, held once. `staged`: where some members are nearer than others
    gloo gathers into a copy first."""
    received = heap.new(message_bytes)
    heap.passing(message_bytes if staged and not mesh.equally_near(axes) else 0)
    return received


__all__ = ["Scatter", "gather", "scatter"]
