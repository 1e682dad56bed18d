"""Decides which of the ranks that hold the same box writes it: each box once, large ones shared.

All ranks compute the same answer without communication, from a tensor's name, its layout and the mesh.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.core.layout import TensorLayout
from meshwright.core.mesh import Mesh
from meshwright.redistribute.boxes import Box, held_boxes

SHARED_BYTES = 1 << 20  # what a rank writes of a box that others could write as well, at least
PART_BYTES = 16 << 20  # the largest part: as much is read to take one element from it


@dataclass(frozen=True, slots=True)
class Piece:
    """A box that this rank writes, and where it is in the rank's tensor."""

    box: Box
    here: Box


@functools.lru_cache(1 << 14)  # every save asks the same
def own_pieces(
    name: str,
    layout: TensorLayout,
    item_bytes: int,
    mesh: Mesh,
    rank: int,
    place: int = 0,
    places: tuple[int, ...] = (0,),
) -> tuple[Piece, ...]:
    """List the pieces that a rank writes of a tensor that it holds. `places`: the places of the pipeline that hold the
    tensor; `place`: that of the rank."""
    at, found = mesh.coordinate(rank), list[Piece]()
    for held in held_boxes(layout, mesh, rank):
        others = [a.name for a in mesh.axes if a.name not in held.axes]
        replicas, mine = len(places), places.index(place)
        for axis in others:
            replicas, mine = replicas * mesh.sizes[axis], mine * mesh.sizes[axis] + at[axis]
        size = held.box.numel * item_bytes
        shares = max(1, min(replicas, size // SHARED_BYTES))
        first = zlib.crc32(f"{name} {held.box.start}".encode()) % replicas
        pairs = zip(held.box.cut(shares), held.here.cut(shares), strict=True)
        for number, (box, here) in enumerate(pairs):
            if (first + number) % replicas == mine and box.numel:
                found += _parts(Piece(box, here), item_bytes)
    return tuple(found)


def _parts(piece: Piece, item_bytes: int) -> Iterator[Piece]:
    boxes = zip(parts_of(piece.box, item_bytes), parts_of(piece.here, item_bytes), strict=True)
    return (Piece(box, here) for box, here in boxes)


def parts_of(box: Box, item_bytes: int) -> list[Box]:
    """A box in parts that are not too large, if its dims allow it. Those without an element are left out."""
    return [b for b in box.cut(math.ceil(box.numel * item_bytes / PART_BYTES)) if b.numel]


__all__ = ["PART_BYTES", "Piece", "own_pieces", "parts_of"]
