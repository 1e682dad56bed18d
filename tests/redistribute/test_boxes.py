"""Boxes: what ranks hold of a tensor as rectangles, and that of all who hold an element one writes it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwright.checkpoint import ownership as share
from meshwright.core.layout import TensorLayout
from meshwright.core.layout_text import parse_layout
from meshwright.core.mesh import Mesh
from meshwright.redistribute.boxes import Box, full_box, held_boxes
from tests.redistribute.test_redistribute import problems


def forward(layout: TensorLayout) -> TensorLayout:
    return TensorLayout(layout.dims)


@given(problems())
def test_boxes_are_what_a_rank_holds(problem: tuple[Mesh, TensorLayout, TensorLayout]) -> None:
    mesh, layout, _ = problem
    layout = forward(layout)
    numbers = np.arange(np.prod(layout.shape, dtype=int)).reshape(layout.shape)
    for rank in range(mesh.size):
        at = mesh.coordinate(rank)
        mine = numbers[np.ix_(*layout.indices(mesh, at))] if layout.dims else numbers
        found = np.full(layout.local_shape(mesh, at), -1)
        for held in held_boxes(layout, mesh, rank):
            here = held.here.within(full_box(found.shape))
            assert (found[here] == -1).all()
            found[here] = numbers[held.box.within(full_box(layout.shape))]
        np.testing.assert_array_equal(found, mine)


@given(problems(), st.sampled_from([1, 2, 3]), st.sampled_from([1, 8, 64]))
def test_each_element_is_written_by_one_rank(
    problem: tuple[Mesh, TensorLayout, TensorLayout], places: int, shared: int
) -> None:
    mesh, layout, _ = problem
    layout = forward(layout)
    written = np.zeros(layout.shape, dtype=int)
    before = share.SHARED_BYTES, share.PART_BYTES
    share.SHARED_BYTES, share.PART_BYTES = shared, 2 * shared
    try:
        for rank in range(mesh.size):
            for place in range(places):
                for piece in share.own_pieces("w", layout, 4, mesh, rank, place, tuple(range(places))):
                    assert piece.box.shape == piece.here.shape
                    written[piece.box.within(full_box(layout.shape))] += 1
    finally:
        share.SHARED_BYTES, share.PART_BYTES = before
    assert (written == 1).all()


def test_a_fused_weight_is_a_box_for_each_of_its_parts() -> None:
    mesh = Mesh.of(dp=2, tp=2)
    boxes = [h.box for h in held_boxes(parse_layout("[(3 8/tp), 4]"), mesh, mesh.rank({"dp": 1, "tp": 1}))]
    assert boxes == [Box((4, 0), (4, 4)), Box((12, 0), (4, 4)), Box((20, 0), (4, 4))]


def test_replicas_share_the_work() -> None:
    """Eight ranks that hold the same two megabytes write a megabyte each, two of them; and many small tensors are
    spread evenly."""
    mesh, layout = Mesh.of(dp=8), TensorLayout.replicated((1024, 512))
    sizes = [sum(p.box.numel for p in share.own_pieces("w", layout, 4, mesh, r)) * 4 for r in range(8)]
    assert sorted(sizes) == [0] * 6 + [1 << 20] * 2
    small = TensorLayout.replicated((16,))
    counts = [sum(len([*share.own_pieces(f"w{n}", small, 4, mesh, r)]) for n in range(800)) for r in range(8)]
    assert sum(counts) == 800
    assert min(counts) > 60


def test_groups_of_unequal_sizes_are_boxes_of_their_own() -> None:
    mesh, layout = Mesh.of(tp=2), parse_layout("[(2 16:3+10+1+2/tp), 4]")
    boxes = [[h.box for h in held_boxes(layout, mesh, rank)] for rank in range(2)]
    assert boxes == [
        [Box((0, 0), (13, 4)), Box((16, 0), (13, 4))],
        [Box((13, 0), (3, 4)), Box((29, 0), (3, 4))],
    ]
