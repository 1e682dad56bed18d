"""How large buckets are, and what the first of them waits for."""

from __future__ import annotations

import pytest

from meshwright.core.mesh import Mesh
from meshwright.partition.buckets import LATENCY_SHARE, Gradient, fill, fused_bytes
from meshwright.redistribute import Prices

MIB = 1 << 20
MESH = Mesh.of(dp=4)
DP = MESH.resolve("dp")


def test_only_the_first_bucket_is_small() -> None:
    pending = [Gradient(name, ("dp",), "f32", MIB, False) for name in "abcdef"]
    groups = fill(pending, "cpu", bucket_bytes=2 * MIB)
    assert [[g.name for g in group.members] for group in groups] == [["f"], ["e", "d"], ["c", "b"], ["a"]]


def test_latency_is_a_twentieth_of_the_time_of_a_full_bucket() -> None:
    prices = Prices.ring(1e-4, 1e10)
    size = fused_bytes("all_reduce", MESH, DP, prices)
    latency, seconds = (prices.seconds("all_reduce", MESH, DP, n) for n in (0, 2 * size * 3 / 4))
    assert latency / seconds == pytest.approx(LATENCY_SHARE, rel=1e-6)


@pytest.mark.parametrize(
    ("prices", "size_bytes"),
    [
        (Prices.ring(0.0, 1e10), MIB),
        (Prices.ring(1.0, 1e10), 100 * MIB),
        (Prices.ring(1.0, 1e10).without("all_reduce"), 25 * MIB),
    ],
    ids=("no latency", "much", "unknown"),
)
def test_a_bucket_is_neither_tiny_nor_huge(prices: Prices, size_bytes: int) -> None:
    assert fused_bytes("all_reduce", MESH, DP, prices) == size_bytes
