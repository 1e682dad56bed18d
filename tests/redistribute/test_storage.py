"""Where a replicated tensor is sharded so that each rank stores a part of it."""

from __future__ import annotations

import pytest

from meshwright.core.layout_text import parse_layout
from meshwright.core.mesh import Mesh
from meshwright.redistribute.storage import stored

MESH = Mesh.of(a=2, b=3)


@pytest.mark.parametrize(
    ("use", "axes", "parts"),
    [
        ("[8, 12]", "a", "[8/a, 12]"),
        ("[9, 12]", "a", "[9, 12/a]"),  # only the second divides
        ("[9, 15]", "a", "[9, 15/a]"),  # neither does: 9 × 8 elements are fewer than 5 × 15
        ("[1, 8]", "a", "[1, 8/a]"),
        ("[{4 | 4}, 4]", "a", "[{4/a | 4/a}, 4]"),
        ("[{4 | 1}, 4]", "a", "[{4 | 1}, 4/a]"),
        ("[12/b, 4]", "a", "[12/b.a, 4]"),
        ("[12] grad a", "ab", "[12/b.a]"),  # sliced over the one, then scattered over the other
        ("[12] grad a", "b", "[12/b] grad a"),
        ("[2, 3]", "ab", "[2/a, 3/b]"),  # no dim has six elements
        ("[2]", "ab", "[2/a]"),  # nor three
    ],
)
def test_what_is_sharded(use: str, axes: str, parts: str) -> None:
    assert stored(parse_layout(use), axes, MESH) == parse_layout(parts)
