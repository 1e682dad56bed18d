"""Which gradients are reduced together, and in which order: pure, so that runtime and simulator use one rule."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from meshwright.core.graph import DTYPES
from meshwright.core.mesh import Mesh
from meshwright.redistribute.prices import Prices
from meshwright.redistribute.steps import wire_elements

BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20  # small, so that communication starts early
# Kind of device → the size from which a gradient is a group of its own where it can be; others: that of a bucket.
# On a CPU a copy of 2 MB takes longer than one more collective; on a GPU copies are all but free.
ALONE_BYTES = {"cpu": 2 << 20}
LATENCY_SHARE = 0.05  # of the time of a bucket that is large enough
LEAST_BYTES, MOST_BYTES = 1 << 20, 100 << 20  # a larger bucket would leave too much for after backward


def fused_bytes(kind: str, mesh: Mesh, axes: Sequence[str], prices: Prices) -> int:
    """The bytes (of the whole tensor) from which a collective's latency is less than a twentieth of its time; between
    1 and 100 MiB, and 25 MiB where the link is not known."""
    latency, per_byte = prices.law(kind, mesh, axes)
    if not (math.isfinite(latency) and math.isfinite(per_byte) and per_byte > 0):
        return BUCKET_BYTES
    members = mesh.count(axes)
    sent_share = wire_elements(kind, members, 1, 1) / (
        members if kind in ("all_gather", "reduce_scatter") else 1
    )
    enough = latency * (1 / LATENCY_SHARE - 1) / (per_byte * sent_share) if sent_share else 0.0
    return min(max(int(enough), LEAST_BYTES), MOST_BYTES)


@dataclass(frozen=True, slots=True)
class Gradient:
    """A gradient to be added up over `axes`. `fresh`: nobody else holds the tensor, so it may be reduced in place.
    `group`: the number of the bucket that the user put it into, -1 where there is none. `parted`: every rank gets its
    own part of the sum alone, over the axes of `cut` by a reduce-scatter. `wire`: the dtype it is added up in, where
    that is not its own. `host`: it lives in the host's memory."""

    name: str
    axes: tuple[str, ...]
    dtype: str
    size_bytes: int
    fresh: bool = False
    group: int = -1
    parted: bool = False
    cut: tuple[str, ...] = ()
    wire: str = ""
    host: bool = False

    @property
    def wire_bytes(self) -> int:
        """Bytes of what is added up."""
        return self.on_wire(self.size_bytes)

    def on_wire(self, size_bytes: int) -> int:
        """As many elements in the dtype in which they are added up."""
        return size_bytes * DTYPES[self.wire] // DTYPES[self.dtype] if self.wire else size_bytes

    @property
    def key(self) -> tuple[object, ...]:
        """What gradients of one group have in common."""
        return (self.axes, self.dtype, self.group, self.parted, self.cut, self.host)


# The bytes of a bucket: one number, or by what is to go into it.
BucketBytes = int | Callable[[Gradient], int]


@dataclass(frozen=True, slots=True)
class Group:
    """Gradients that are reduced together; `alone` for one that is reduced where it lies."""

    axes: tuple[str, ...]
    members: tuple[Gradient, ...]
    alone: bool = False

    @property
    def parted(self) -> bool:
        """True if each rank gets its part of the sums alone."""
        return self.members[0].parted

    @property
    def cut(self) -> tuple[str, ...]:
        """The axes over which parts of the sums are scattered."""
        return self.members[0].cut

    @property
    def summed(self) -> tuple[str, ...]:
        """The axes over which a rank's part still has to be added up, after it was scattered."""
        return tuple(a for a in self.axes if a not in self.cut)

    @property
    def wire(self) -> str:
        """The dtype in which its gradients are added up, where that is not their own."""
        return self.members[0].wire

    @property
    def wire_bytes(self) -> int:
        """Bytes of what is added up on the rank at the origin."""
        return sum(g.wire_bytes for g in self.members)

    @property
    def size_bytes(self) -> int:
        """Bytes of its gradients on the rank at the origin."""
        return sum(g.size_bytes for g in self.members)


def alone_bytes(device: str) -> int:
    """The size from which a fresh gradient is a group of its own on a type of device."""
    return ALONE_BYTES.get(device, BUCKET_BYTES)


def fill(
    pending: Sequence[Gradient], device: str, bucket_bytes: BucketBytes = BUCKET_BYTES
) -> tuple[Group, ...]:
    """Groups in the order in which backward is expected to fill them: the reverse of the parameters'.

    A fresh gradient that is large for its type of device is a group of its own, unless the user has put it into one.
    """
    return tuple(_fill(pending, device, bucket_bytes))


def _fill(pending: Sequence[Gradient], device: str, bucket_bytes: BucketBytes) -> Iterator[Group]:
    groups: dict[tuple[object, ...], list[Gradient]] = {}
    held: dict[tuple[object, ...], int] = {}  # bytes in each
    wanted = Counter(g.key for g in pending if g.group >= 0)
    made = 0
    for gradient in reversed(pending):
        alone = alone_bytes("cpu" if gradient.host else device)
        if gradient.group < 0 and gradient.fresh and gradient.size_bytes >= alone:
            made += 1
            yield Group(gradient.axes, (gradient,), alone=True)
            continue
        key = gradient.key
        group = groups.setdefault(key, [])
        group.append(gradient)
        held[key] = held.get(key, 0) + gradient.size_bytes
        if gradient.group >= 0:  # complete when the first of the program has come
            full = len(group) == wanted[key]
        else:
            limit = bucket_bytes if isinstance(bucket_bytes, int) else bucket_bytes(gradient)
            limit = min(FIRST_BUCKET_BYTES, limit) if made == 0 else limit
            full = held[key] >= limit
        if full:
            made += 1
            held[key] = 0
            yield Group(gradient.axes, tuple(groups.pop(key)))
    for group in groups.values():
        yield Group(group[0].axes, tuple(group))
