"""Layouts: they print and parse, their blocks cover a tensor, normal forms tell equal bytes, laws are kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.layout import (
    Cat,
    SubDim,
    TensorLayout,
    block,
    local_indices,
    normalize,
    normalize_dim,
    only_axes,
    verify,
    without_axes,
)
from meshwright.core.layout_text import parse_layout
from meshwright.core.mesh import Mesh
from meshwright.errors import LayoutError

MESH = Mesh.of(a=2, b=2, c=3, d=2)
NAMES = list(MESH.sizes)
ORIGIN = dict.fromkeys(NAMES, 0)


def sub_dims(axes):
    return st.builds(
        SubDim, st.integers(1, 24), st.lists(st.sampled_from(axes), unique=True, max_size=2).map(tuple)
    )


def any_dims(axes, depth=0):
    items = sub_dims(axes)
    if depth < 2:
        items |= st.lists(any_dims(axes, depth + 1), min_size=1, max_size=3).map(
            lambda parts: Cat(tuple(parts))
        )
    return st.lists(items, max_size=3).map(tuple)


TEXT_LAYOUTS = st.builds(
    TensorLayout,
    st.lists(any_dims(NAMES), max_size=3).map(tuple),
    st.lists(st.sampled_from(NAMES), unique=True).map(tuple),
    st.lists(st.sampled_from(NAMES), unique=True).map(tuple),
)


@given(TEXT_LAYOUTS)
def test_what_a_layout_prints_parses_back(layout):
    once = parse_layout(str(layout))
    assert str(once) == str(layout)
    assert parse_layout(str(once)) == once
    if all(d and d != (SubDim(1),) for d in layout.dims) and "{" not in str(layout):
        assert once == layout


@pytest.mark.parametrize(
    "text", ["[]", "[32/a]", "[(4/a 16), {32/b | 8/b | 8/b}] partial c", "[(3 32/a.b), 1] grad c.d"]
)
def test_layouts_as_a_reader_writes_them(text):
    assert str(parse_layout(text)) == text


@pytest.mark.parametrize(
    "text", ["", "32/a", "[32/a", "[(4 8]", "[x]", "[4] pending", "[4] partial", "[4] [5]", "[4/]", "[{4 | ]"]
)
def test_text_that_is_no_layout(text):
    with pytest.raises(LayoutError, match="is not a layout"):
        parse_layout(text)


@given(st.integers(1, 50), st.permutations(NAMES), st.integers(0, 4))
def test_the_blocks_of_a_sub_dim_cover_it_once(size, axes, count):
    run = tuple(axes[:count])
    ranks = {tuple(MESH.coordinate(r)[a] for a in run): MESH.coordinate(r) for r in range(MESH.size)}
    held = [local_indices((SubDim(size, run),), MESH, at) for at in ranks.values()]
    assert sorted(i for h in held for i in h) == list(range(size))


@given(st.integers(1, 50), st.permutations(NAMES), st.integers(1, 4))
def test_leaving_out_the_minor_axis_gives_the_union_of_its_blocks(size, axes, count):
    """Nested blocks: what makes a gather of the minor axis a concatenation (decision 0002)."""
    run = tuple(axes[:count])
    for rank in range(MESH.size):
        at = MESH.coordinate(rank)
        start, length = block(size, run[:-1], MESH, at)
        parts = [block(size, run, MESH, {**at, run[-1]: i}) for i in range(MESH.sizes[run[-1]])]
        assert [i for s, n in parts for i in range(s, s + n)] == list(range(start, start + length))
        assert parts[0][1] == max(n for _, n in parts)


def test_blocks_are_nested_ceilings():
    at = [MESH.coordinate(MESH.rank({**ORIGIN, "c": i})) for i in range(3)]
    assert [block(10, ("c",), MESH, x) for x in at] == [(0, 4), (4, 4), (8, 2)]
    nested = [{**ORIGIN, "a": i, "b": j} for i in range(2) for j in range(2)]
    assert [block(5, ("a", "b"), MESH, x) for x in nested] == [(0, 2), (2, 1), (3, 1), (4, 1)]


def in_order(size: int, run: str) -> TensorLayout:
    return TensorLayout(((SubDim(size, tuple(run)),),))


SPLIT_DIMS = st.lists(
    st.tuples(st.sampled_from([1, 2, 3, 4, 6, 8]), st.sampled_from(["", "a", "b", "c", "ab", "ba"])),
    min_size=1,
    max_size=3,
).map(lambda found: tuple(SubDim(n, tuple(axes)) for n, axes in found))


def legal(dim) -> bool:
    try:
        verify(TensorLayout((dim,)), MESH)
    except LayoutError:
        return False
    return True


@given(SPLIT_DIMS.filter(legal))
def test_a_normal_form_holds_the_same_indices_and_is_its_own_normal_form(dim):
    short = normalize_dim(dim, MESH)
    assert normalize_dim(short, MESH) == short
    for rank in range(MESH.size):
        at = MESH.coordinate(rank)
        assert np.array_equal(local_indices(dim, MESH, at), local_indices(short, MESH, at))


@given(SPLIT_DIMS.filter(legal), SPLIT_DIMS.filter(legal))
@settings(max_examples=300)
def test_normal_forms_of_even_products_agree_if_and_only_if_the_indices_do(left, right):
    if any(s.size % MESH.count(s.axes) for s in (*left, *right)):
        return
    same = all(
        np.array_equal(local_indices(left, MESH, at), local_indices(right, MESH, at))
        for at in map(MESH.coordinate, range(MESH.size))
    )
    size = [np.prod([s.size for s in d]) for d in (left, right)]
    normal = normalize(TensorLayout((left,)), MESH) == normalize(TensorLayout((right,)), MESH)
    assert normal == (same and size[0] == size[1])


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("[(4/a 8)]", "[32/a]"),
        ("[{8 | 8}]", "[16]"),
        ("[{8/a | 8/a}]", "[(2 8/a)]"),
        ("[(3 32/a)]", "[(3 32/a)]"),
        ("[(2/a 2/b 5)]", "[20/a.b]"),
        ("[(1 32/a 1)]", "[32/a]"),
        ("[{8/a | {4 | 4}}]", "[{8/a | 8}]"),
        ("[(4/c 6)]", "[(4/c 6)]"),
        ("[(2:1+1/a 5)]", "[(2:1+1/a 5)]"),  # groups stay: blocks end between them alone
        ("[(2/a 5:2+3/b)]", "[(2/a 5:2+3/b)]"),
    ],
)
def test_known_normal_forms(text, short):
    assert str(normalize(parse_layout(text), MESH)) == short


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[8/a, 8/a]", "uses axis 'a' twice, in dims 0 and 1"),
        ("[(8/a 8/a)]", "an axis twice in dim 0"),
        ("[{8/a | 8/a} ]", None),
        ("[(8/a {8/a | 8})]", "an axis twice in dim 0"),
        ("[8/z]", "names the axis 'z'"),
        ("[8/a] partial a", "both split and partial on axis 'a'"),
        ("[8] partial a grad a", "forward and backward"),
        ("[2/c]", "splits 2 elements of dim 0 into 3 blocks"),
        ("[8] partial z", "is partial on 'z'"),
    ],
)
def test_laws(text, says):
    layout = parse_layout(text)
    if says is None:
        assert verify(layout, MESH) == layout
    else:
        with pytest.raises(LayoutError, match=says):
            verify(layout, MESH)


def test_views_of_a_layout():
    layout = parse_layout("[(4/a 16/b), {32/c | 8/c}] partial d")
    assert layout.shape == (64, 40)
    assert layout.split_axes == ("a", "b", "c")
    assert str(only_axes(layout, "ad")) == "[(4/a 16), {32 | 8}] partial d"
    assert without_axes(layout.dims[0], "a") == (SubDim(4), SubDim(16, ("b",)))
    assert str(parse_layout("[8] grad a").backward) == "[8] partial a"
    assert layout.local_shape(MESH, ORIGIN) == (16, 14)


def test_a_grouped_query_projection_keeps_heads_of_each_part_together():
    layout = parse_layout("[{8/a | 4/a | 4/a}]")
    assert layout.indices(MESH, {**ORIGIN, "a": 1})[0].tolist() == [4, 5, 6, 7, 10, 11, 14, 15]


def test_shards_of_the_reference_systems_layout_example():
    """``Layout((2, 2, 2), ("dp", "sp", "mp"))``, x as ("mp", ("sp", "dp")), w as (("sp", "dp"), "None")."""
    mesh = Mesh.of(dp=2, sp=2, mp=2)
    x, w = parse_layout("[32/mp, 784/sp.dp]"), parse_layout("[784/sp.dp, 512]")
    expected = {  # rank: x rows, x columns = w rows
        0: ((0, 16), (0, 196)),
        1: ((16, 32), (0, 196)),
        2: ((0, 16), (392, 588)),
        3: ((16, 32), (392, 588)),
        4: ((0, 16), (196, 392)),
        5: ((16, 32), (196, 392)),
        6: ((0, 16), (588, 784)),
        7: ((16, 32), (588, 784)),
    }
    for rank, (rows, columns) in expected.items():
        got = x.indices(mesh, mesh.coordinate(rank))
        assert [(int(i[0]), int(i[-1]) + 1) for i in got] == [rows, columns]
        assert w.indices(mesh, mesh.coordinate(rank))[0].tolist() == list(range(*columns))
