"""What users may write in `mw.shard`, `mw.reshard` and `mw.Layout`, and what they are told when it cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.errors import StrategyError
from tests.custom_ops import doubling

LAYOUT = mw.Layout((2, 2, 2), ("dp", "sp", "mp"))


def test_a_layout_maps_aliases_as_the_reference_does() -> None:
    # FEATURES 3.3: Layout((2,2,2),("dp","sp","mp"))("mp",("sp","dp")) has tensor_map (0,(1,2)), counted from the right.
    assert LAYOUT("mp", ("sp", "dp")).tensor_map == (0, (1, 2))
    assert LAYOUT("None", None, "dp").tensor_map == (-1, -1, 2)


def test_annotations_do_nothing_on_one_device() -> None:
    x, w = torch.randn(4, 6), torch.randn(6, 2)
    linear = torch.nn.Linear(6, 2)
    assert torch.equal(mw.shard(torch.matmul, ((2, 4), (4, 1)))(x, w), x @ w)
    assert torch.equal(
        mw.shard(linear, ((2, 1),))(x), torch.nn.functional.linear(x, linear.weight, linear.bias)
    )
    assert mw.reshard(x, (2, 1)) is x
    assert mw.shard(linear, ((2, 1),)) is linear


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mw.shard(torch.matmul, ((0, 4), (4, 1))), "at least one block"),
        (lambda: mw.shard(torch.matmul, ((-2, 4), (4, 1))), "at least one block"),
        (lambda: mw.shard(torch.matmul, ((2.0, 4), (4, 1))), "not a whole number"),
        (lambda: mw.shard(torch.matmul, ((True, 4), (4, 1))), "not a whole number"),
        (lambda: mw.shard(torch.matmul, "2"), "one entry for each tensor"),
        (lambda: mw.shard(torch.matmul, ((2, 4), LAYOUT("mp", "dp"))), "mix tuples and layouts"),
        (lambda: mw.shard(torch.matmul, ((2, 4), (4, 1)), LAYOUT("mp", "dp")), "mix tuples and layouts"),
        (lambda: LAYOUT("mp", ("mp", "dp")), "used twice"),
        (lambda: LAYOUT("md"), "no dim named 'md'"),
        (lambda: mw.Layout((2, 2), ("dp",)), "2 dims has 1 names"),
        (lambda: mw.Layout((2, 2), ("dp", "dp")), "different words"),
        (lambda: mw.Layout((2, 0), ("dp", "tp")), "at least one block"),
        (
            lambda: mw.Layout((2, 2, 2), ("dp", "tp", "interleaved_parallel")),
            r"try:   Layout\(\(2, 2\), \('dp', 'tp'\)\), and interleave=2",
        ),
        (lambda: mw.Layout((2, 2), ("dp", "tp"), rank_list=(0, 1, 2)), "list each of the 4 ranks once"),
    ],
)
def test_bad_strategies_are_refused_where_they_are_written(make, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        make()


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (torch.nn.ModuleList([torch.nn.Linear(2, 2)]), "annotate each of the modules in it"),
        (torch.nn.Linear, "annotate the module that it makes"),
        (torch.nn.Linear(2, 2).weight, "that reads the tensor"),
        ("blocks.0", "a module or a function"),
        (None, "a module or a function"),
    ],
)
def test_what_is_never_called_cannot_be_marked(target: Any, says: str) -> None:
    for mark in (
        mw.on_host,
        mw.recompute,
        lambda one: mw.manual_split(one, (1, 1)),
        lambda one: mw.shard(one, ((1, 2),)),
    ):
        with pytest.raises(StrategyError, match="marks nothing") as caught:
            mark(target)
        assert says in caught.value.hint and "test_annotate.py" in caught.value.where


twice = doubling("annotated::twice")


def test_an_operator_that_is_not_known_is_cut_by_the_rule_of_the_user() -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(mw.shard(torch.ops.annotated.twice, ((2, 2),))(x)).square().mean()

    asked: Any = {"mesh": {"dp": 2, "tp": 2}, "mode": "sharding_propagation"}
    with pytest.raises(
        StrategyError, match=r"mw\.rule\('annotated\.twice', \"…\"\) says how it can be split"
    ):
        mw.plan(Twice(), torch.randn(8, 6), **asked)
    mw.rule("annotated::twice", "b f -> b f")
    plan = mw.plan(Twice(), torch.randn(8, 6), **asked)
    assert str(plan.inputs["batch_"].forward) == "[8/dp, 6/tp]"
    mw.verify(Twice(), torch.randn(8, 6), plan=plan).raise_if_different()
