"""From a layout on one mesh to one on another: every rank receives what it holds, each element of it once."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from meshwright.core.layout import Cat, TensorLayout
from meshwright.core.layout_text import parse_layout
from meshwright.core.mesh import Mesh
from meshwright.redistribute.across_meshes import MeshLayout, Route, arriving, leaving, received_elements
from meshwright.redistribute.storage import repeated_axes, stored
from tests.redistribute.test_redistribute import problems


def part(laid: MeshLayout, numbers: np.ndarray, rank: int) -> np.ndarray:
    held = laid.layout.indices(laid.mesh, laid.at(rank))
    return numbers[np.ix_(*held)] if held else numbers


def check(source: MeshLayout, to: MeshLayout) -> None:
    numbers = np.arange(np.prod(source.layout.shape, dtype=int)).reshape(source.layout.shape)
    sent = {(s, r): piece for s in range(source.ranks) for r, piece in leaving(source, to, s)}
    parted = all(not isinstance(item, Cat) for dim in source.layout.dims for item in dim)
    for rank in range(to.ranks):
        expected = part(to, numbers, rank)
        assert to.shape(rank) == expected.shape
        found, times = np.full(expected.shape, -1), np.zeros(expected.shape, dtype=int)
        for sender, piece in arriving(source, to, rank):
            taken = sent.pop((sender, rank))
            message = part(source, numbers, sender)[np.ix_(*map(taken.index, range(len(taken.of))))]
            assert message.shape == taken.shape == piece.shape and message.size
            where = np.ix_(*map(piece.index, range(len(piece.of))))
            found[where] = message
            times[where] += 1
        np.testing.assert_array_equal(found, expected)
        if parted:  # a concatenation may have a part that all blocks repeat
            assert (times == 1).all() and received_elements(source, to, rank) == expected.size
    assert not sent


@given(problems())
def test_a_rank_receives_what_it_holds(problem: tuple[Mesh, TensorLayout, TensorLayout]) -> None:
    mesh, one, other = problem
    check(MeshLayout(TensorLayout(one.dims), mesh), MeshLayout(TensorLayout(other.dims), mesh))


MESHES = {"a": Mesh.of(dp=4), "b": Mesh.of(dp=2, tp=3), "c": Mesh.of(ranks=1), "d": Mesh.of(tp=2, dp=2)}
LAID = [
    ("a", "[12/dp0.dp1, 6]"),
    ("a", "[12, 6/dp1.dp0]"),
    ("b", "[12/dp, 6/tp]"),
    ("b", "[12/tp.dp, 6]"),
    ("b", "[12, 6]"),
    ("c", "[12, 6]"),
    ("d", "[(3 4/tp), 6/dp]"),
    ("d", "[{8/tp | 4}, 6]"),
    ("d", "[12, 6/dp]"),
]


@pytest.mark.parametrize("to", LAID, ids=str)
@pytest.mark.parametrize("source", LAID, ids=str)
def test_meshes_may_differ_in_shape_and_size(source: tuple[str, str], to: tuple[str, str]) -> None:
    one, other = (MeshLayout(parse_layout(text), MESHES[mesh]) for mesh, text in (source, to))
    check(one, other)


def test_micro_batches_are_parts_of_their_own() -> None:
    one = Mesh.of(dp=2).in_time(2)
    other = Mesh.of(tp=2).in_time(2)
    for m in range(2):
        check(
            MeshLayout(parse_layout("[8/time.dp, 6]"), one, m),
            MeshLayout(parse_layout("[8/time, 6/tp]"), other, m),
        )


def test_copies_share_the_sending() -> None:
    """Four ranks hold the whole: each sends a quarter of what four others hold in parts."""
    whole, split = (
        MeshLayout(parse_layout("[8, 4]"), Mesh.of(tp=4)),
        MeshLayout(parse_layout("[8/dp0.dp1, 4]"), Mesh.of(dp=4)),
    )
    assert [[r for r, _ in leaving(whole, split, s)] for s in range(4)] == [[0], [1], [2], [3]]


def test_ranks_of_equal_number_talk_where_both_hold_the_same() -> None:
    laid = MeshLayout(parse_layout("[8/tp, 4]"), Mesh.of(dp=2, tp=2))
    assert [[r for r, _ in leaving(laid, laid, s)] for s in range(4)] == [[0], [1], [2], [3]]


@pytest.mark.parametrize("to", LAID, ids=str)
@pytest.mark.parametrize("source", LAID, ids=str)
def test_what_ranks_pass_on_to_one_another_crosses_once(source: tuple[str, str], to: tuple[str, str]) -> None:
    there, here = (MeshLayout(parse_layout(text), MESHES[mesh]) for mesh, text in (source, to))
    axes = repeated_axes(here.layout, here.mesh)
    parts = replace(here, layout=stored(here.layout, axes, here.mesh))
    route = Route(there, here, parts)
    check(there, parts)
    check(parts, here)
    crossed = sum(received_elements(there, parts, rank) for rank in range(here.ranks))
    if "|" not in source[1] + to[1]:  # a concatenation may have a part that all blocks repeat
        assert crossed == math.prod(here.layout.shape) and route.crossing() <= Route(there, here).crossing()
    started = sum(map(route.sends, range(there.ranks))) + sum(map(route.receives, range(here.ranks)))
    everybody = [(r, s) for r in range(here.ranks) for s, _ in arriving(parts, here, r) if s != r]
    assert started == 2 * (sum(len(arriving(there, parts, r)) for r in range(here.ranks)) + len(everybody))
