"""The price of reducing gradients over ranks, as a sum over parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from meshwright.core.collectives import COLLECTIVES
from meshwright.core.mesh import Mesh
from meshwright.redistribute.prices import Prices

Amount = TypeVar("Amount", float, np.ndarray)


def reduction_seconds(
    size_bytes: Amount,
    axes: Sequence[str],
    mesh: Mesh,
    prices: Prices,
    bucket_bytes: int,
    kind: str = "all_reduce",
) -> Amount:
    """Return the seconds to all-reduce gradients of `size_bytes` (a number or an array) over some axes.

    `kind` may also be a reduce-scatter of as many bytes, or an all-gather of weights that have as many bytes together.
    A gradient pays its share of a full bucket, with latency: ``bytes / rate + latency · bytes / bucket``, since small
    gradients wait for each other and start together. Without buckets (0) each pays the full latency. Axes of size 1
    cost nothing.
    """
    axes = tuple(a for a in axes if mesh.sizes[a] > 1)
    if not axes:
        return size_bytes * 0.0
    members = mesh.count(axes)
    sums = COLLECTIVES[kind]
    share = sums.sent(members, 1.0 if sums.adds else 1 / members, 1 / members if sums.splits else 1.0)
    if not bucket_bytes:
        latency, per_byte = prices.law(kind, mesh, axes)
        return latency + size_bytes * (share * per_byte)
    return size_bytes * (prices.seconds(kind, mesh, axes, share * bucket_bytes) / bucket_bytes)
