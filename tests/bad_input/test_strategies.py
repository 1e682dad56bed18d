"""Cuts that cannot be: numbers of blocks, entries, layouts, and dims that must stay whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.errors import LayoutError, StrategyError
from tests.bad_input.wrong import LAYOUT, Case, check_told, matmul, net

HERE = Path(__file__).name


CASES = {
    # ---- numbers of blocks
    "zero": Case(
        lambda: mw.shard(torch.matmul, ((0, 4), (4, 1))), StrategyError,
        "in_strategy of matmul has 0", "at least one block", "1 leaves a dim unsplit", HERE,
    ),
    "negative": Case(
        lambda: mw.shard(torch.matmul, ((2, -4), (4, 1))), StrategyError,
        "in_strategy of matmul has -4", "at least one block", "1 leaves", HERE,
    ),
    "negative in the output": Case(
        lambda: mw.shard(torch.matmul, ((2, 4), (4, 1)), ((-2, 1),)), StrategyError,
        "out_strategy of matmul has -2", "at least one block", "1 leaves", HERE,
    ),
    "not whole": Case(
        lambda: mw.shard(torch.matmul, ((2.0, 4), (4, 1))), StrategyError,
        "has 2.0, which is not a whole number", "counts the blocks", "1, 2, 3", HERE,
    ),
    "a bool": Case(
        lambda: mw.reshard(torch.ones(2), (True,)), StrategyError,
        "mw.reshard has True", "counts the blocks", "1, 2, 3", HERE,
    ),
    "no tuple": Case(
        lambda: mw.shard(torch.matmul, "24"), StrategyError,
        "must be a tuple with one entry for each tensor", "got '24'", "((2, 4), (4, 1))", HERE,
    ),
    "a product over the ranks": Case(
        lambda: matmul((4, 4), (4, 1)), StrategyError,
        "in_strategy of matmul needs 16 ranks, there are 8", "4 · 4 = 16 blocks of %batch_x: f32[8, 8]", "fewer splits",
        "mw.shard(torch.matmul",
    ),
    "an output over the ranks": Case(
        lambda: matmul((1, 1), (1, 1), out=((4, 4),)), StrategyError,
        "out_strategy of matmul needs 16 ranks", "4 · 4 = 16", "fewer splits", "mw.shard(torch.matmul",
    ),
    "operands together over the ranks": Case(
        lambda: matmul((2, 4), (4, 2)), StrategyError,
        "splits dim 1 of %w: f32[8, 8] into 2 blocks, which 8 ranks cannot do", "other dims use 8", "one of 1",
        "mw.shard(torch.matmul",
    ),
    "no axes multiply to it": Case(
        lambda: matmul((4, 1), (1, 1), mesh=6), StrategyError,
        "into 4 blocks, which 6 ranks cannot do", "ranks=6 is 3 × 2, and no part of that is 4", "one of 1, 2, 3, 6",
        "mw.shard(torch.matmul",
    ),
    "more blocks than elements": Case(
        lambda: matmul((8, 1), (1, 1), x=torch.ones(4, 8)), StrategyError,
        "in_strategy of matmul splits dim 0 of %batch_x into 8 blocks", "f32[4, 8]: the dim has 4 elements",
        "at most 4", "mw.shard(torch.matmul",
    ),
    "groups of a convolution": Case(
        lambda: net(
            lambda m, x: m.parts[0](x), nn.Conv2d(6, 6, 3, groups=3), x=torch.ones(4, 6, 8, 8),
            mesh={"tp": 4}, mode="sharding_propagation", pins={"parts.0": {"g": "tp"}},
        ),
        StrategyError, "cannot split g of aten.conv2d.default over tp", "g is 3 and would need 4 blocks",
        "at most 3 ranks on that axis", "in parts.0",
    ),
    "a fused dim": Case(
        lambda: net(
            lambda m, x: sum(t.view(8, 3, 8).transpose(0, 1).sum(0) for t in m.parts[0](x).split(24, 1)),
            nn.Linear(8, 72), mesh={"tp": 9}, mode="sharding_propagation", pins={"parts.0": {"n": "tp"}},
        ),
        StrategyError, "cannot split n of aten.linear.default over tp", "n is (3 3 8) and would need 9 blocks",
        "at most 8 ranks", "in parts.0",
    ),
    # ---- entries
    "an entry too few": Case(
        lambda: matmul((2,), (1, 1)), StrategyError,
        "has 1 entry for a tensor of 2 dims", "%batch_x: f32[8, 8]", "one entry for each dim", "mw.shard",
    ),
    "an entry too many": Case(
        lambda: matmul((2, 1, 1), (1, 1)), StrategyError,
        "has 3 entries for a tensor of 2 dims", "%batch_x: f32[8, 8]", "one entry for each dim", "mw.shard",
    ),
    "a layout with too few dims": Case(
        lambda: matmul(LAYOUT("dp"), LAYOUT("mp", None), mesh=None), StrategyError,
        "has 1 entry for a tensor of 2 dims", "f32[8, 8]", "one entry for each dim", "mw.shard",
    ),
    "a tensor too many": Case(
        lambda: matmul((2, 1), (1, 1), (1, 1)), StrategyError,
        "in_strategy of matmul has 3 entries for 2 tensors", "(2, 1), (1, 1), (1, 1)", "one entry for each tensor",
        "mw.shard",
    ),
    "operands that disagree": Case(
        lambda: matmul((2, 4), (2, 1)), StrategyError,
        "matmul split one factor in two ways", "dim 0 of %w into 2, dim 1 of %batch_x into 4", "((a, b), (b, c))",
        "mw.shard",
    ),
    # ---- layouts
    "an axis twice in a tensor": Case(
        lambda: LAYOUT("mp", ("mp", "dp")), StrategyError,
        "axis 'mp' is used twice, for dims 0 and 1", "one dim", "another axis", HERE,
    ),
    "an unknown axis": Case(
        lambda: LAYOUT("mpp"), StrategyError, "no dim named 'mpp'", "('dp', 'sp', 'mp')", "'mp'", HERE,
    ),
    "tuples and layouts": Case(
        lambda: mw.shard(torch.matmul, ((2, 4), LAYOUT("mp", "dp"))), StrategyError,
        "matmul mix tuples and layouts", "layouts name them", "all with one mw.Layout", HERE,
    ),
    "a device matrix of another size": Case(
        lambda: matmul(LAYOUT("dp", "sp"), LAYOUT("sp", None), mesh=4), StrategyError,
        "(2, 2, 2) of matmul does not fit the mesh ranks=4", "8 ranks, the mesh has 4",
        "mesh=mw.Mesh.of(dp=2, sp=2, mp=2)", "mw.shard",
    ),
    "a device matrix of another shape": Case(
        lambda: net(
            lambda m, x: mw.reshard(x, mw.Layout((2, 3), ("a", "b"))("a", None)), mesh=6, mode="semi_auto"
        ),
        StrategyError, "(2, 3) of mw.reshard does not fit the mesh ranks=6", "3 × 2", "mw.Mesh.of(a=2, b=3)",
        "mw.reshard",
    ),
    "a device order of its own": Case(
        lambda: net(
            lambda m, x: mw.reshard(x, mw.Layout((2, 2), ("a", "b"), (3, 2, 1, 0))("a", None)),
            mesh=4, mode="semi_auto",
        ),
        StrategyError, "does not fit the mesh", "[3, 2, 1, 0]", "order=[3, 2, 1, 0]", "mw.reshard",
    ),
    "two device matrices": Case(
        lambda: net(
            lambda m, x: mw.reshard(
                mw.reshard(x, LAYOUT("dp", None)), mw.Layout((3, 2), ("a", "b"))("a", None)
            ),
            mode="semi_auto",
        ),
        StrategyError, "describe 2 meshes", "(3, 2)", "prime factors", "mw.reshard",
    ),
    "a device matrix without names": Case(
        lambda: mw.Layout((2, 2), ("dp",)), StrategyError, "2 dims has 1 names", "(2, 2)", "one name for each", HERE,
    ),
    "a name twice": Case(
        lambda: mw.Layout((2, 2), ("dp", "dp")), StrategyError,
        "must be different words", "by their names", 'Layout((2, 4), ("dp", "tp"))', HERE,
    ),
    "a device order that misses a rank": Case(
        lambda: mw.Layout((2, 2), ("dp", "tp"), (0, 1, 2, 2)), StrategyError,
        "each of the 4 ranks once", "(0, 1, 2, 2)", "permutation of 0 … 3", HERE,
    ),
    # ---- what must stay whole
    "the dim of a softmax": Case(
        lambda: net(lambda m, x: mw.shard(F.softmax, ((1, 2),))(x @ m.w, dim=-1), mesh=2, mode="semi_auto"),
        StrategyError, "in_strategy of softmax splits dim 1 of f32[8, 8] into 2 blocks", "all of its elements",
        "1 for that dim", "mw.shard(F.softmax",
    ),
    "the width of a norm": Case(
        lambda: net(
            lambda m, x: m.parts[0](x), mw.shard(nn.LayerNorm(8), ((1, 2),)), mesh=2, mode="semi_auto"
        ),
        StrategyError, "in_strategy of LayerNorm splits dim 1", "all of its elements", "1 for that dim", "in parts.0",
    ),
    "the width of a norm, pinned": Case(
        lambda: net(
            lambda m, x: m.parts[0](x), nn.LayerNorm(8),
            mesh=2, mode="sharding_propagation", pins={"parts.0": {"h0": "ranks"}},
        ),
        StrategyError, "h0 of aten.layer_norm.default may not be sharded", "all of its elements",
        "it can be split by a0", "in parts.0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_told_with_the_reason_the_place_and_a_way_out(name: str) -> None:
    check_told(CASES[name])


def test_an_annotation_that_a_mode_does_not_read_is_noted() -> None:
    plan = net(lambda m, x: mw.shard(torch.matmul, ((2, 1), (1, 1)))(x, m.w), mesh=2)
    assert any('mode="data_parallel" does not look at annotations: matmul' in n for n in plan.notes)


def test_layouts_that_disagree_are_moved_and_noted() -> None:
    """One axis cannot cut a batch and a contracted dim at once: the matmul takes one of them, and the plan says so."""
    plan = net(
        lambda m, x: mw.shard(torch.matmul, (LAYOUT("dp", "sp"), LAYOUT("sp", "dp")))(x, m.w),
        mode="semi_auto",
    )
    (note,) = [n for n in plan.notes if "annotated" in n]
    assert "in_strategy of matmul" in note and "so it is moved" in note and HERE in note


def test_a_law_of_layouts_that_breaks_is_a_layout_error() -> None:
    from meshwright.core.layout import verify
    from meshwright.core.layout_text import parse_layout

    with pytest.raises(LayoutError, match="uses axis 'tp' twice, in dims 0 and 1"):
        verify(parse_layout("[8/tp, 8/tp]"), mw.Mesh.of(tp=2))
