"""Buckets of gradients, and their order. The module is pure, so runtime and simulator share one rule."""

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
# Type of device → the size from which a gradient is reduced alone, if it can be; for others the size of a bucket.
# On a CPU a copy of 2 MB takes longer than one more collective; on a GPU copies are nearly free.
ALONE_BYTES = {"cpu": 2 << 20}
LATENCY_SHARE = 0.05  # of the time of a full bucket
LEAST_BYTES, MOST_BYTES = 1 << 20, 100 << 20  # a larger bucket would leave too much for after backward


def fused_bytes(kind: str, mesh: Mesh, axes: Sequence[str], prices: Prices) -> int:
    """Return the bytes (of the full tensor) above which latency is less than a twentieth of a collective's time.

    The result is between 1 and 100 MiB, and 25 MiB for an unknown link.
    """
    as_long = latency_bytes(kind, mesh, axes, prices)
    if as_long is None:
        return BUCKET_BYTES
    return min(max(int(as_long * (1 / LATENCY_SHARE - 1)), LEAST_BYTES), MOST_BYTES)


def balanced_bytes(kind: str, mesh: Mesh, axes: Sequence[str], prices: Prices, total_bytes: int) -> int:
    """Return the bytes above which gradients of `total_bytes` would leave too much for after backward.

    Small buckets cost a latency each, and of a large one all bytes are sent when backward has ended. The sum of both is
    least at the root of `total_bytes` times the bytes sent in a latency; as latencies hide too, it is twice that. The
    result is at least 1 MiB, and all bytes for an unknown link.
    """
    as_long = latency_bytes(kind, mesh, axes, prices)
    if as_long is None:
        return max(total_bytes, LEAST_BYTES)
    return max(int(2 * math.sqrt(total_bytes * as_long)), LEAST_BYTES)


def latency_bytes(kind: str, mesh: Mesh, axes: Sequence[str], prices: Prices) -> float | None:
    """Return the bytes (of the full tensor) that take as long as a collective's latency; None for an unknown link."""
    latency, per_byte = prices.law(kind, mesh, axes)
    if not (math.isfinite(latency) and math.isfinite(per_byte) and per_byte > 0):
        return None
    members = mesh.count(axes)
    sent_share = wire_elements(kind, members, 1, 1) / (
        members if kind in ("all_gather", "reduce_scatter") else 1
    )
    return latency / (per_byte * sent_share) if sent_share else 0.0


@dataclass(frozen=True, slots=True)
class Gradient:
    """A gradient to be reduced over `axes`.

    - `fresh`: nothing else refers to the tensor, so it may be reduced in place.
    - `group`: the number of the bucket that the user put it into; -1 for none.
    - `parted`: each rank gets only its shard of the sum, by a reduce-scatter over the axes `cut`.
    - `wire`: the dtype of the reduction, if it is not its own.
    - `host`: it is in host memory.
    """

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
        """The bytes that are reduced."""
        return self.on_wire(self.size_bytes)

    def on_wire(self, size_bytes: int) -> int:
        """Return the bytes of as many elements in the dtype of the reduction."""
        return size_bytes * DTYPES[self.wire] // DTYPES[self.dtype] if self.wire else size_bytes

    @property
    def key(self) -> tuple[object, ...]:
        """The key that gradients of one bucket share."""
        return (self.axes, self.dtype, self.group, self.parted, self.cut, self.host)


# The bytes of a bucket: one number, or a function of the gradient.
BucketBytes = int | Callable[[Gradient], int]


@dataclass(frozen=True, slots=True)
class Group:
    """Gradients that are reduced together; `alone` for one that is reduced in place."""

    axes: tuple[str, ...]
    members: tuple[Gradient, ...]
    alone: bool = False

    @property
    def parted(self) -> bool:
        """True if each rank gets only its shard of the sums."""
        return self.members[0].parted

    @property
    def cut(self) -> tuple[str, ...]:
        """The axes over which the sums are scattered."""
        return self.members[0].cut

    @property
    def summed(self) -> tuple[str, ...]:
        """The axes over which a rank's shard is still to be reduced after the scatter."""
        return tuple(a for a in self.axes if a not in self.cut)

    @property
    def wire(self) -> str:
        """The dtype of the reduction, if it is not that of the gradients."""
        return self.members[0].wire

    @property
    def wire_bytes(self) -> int:
        """The bytes that are reduced on the rank at the origin."""
        return sum(g.wire_bytes for g in self.members)

    @property
    def size_bytes(self) -> int:
        """The bytes of its gradients on the rank at the origin."""
        return sum(g.size_bytes for g in self.members)


def alone_bytes(device: str) -> int:
    """Return the size from which a fresh gradient is reduced alone on a type of device."""
    return ALONE_BYTES.get(device, BUCKET_BYTES)


def fill(
    pending: Sequence[Gradient], device: str, bucket_bytes: BucketBytes = BUCKET_BYTES
) -> tuple[Group, ...]:
    """Return buckets in the order in which backward should fill them: the reverse of the parameters' order.

    A fresh gradient that is large for its type of device is reduced alone, unless the user assigned it to a bucket.
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
        if gradient.group >= 0:  # complete when the gradient of its first parameter arrives
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
