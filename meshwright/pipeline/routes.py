"""How the ranks of two places hold what passes between them, where places have meshes of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.graph import DTYPES
from meshwright.layout import TensorLayout
from meshwright.partition import Partition
from meshwright.partition.interleave import original
from meshwright.partition.updates import update_layout
from meshwright.pipeline.messages import Message
from meshwright.redistribute.between import Laid, arriving, leaving


@dataclass(frozen=True)
class Routes:
    """`every`: what the ranks of all places share. `places`: stage → its place. `copy_of`: which copy a value is of,
    where a program has several."""

    every: Partition
    places: Sequence[int]
    copy_of: Mapping[str, int] = field(default_factory=dict)

    def of(self, message: Message) -> tuple[Laid, Laid] | None:
        """How the ranks that send a message hold it, and how those that receive it do; None where all places share a
        mesh: then a rank sends to the one of its number."""
        if not self.every.own:
            return None
        maker, reader = (self._laid(message, self.places[s]) for s in (message.maker, message.reader))
        return (reader, maker) if message.back else (maker, reader)

    def _laid(self, message: Message, place: int) -> Laid:
        parts, copy = self.every.of_place(place), self.copy_of.get(message.value, 0)
        layout = parts.resharded.layouts[original(message.value, copy)]
        number = message.micro_batch * parts.copies + copy
        return Laid(TensorLayout(layout.dims), parts.plan.mesh, number)

    def updated(self, name: str, place: int) -> Laid:
        """How the ranks of a place hold the gradient of a parameter, when it is there."""
        parts = self.every.of_place(place)
        entry = next(i for i in parts.resharded.graph.inputs if i.name == name)
        return Laid(TensorLayout(update_layout(parts, entry).dims), parts.ranks)

    def sends(self, message: Message, rank: int) -> int:
        """To how many ranks one of the sender's sends a message."""
        route = self.of(message)
        return 1 if route is None else len(leaving(*route, rank))

    def receives(self, message: Message, rank: int) -> int:
        """From how many ranks one of the receiver's gets a message."""
        route = self.of(message)
        return 1 if route is None else len(arriving(*route, rank))

    def sent_bytes(self, message: Message) -> list[int]:
        """Bytes that each of the sender's ranks sends; none where all places share a mesh."""
        route = self.of(message)
        if route is None:
            return []
        kind = self.every.resharded.graph.types[original(message.value, self.copy_of.get(message.value, 0))]
        size = DTYPES[kind.dtype]
        return [
            size * sum(piece.numel for _, piece in leaving(*route, rank)) for rank in range(route[0].ranks)
        ]


__all__ = ["Routes"]
