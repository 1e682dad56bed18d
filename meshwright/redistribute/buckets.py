"""Which gradients are reduced together, and in which order: pure, so that runtime and simulator use one rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20  # small, so that communication starts early
# Kind of device → the size from which a gradient is a group of its own where it can be; others: that of a bucket.
# On a CPU a copy of 2 MB takes longer than one more collective; on a GPU copies are all but free.
ALONE_BYTES = {"cpu": 2 << 20}


@dataclass(frozen=True, slots=True)
class Gradient:
    """A gradient to be added up over `axes`. `fresh`: nobody else holds the tensor, so it may be reduced in place."""

    name: str
    axes: tuple[str, ...]
    dtype: str
    size_bytes: int
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Gradients that are reduced together; `alone` for one that is reduced where it lies."""

    axes: tuple[str, ...]
    members: tuple[Gradient, ...]
    alone: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes of its gradients on the rank at the origin."""
        return sum(g.size_bytes for g in self.members)


def fill(
    pending: Sequence[Gradient], bucket_bytes: int = BUCKET_BYTES, alone_bytes: int = BUCKET_BYTES
) -> tuple[Group, ...]:
    """Groups in the order in which backward is expected to fill them: the reverse of the parameters'.

    A fresh gradient of `alone_bytes` or more is a group of its own.
    """
    return tuple(_fill(pending, bucket_bytes, alone_bytes))


def _fill(pending: Sequence[Gradient], bucket_bytes: int, alone_bytes: int) -> Iterator[Group]:
    groups: dict[tuple[tuple[str, ...], str], list[Gradient]] = {}
    made = 0
    for gradient in reversed(pending):
        if gradient.fresh and gradient.size_bytes >= alone_bytes:
            made += 1
            yield Group(gradient.axes, (gradient,), alone=True)
            continue
        key = (gradient.axes, gradient.dtype)
        group = groups.setdefault(key, [])
        group.append(gradient)
        limit = min(FIRST_BUCKET_BYTES, bucket_bytes) if made == 0 else bucket_bytes
        if sum(g.size_bytes for g in group) >= limit:
            made += 1
            yield Group(gradient.axes, tuple(groups.pop(key)))
    for (axes, _), group in groups.items():
        yield Group(axes, tuple(group))
