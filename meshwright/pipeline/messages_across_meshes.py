"""How the ranks of two places hold what passes between them, where places have meshes of their own."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshwright.core.graph import DTYPES
from meshwright.core.layout import TensorLayout
from meshwright.core.rank_numbers import PipelineRank
from meshwright.partition import Partition
from meshwright.partition.activation_offload import sliced
from meshwright.partition.interleave import original
from meshwright.partition.sharded_update import update_layout
from meshwright.pipeline.messages import Message
from meshwright.redistribute import Prices
from meshwright.redistribute.across_meshes import MeshLayout, Route


@dataclass(frozen=True)
class Routes:
    """`every`: what the ranks of all places share. `places`: stage → its place. `copy_of`: which copy a value is of,
    where a program has several."""

    every: Partition
    places: Sequence[PipelineRank]
    copy_of: Mapping[str, int] = field(default_factory=dict)

    def of(self, message: Message) -> Route | None:
        """How the ranks that send a message hold it, and how those that receive it do; None where all places share a
        mesh: then a rank sends to the one of its number."""
        if not self.every.own:
            return None
        maker, reader = (self._laid(message, self.places[s]) for s in (message.maker, message.reader))
        there, here = (reader, maker) if message.back else (maker, reader)
        return _cheapest(there, here, self._itemsize(message), self.every.requested.prices, self._link)

    @property
    def _link(self) -> str:
        """The level of the cluster between places, where one is known."""
        return self.every.requested.ranks.axes[0].link

    def _itemsize(self, message: Message) -> int:
        value = original(message.value, self.copy_of.get(message.value, 0))
        return DTYPES[self.every.resharded.graph.types[value].dtype]

    def _laid(self, message: Message, place: PipelineRank) -> MeshLayout:
        parts, copy = self.every.of_place(place), self.copy_of.get(message.value, 0)
        layout = parts.resharded.layouts[original(message.value, copy)]
        number = message.micro_batch * parts.copies + copy
        return MeshLayout(TensorLayout(layout.dims), parts.plan.mesh, number)

    def updated(self, name: str, place: PipelineRank) -> MeshLayout:
        """How the ranks of a place hold the gradient of a parameter, when it is there."""
        parts = self.every.of_place(place)
        entry = next(i for i in parts.resharded.graph.inputs if i.name == name)
        return MeshLayout(TensorLayout(update_layout(parts, entry).dims), parts.ranks)

    def held(self, name: str, place: PipelineRank) -> MeshLayout:
        """How the ranks of a place hold an input of the program."""
        parts = self.every.of_place(place)
        return MeshLayout(TensorLayout(parts.resharded.layouts[name].dims), parts.ranks)

    def sends(self, message: Message, rank: int) -> int:
        """To how many ranks one of the sender's sends a message."""
        route = self.of(message)
        return 1 if route is None else route.sends(rank)

    def receives(self, message: Message, rank: int) -> int:
        """From how many ranks one of the receiver's gets a message."""
        route = self.of(message)
        return 1 if route is None else route.receives(rank)

    def crossing_bytes(self, message: Message) -> int:
        """Bytes of a message that cross to or from the rank that sends or receives most of it, where places have meshes
        of their own."""
        route = self.of(message)
        return 0 if route is None else route.crossing() * self._itemsize(message)

    def passing_seconds(self, message: Message) -> float:
        """Return the seconds in which receivers pass on to one another what each has received."""
        route, prices = self.of(message), self.every.requested.prices
        if route is None or route.parts is None or prices is None:
            return 0.0
        return _passing(route.parts, route.here, self._itemsize(message), prices)


def _cheapest(there: MeshLayout, here: MeshLayout, itemsize: int, prices: Prices | None, link: str) -> Route:
    """The way by which a tensor is there first: from the senders to all receivers, or to each a part that it passes on.
    Where nobody knows what links cost, to all. All micro-batches go one way, that of the first."""
    cut = None
    if prices is not None:
        first = (replace(laid, micro_batch=0) for laid in (there, here))
        cut = _passed_on(*first, itemsize, prices, link)
    return Route(there, here, None if cut is None else replace(here, layout=cut))


@functools.lru_cache(maxsize=1 << 12)
def _passed_on(
    there: MeshLayout, here: MeshLayout, itemsize: int, prices: Prices, link: str
) -> TensorLayout | None:
    """The layout of the parts that receivers pass on to one another; None where all comes as quickly."""
    cut = sliced(here.layout, here.mesh)
    latency, rate = prices.row("all_gather", link)
    if cut is None or math.isinf(latency):
        return None
    parts = replace(here, layout=cut)
    fan = max(1.0, here.ranks / there.ranks)  # receivers of a sender: what it sends, or one of them receives
    spared = fan * (math.prod(here.shape(0)) - math.prod(parts.shape(0))) * itemsize / rate
    return cut if spared > _passing(parts, here, itemsize, prices) else None


def _passing(parts: MeshLayout, here: MeshLayout, itemsize: int, prices: Prices) -> float:
    """Seconds of a gather of parts over the axes on which they are parts, of the rank that holds most."""
    axes = [a for a in parts.layout.split_axes if a not in here.layout.split_axes]
    received = math.prod(here.shape(0)) - math.prod(parts.shape(0))
    return prices.seconds("all_gather", here.mesh, axes, received * itemsize)


__all__ = ["Routes"]
