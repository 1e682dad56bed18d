"""Which shards of a weight are one piece of its memory."""

from __future__ import annotations

import pytest

from meshwright.core.layout_text import parse_layout
from meshwright.core.mesh import Mesh
from meshwright.partition.sharded_update import is_stretch
from meshwright.redistribute import Step
from meshwright.redistribute.index_maps import exchange


@pytest.mark.parametrize(
    ("full", "part", "expected"),
    [
        ("[4, 6]", "[4/dp, 6]", True),
        ("[4, 6]", "[4, 6/dp]", False),
        ("[1, 6]", "[1, 6/dp]", True),
        ("[2, 6]", "[2/dp, 6/tp]", True),  # part of one row
        ("[4, 6]", "[4/dp, 6/tp]", False),
        ("[(2 2), 6]", "[(2 2/dp), 6]", False),  # two rows that are apart
    ],
)
def test_a_stretch_is_one_block_of_memory(full: str, part: str, expected: bool) -> None:
    mesh = Mesh.of(dp=2, tp=2)
    whole, shard = parse_layout(full), parse_layout(part)
    share = exchange(Step("slice", shard.split_axes, whole, shard), mesh, 0)
    assert is_stretch(share.send[0]) is expected
