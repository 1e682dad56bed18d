"""From a layout on one mesh to a layout on another, whose ranks are others: which rectangles go from whom to whom.

A receiver gets each block of the sender's layout from one of the ranks that hold it; which of its copies that is goes
round with the receiver's number, so that copies share the work. Terms of a sum are added up before. Where several
receivers want the same, each may take a part of it in and pass that on to the others (the local all-gather of Zhuang et
al., On Optimizing the Communication of Model Parallelism, MLSys 2023): then an element crosses between meshes once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from meshwright.core.hashed import hashed_once
from meshwright.core.layout import TensorLayout
from meshwright.core.mesh import Mesh
from meshwright.redistribute.index_maps import overlap
from meshwright.redistribute.slices import Selection


@hashed_once
@dataclass(frozen=True)
class MeshLayout:
    """How the ranks of a mesh hold a tensor. If the mesh has an axis in time: the tensor of one micro-batch."""

    layout: TensorLayout
    mesh: Mesh
    micro_batch: int = 0

    @functools.cached_property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.mesh.size // self.mesh.count(self.mesh.time)

    def at(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank in this micro-batch."""
        return self.mesh.coordinate(self.micro_batch * self.ranks + rank)

    def shape(self, rank: int) -> tuple[int, ...]:
        """The shape of what a rank holds."""
        return self.layout.local_shape(self.mesh, self.at(rank))

    @functools.cached_property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """The ranks by what they hold: those of a group hold the same."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.ranks):
            at = self.at(rank)
            found.setdefault(tuple(at[a] for a in self.layout.split_axes), []).append(rank)
        return tuple(map(tuple, found.values()))


@functools.lru_cache(maxsize=1 << 14)
def arriving(there: MeshLayout, here: MeshLayout, rank: int) -> tuple[tuple[int, Selection], ...]:
    """(sender, where in this rank's tensor it belongs) of all that a rank receives; nothing without elements."""
    found: list[tuple[int, Selection]] = []
    for copies in there.copies:
        alike = here.ranks == there.ranks and rank in copies
        sender = rank if alike else copies[rank % len(copies)]
        piece = overlap(here.layout, here.mesh, here.at(rank), there.layout, there.mesh, there.at(sender))
        if piece.numel:
            found.append((sender, piece))
    return tuple(found)


@functools.lru_cache(maxsize=1 << 14)
def leaving(here: MeshLayout, there: MeshLayout, rank: int) -> tuple[tuple[int, Selection], ...]:
    """(receiver, what of this rank's tensor it gets) of all that a rank sends."""
    return tuple(
        (
            receiver,
            overlap(here.layout, here.mesh, here.at(rank), there.layout, there.mesh, there.at(receiver)),
        )
        for receiver in range(there.ranks)
        if any(sender == rank for sender, _ in arriving(here, there, receiver))
    )


def received_elements(there: MeshLayout, here: MeshLayout, rank: int) -> int:
    """Return the number of elements that a rank receives."""
    return sum(piece.numel for _, piece in arriving(there, here, rank))


@hashed_once
@dataclass(frozen=True)
class Route:
    """How senders and receivers of a tensor hold it. `parts`: the layout in which the receivers take it before they
    pass it on among themselves; None if each receives all that it holds from the senders."""

    there: MeshLayout
    here: MeshLayout
    parts: MeshLayout | None = None

    @property
    def first(self) -> MeshLayout:
        """Return the layout in which the tensor arrives."""
        return self.parts or self.here

    def sends(self, rank: int) -> int:
        """Return the number of messages that a sender starts."""
        return len(leaving(self.there, self.first, rank))

    def receives(self, rank: int) -> int:
        """Return the number of messages that a receiver starts or takes part in, those among receivers included."""
        count = len(arriving(self.there, self.first, rank))
        if self.parts is None:
            return count
        own = any(sender == rank for sender, _ in arriving(self.parts, self.here, rank))
        inside = len(arriving(self.parts, self.here, rank)) + len(leaving(self.parts, self.here, rank))
        return count + inside - 2 * own

    def crossing(self) -> int:
        """Elements that cross to or from the rank that sends or receives most."""
        out = (sum(p.numel for _, p in leaving(self.there, self.first, r)) for r in range(self.there.ranks))
        into = (received_elements(self.there, self.first, rank) for rank in range(self.here.ranks))
        return max((*out, *into))


__all__ = ["MeshLayout", "Route", "arriving", "leaving", "received_elements"]
