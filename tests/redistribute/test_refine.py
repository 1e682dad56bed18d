"""Two ways to write a dim, over common sub-dims."""

from __future__ import annotations

import pytest

from meshwright.core.layout_text import parse_layout
from meshwright.core.mesh import Mesh
from meshwright.redistribute.refine import common_refinement

MESH = Mesh.of(a=2, b=2, c=3)


@pytest.mark.parametrize(
    ("left", "right", "refined"),
    [
        ("24/a", "24/b", ("24/a", "24/b")),
        ("(4/a 8)", "32/a", ("(4/a 8)", "(4/a 8)")),
        ("24", "(4 6/c)", ("(4 6)", "(4 6/c)")),
        ("(4 6/c)", "24", ("(4 6/c)", "(4 6)")),
        ("32/a.b", "(2/b 16)", ("(2/a 16/b)", "(2/b 16)")),  # between two axes
        ("24/a.c", "(3/c 8)", None),  # within a block
        ("(4/a 6)", "(6/a 4)", None),
        ("(3 32/a)", "96/a", None),
        ("{6/a | 6/a}", "{6 | 6/c}", ("{6/a | 6/a}", "{6 | 6/c}")),
        ("{6/a | 6/a}", "{4/a | 8/a}", None),
        ("{4/a | 8/a}", "12", ("{4/a | 8/a}", "{4 | 8}")),
        ("12", "{4/a | 8/a}", ("{4 | 8}", "{4/a | 8/a}")),
        ("{4/a | 8/a}", "12/a", None),
        ("(2/a {4 | 8})", "24", ("(2/a 12)", "(2 12)")),  # what nobody splits is one sub-dim
    ],
)
def test_common_sub_dims(left: str, right: str, refined: tuple[str, str] | None) -> None:
    one, other = (parse_layout(f"[{text}]").dims[0] for text in (left, right))
    expected = refined and tuple(parse_layout(f"[{text}]").dims[0] for text in refined)
    assert common_refinement(one, other, MESH) == expected
