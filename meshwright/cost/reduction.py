"""What it costs to add up the gradients of parameters, as a price that is the sum over parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from meshwright.mesh import Mesh
from meshwright.redistribute.buckets import BUCKET_BYTES
from meshwright.redistribute.prices import Prices
from meshwright.redistribute.steps import wire_elements

Amount = TypeVar("Amount", float, np.ndarray)


def reduction_seconds(size_bytes: Amount, axes: Sequence[str], mesh: Mesh, prices: Prices) -> Amount:
    """Seconds to all-reduce gradients of `size_bytes` (one number, or an array) over some axes.

    A gradient pays its share of a full bucket of 25 MiB, latency included: ``bytes / rate + latency · bytes / 25 MiB``,
    since small gradients wait for each other and start together. Axes of size 1 cost nothing.
    """
    axes = tuple(a for a in axes if mesh.sizes[a] > 1)
    if not axes:
        return size_bytes * 0.0
    sent = wire_elements("all_reduce", mesh.count(axes), BUCKET_BYTES, BUCKET_BYTES)
    return size_bytes * (prices.seconds("all_reduce", mesh, axes, sent) / BUCKET_BYTES)
