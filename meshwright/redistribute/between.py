"""From a layout on one mesh to a layout on another, whose ranks are others: which rectangles go from whom to whom.

A receiver gets each block of the sender's layout from one of the ranks that hold it; which of its copies that is goes
round with the receiver's number, so that copies share the work. Terms of a sum are added up before.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from meshwright.hashed import hashed_once
from meshwright.layout import TensorLayout
from meshwright.mesh import Mesh
from meshwright.redistribute.positions import Selection, overlap


@hashed_once
@dataclass(frozen=True)
class Laid:
    """How the ranks of a mesh hold a tensor: that of one micro-batch, where the mesh has an axis in time."""

    layout: TensorLayout
    mesh: Mesh
    micro_batch: int = 0

    @functools.cached_property
    def ranks(self) -> int:
        """How many ranks there are."""
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
def arriving(there: Laid, here: Laid, rank: int) -> tuple[tuple[int, Selection], ...]:
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
def leaving(here: Laid, there: Laid, rank: int) -> tuple[tuple[int, Selection], ...]:
    """(receiver, what of this rank's tensor it gets) of all that a rank sends."""
    return tuple(
        (
            receiver,
            overlap(here.layout, here.mesh, here.at(rank), there.layout, there.mesh, there.at(receiver)),
        )
        for receiver in range(there.ranks)
        if any(sender == rank for sender, _ in arriving(here, there, receiver))
    )


def received_elements(there: Laid, here: Laid, rank: int) -> int:
    """How many elements a rank receives."""
    return sum(piece.numel for _, piece in arriving(there, here, rank))


__all__ = ["Laid", "arriving", "leaving", "received_elements"]
