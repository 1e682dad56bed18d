"""What a plan tells its user of ranks that have unequal work."""

from __future__ import annotations

import pytest

import meshwright as mw
from meshwright.core.layout import SubDim, local_size
from meshwright.examples import mlp
from meshwright.search.remarks import _holders


@pytest.mark.parametrize(
    ("batch", "ranks", "said"),
    [
        (8, 7, "7 ranks (ranks) share 8 unevenly in enter, up.0, down.0, leave: "
               "the largest block is 2, 1.75 times the mean of 1.14, and 3 have none"),
        (12, 8, "the largest block is 2, 1.33 times the mean of 1.50; a size that 8 divides is even"),
        (12, 5, "the largest block is 3, 1.25 times the mean of 2.40, and 1 has none"),
        (12, 4, ""),
    ],
)  # fmt: skip
def test_a_cut_that_leaves_ranks_with_unequal_work_is_noted_with_its_numbers(batch, ranks, said):
    model, example, loss = mlp.build(depth=1, batch=batch)
    notes = mw.plan(model, example, loss=loss, mesh=ranks).notes
    assert len(notes) == (1 if said else 0)
    assert said in "".join(notes)


def test_a_little_more_than_the_mean_is_not_worth_a_note():
    model, example, loss = mlp.build(depth=1, batch=101)
    assert mw.plan(model, example, loss=loss, mesh=2).notes == ()  # 51 of 50.5


@pytest.mark.parametrize("size", range(1, 14))
def test_blocks_with_elements_are_counted_as_they_are_cut(size):
    mesh = mw.Mesh.of(ranks=12)
    dim = (SubDim(size, tuple(a.name for a in mesh.axes)),)
    assert _holders(dim, mesh) == sum(local_size(dim, mesh, mesh.coordinate(r)) > 0 for r in range(12))
