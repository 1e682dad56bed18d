"""Prices of many pairs at once are the prices of the steps that each pair takes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.collectives import COLLECTIVES
from meshwright.core.layout import verify
from meshwright.core.mesh import Axis, Mesh
from meshwright.errors import LayoutError
from meshwright.redistribute import Prices, redistribute, total_seconds
from meshwright.redistribute.price_matrix import PARTIAL, REPLICATED, Table, Value
from meshwright.redistribute.steps import largest_size

LINKS = Prices.of({
    "all_reduce": {"slow": (7e-6, 1e9), "*": (1e-6, 9e9)},
    "reduce_scatter": {"slow": (3e-6, 1e9), "*": (1e-6, 5e9)},
    "all_gather": {"slow": (2e-6, 1.3e9), "*": (1e-6, 7e9)},
    "all_to_all": {"slow": (2e-6, 0.7e9), "*": (3e-6, 4e9)},
})  # fmt: skip
BYTES_ONLY = Prices.ring(0.0, 1e9)
GLOO_LIKE = Prices.of({
    "all_reduce": {"*": (1e-8, 1e9)},
    "reduce_scatter": {"*": (4e-8, 2e8)},
    "all_gather": {"*": (1e-8, 1e9)},
    "all_to_all": {"*": (1e-8, 1e9)},
}, growth="tree")  # fmt: skip
TABLES = [LINKS, BYTES_ONLY, GLOO_LIKE, LINKS.without("all_to_all"), LINKS.without("reduce_scatter")]


@st.composite
def meshes(draw) -> Mesh:
    sizes = draw(st.lists(st.sampled_from([2, 2, 3, 1]), min_size=2, max_size=5))
    slow = draw(st.integers(0, len(sizes)))
    axes = [Axis(f"a{i}", n, "slow" if i < slow else "fast") for i, n in enumerate(sizes)]
    return Mesh(tuple(axes), tuple((a.name, (a.name,)) for a in axes))


PLAIN = [((24,),), ((17,),), ((8,),), ((4, 12),)]
JOINED = [((8,), (5,), (5,)), ((4, 6), (3, 8))]


@st.composite
def values(draw) -> Value:
    """One to three items, one of them perhaps a concatenation, a place for each plain leaf and each column of a
    concatenation."""
    items = draw(st.lists(st.sampled_from(PLAIN), min_size=1, max_size=2))
    if draw(st.booleans()):
        items.insert(draw(st.integers(0, len(items))), draw(st.sampled_from(JOINED)))
    places, leaf = [], 0
    for item in items:
        for column in range(len(item[0])):
            places.append(tuple(leaf + column + p * len(item[0]) for p in range(len(item))))
        leaf += sum(map(len, item))
    return Value(tuple(items), tuple(places), draw(st.sampled_from([1, 4])))


@st.composite
def codes(draw, value: Value, mesh: Mesh) -> np.ndarray:
    """One to four lawful rows; one that is not lawful is made whole."""
    code = st.integers(0, 1 + len(value.places))
    rows = draw(st.lists(st.tuples(*[code] * len(mesh.axes)), min_size=1, max_size=4))
    return np.array(
        [row if lawful(value, row, mesh) else [REPLICATED] * len(row) for row in rows], dtype=np.int8
    )


def lawful(value: Value, row: tuple[int, ...], mesh: Mesh) -> bool:
    try:
        verify(value.layout(row, mesh), mesh)
    except LayoutError:
        return False
    return True


@st.composite
def problems(draw) -> tuple[Mesh, Value, np.ndarray, np.ndarray]:
    mesh, value = draw(meshes()), draw(values())
    return mesh, value, draw(codes(value, mesh)), draw(codes(value, mesh))


@given(problems(), st.sampled_from(TABLES))
@settings(max_examples=300, deadline=None)
def test_every_price_is_that_of_the_steps_taken(problem, prices):
    mesh, value, src, dst = problem
    seconds = Table(mesh, prices).seconds(value, src, dst)
    assert seconds.shape == (len(src), len(dst))
    for (i, a), (j, b) in itertools.product(enumerate(src), enumerate(dst)):
        ends = value.layout(a, mesh), value.layout(b, mesh)
        steps = redistribute(*ends, mesh, value.itemsize, prices)
        truth = total_seconds(steps, mesh, value.itemsize, prices)
        assert seconds[i, j] == pytest.approx(truth, rel=1e-9), (str(ends[0]), str(ends[1]), steps)


@given(problems())
@settings(max_examples=100, deadline=None)
def test_local_elements_are_those_of_the_layout(problem):
    mesh, value, src, _ = problem
    held = Table(mesh, LINKS).local_elements(value, src)
    assert held.tolist() == [largest_size(value.layout(row, mesh), mesh) for row in src]


@given(meshes(), st.sampled_from(TABLES))
@settings(max_examples=50, deadline=None)
def test_a_table_of_collectives_says_what_prices_say(mesh, prices):
    table = Table(mesh, prices)
    for kind in COLLECTIVES:
        sets = np.arange(1 << len(mesh.axes))
        got = table.collective(kind, sets, np.full(len(sets), 1e6))
        for mask, seconds in zip(sets.tolist(), got.tolist(), strict=True):
            axes = [a.name for i, a in enumerate(mesh.axes) if mask >> i & 1]
            if mesh.count(axes) > 1:
                assert seconds == pytest.approx(prices.seconds(kind, mesh, axes, 1e6), rel=1e-12)


def test_places_that_share_leaves_or_cut_a_part_are_priced_one_by_one():
    mesh = Mesh.of(a=2, b=3)
    value = Value((((12,), (6,), (6,)), ((8,),)), ((0, 1, 2), (0,), (3,)), 4)
    assert not value.is_plain
    rows = [(REPLICATED, REPLICATED), (2, REPLICATED), (3, 4), (REPLICATED, 3), (PARTIAL, 2), (2, 2)]
    seconds = Table(mesh, LINKS).seconds(value, np.array(rows, np.int8), np.array(rows, np.int8))
    for (i, a), (j, b) in itertools.product(enumerate(rows), repeat=2):
        steps = redistribute(value.layout(a, mesh), value.layout(b, mesh), mesh, 4, LINKS)
        assert seconds[i, j] == pytest.approx(total_seconds(steps, mesh, 4, LINKS), rel=1e-12)
        assert (seconds[i, j] == 0) == (i == j or not steps or all(s.kind not in COLLECTIVES for s in steps))


def test_forty_thousand_pairs_are_priced_in_one_call():
    mesh = Mesh.of(x=1024)
    runs = {tuple([x] * n + [y] * (10 - n)) for n in range(11) for x in range(5) for y in range(5)}
    codes = np.array(sorted(runs), dtype=np.int8)
    value = Value((((4096,),), ((4096,),), ((4096,),)), ((0,), (1,), (2,)), 2)
    table = Table(mesh, LINKS)
    seconds = table.seconds(value, codes, codes)
    assert len(codes) == 185
    assert (np.diag(seconds) == 0).all()


@given(st.data(), st.sampled_from(TABLES))
@settings(max_examples=150, deadline=None)
def test_prices_of_many_values_in_one_call_are_those_of_each(data, prices):
    mesh = data.draw(meshes())
    kinds = data.draw(st.lists(values(), min_size=1, max_size=5))
    asked = [(value, data.draw(codes(value, mesh))) for value in (*kinds, Value((((1,),),), (), 4))]
    table = Table(mesh, prices)
    for (value, rows), seconds in zip(asked, table.among(asked), strict=True):
        assert np.array_equal(seconds, table.seconds(value, rows, rows)), value
