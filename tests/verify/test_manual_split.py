"""Tables cut where the columns of their indices want it: uneven blocks, and nothing is sent for a lookup."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import meshwright as mw
from meshwright.compile import captured_of, lower, values_of
from meshwright.core.layout import TensorLayout, verify
from meshwright.core.layout_text import parse_layout
from meshwright.core.mesh import Mesh
from meshwright.errors import LayoutError, RunError, StrategyError
from meshwright.partition.collectives import program_collectives
from meshwright.redistribute import redistribute
from meshwright.redistribute.boxes import held_boxes
from meshwright.redistribute.oracle import assemble, execute, scatter
from meshwright.verify.runs import OPTIMIZERS, simulate
from tests.breadth import quick

ROWS = (10, 20, 30, 4)


class Clicks(torch.nn.Module):
    """Four columns of indices, each with rows of its own in one table."""

    def __init__(self, rows=ROWS, padding: int | None = None) -> None:
        super().__init__()
        self.table = mw.manual_split(torch.nn.Embedding(sum(rows), 6, padding_idx=padding), rows)
        self.up = torch.nn.Linear(6, 8)
        self.out = torch.nn.Linear(len(rows) * 8, 1)

    def forward(self, ids):
        return self.out(torch.relu(self.up(self.table(ids))).flatten(1)).squeeze(1)


def built(rows=ROWS, padding: int | None = None, batch: int = 6):
    torch.manual_seed(0)
    starts = [0, *itertools.accumulate(rows)]
    ids = torch.stack([torch.randint(s, s + n, (batch,)) for s, n in zip(starts, rows, strict=False)], 1)
    example = {"ids": ids, "y": torch.randint(0, 2, (batch,)).float()}

    def loss(model, batch):
        return torch.nn.functional.binary_cross_entropy_with_logits(model(batch["ids"]), batch["y"])

    return Clicks(rows, padding), example, loss


@pytest.mark.parametrize("mode", ("semi_auto", "sharding_propagation"))
@pytest.mark.parametrize(
    ("mesh", "rows", "held"),
    [
        ({"tp": 4}, ROWS, "[64:10+20+30+4/tp0.tp1, 6]"),
        ({"tp": 2}, ROWS, "[64:10+20+30+4/tp, 6]"),
        ({"dp": 2, "tp": 2}, ROWS, "[64:10+20+30+4/tp, 6]"),
        ({"tp": 3}, (5, 1, 7, 2, 9), "[24:5+1+7+2+9/tp, 6]"),  # columns 2, 2, 1
        ({"tp": 4}, (5, 1, 7, 2, 9), "[24:5+1+7+2+9/tp0.tp1, 6]"),  # 2, 1, 2, none
    ],
)
@quick(lambda mode, **_: mode == "semi_auto")
def test_columns_and_their_rows_are_cut_alike(mesh, rows, held: str, mode: str) -> None:
    model, batch, loss = built(rows)
    pins = {"table": {"c": "tp"} | ({"a0": "dp"} if "dp" in mesh else {})}
    plan = mw.plan(model, batch, loss=loss, mesh=mesh, mode=mode, pins=pins)
    assert str(plan.inputs["table_weight"].forward) == held
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


def test_a_lookup_sends_nothing_and_a_rank_has_its_rows() -> None:
    model, batch, loss = built()
    plan = mw.plan(
        model, batch, loss=loss, mesh={"tp": 4}, mode="sharding_propagation", pins={"table": {"c": "tp"}}
    )
    parts = lower(captured_of(model, batch, loss), plan)
    for rank, rows in enumerate(ROWS):
        local = parts.local(rank)
        assert local.types["table_weight"].shape == (rows, 6)
        sent = program_collectives(local, parts.plan.mesh, rank)
        assert not [c for c in sent if "table" in c.node or "embedding" in c.node]


@pytest.mark.parametrize(
    "asked", ({"optimizer_parallel": 1, "threshold_kb": 0}, {"micro_batches": 2}, {"recompute": "full"})
)
def test_beside_techniques(asked) -> None:
    model, batch, loss = built(padding=12)
    report = mw.verify(
        model, batch, loss=loss, mesh={"dp": 2, "tp": 2}, mode="sharding_propagation",
        pins={"table": {"c": "tp", "a0": "dp"}}, **asked,
    )  # fmt: skip
    report.raise_if_different()


def test_the_plan_comes_back_from_its_file(tmp_path) -> None:
    model, batch, loss = built()
    plan = mw.plan(model, batch, loss=loss, mesh={"tp": 2}, mode="semi_auto", pins={"table": {"c": "tp"}})
    plan.save(tmp_path / "plan.json")
    assert mw.Plan.load(tmp_path / "plan.json").inputs == plan.inputs


def test_wrong_rows_are_errors() -> None:
    with pytest.raises(StrategyError, match="is given 10 \\+ 20 = 30 rows"):
        mw.manual_split(torch.nn.Embedding(64, 4), (10, 20))
    with pytest.raises(StrategyError, match="number of rows of each column"):
        mw.manual_split(torch.nn.Embedding(64, 4), (64, 0))
    model, batch, loss = built()
    batch["ids"] = batch["ids"][:, :3]
    model.out = torch.nn.Linear(24, 1)
    with pytest.raises(StrategyError, match="4 columns of 10 \\+ 20 \\+ 30 \\+ 4 rows"):
        mw.plan(model, batch, loss=loss, mesh=2)


def test_an_index_of_another_column_is_an_error() -> None:
    model, batch, loss = built()
    plan = mw.plan(model, batch, loss=loss, mesh={"tp": 4}, mode="semi_auto", pins={"table": {"c": "tp"}})
    batch["ids"][0, 1] = 3  # a row of column 0
    with pytest.raises(
        RunError, match=r"the index 3 in column 1 belongs[^@]*gives column 1 the rows 10 to 29"
    ):
        mw.verify(model, batch, loss=loss, plan=plan)


class Sharded(torch.nn.Module):
    """One lookup in a table, as `mw.shard` says."""

    def __init__(self, *how) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(sum(ROWS), 8))
        self.lookup = mw.shard(mw.manual_split(torch.nn.functional.embedding, ROWS), *how)

    def forward(self, ids):
        return self.lookup(ids, self.weight).tanh().square().mean()


@pytest.mark.parametrize("mode", ("semi_auto", "sharding_propagation"))
@pytest.mark.parametrize(
    ("how", "held"),
    [
        ((((1, 4), (4, 1)),), "[64:10+20+30+4/{0}.{1}, 8]"),
        ((((2, 2), (2, 1)),), "[64:10+20+30+4/{1}, 8]"),
        ((((1, 2), (2, 2)), ((1, 2, 2),)), "[64:10+20+30+4/{0}, 8/{1}]"),
    ],
)
@quick(lambda mode, **_: mode == "semi_auto")
def test_a_strategy_splits_columns_and_their_rows(how, held: str, mode: str) -> None:
    torch.manual_seed(0)
    ids, model = built()[1]["ids"], Sharded(*how)
    plan = mw.plan(model, ids, loss=lambda m, b: m(b), mesh=4, mode=mode)
    parts = lower(captured_of(model, ids, lambda m, b: m(b)), plan)
    (mark,) = [n for n in parts.resharded.graph.nodes if n.uses == ("weight",)]
    axes = [a.name for a in plan.mesh.axes]
    assert str(parts.resharded.layouts[mark.name].forward) == held.format(*axes)
    mw.verify(model, ids, loss=lambda m, b: m(b), plan=plan).raise_if_different()


@pytest.mark.parametrize("ins", [((1, 4), (1, 1)), ((1, 1), (4, 1))])
def test_columns_without_their_rows_are_refused(ins) -> None:
    with pytest.raises(StrategyError, match="split one factor in two ways"):
        mw.plan(Sharded(ins), built()[1]["ids"], loss=lambda m, b: m(b), mesh=4, mode="semi_auto")


def test_an_index_beyond_a_split_table_is_the_error_of_torch() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 2))
    good, loss = torch.tensor([1, 7]), lambda m, b: m(b).square().mean()
    plan = mw.plan(model, good, loss=loss, mesh=2, mode="sharding_propagation", pins={"0": {"v": "ranks"}})
    mw.verify(model, good, loss=loss, plan=plan).raise_if_different()
    parts = lower(captured_of(model, good, loss), plan)
    start = values_of(model, captured_of(model, good, loss))
    for astray in (8, -1):
        with pytest.raises(IndexError, match="index out of range"):
            simulate(parts, torch.tensor([1, astray]), start, OPTIMIZERS["SGD"])


def test_a_label_beyond_split_classes_is_the_error_of_torch() -> None:
    model, batch = torch.nn.Linear(4, 8), {"x": torch.randn(3, 4), "y": torch.tensor([0, -100, 7])}
    loss = lambda m, b: torch.nn.functional.cross_entropy(m(b["x"]), b["y"])  # noqa: E731
    captured = captured_of(model, batch, loss)
    plan = mw.plan(model, batch, loss=loss, mesh=2, mode="sharding_propagation", pins={"": {"n": "ranks"}})
    parts, start = lower(captured, plan), values_of(model, captured)
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()
    for astray in (8, -1):
        with pytest.raises(IndexError, match=f"Target {astray} is out of bounds"):
            simulate(parts, batch | {"y": torch.tensor([0, astray, 7])}, start, OPTIMIZERS["SGD"])


MESH = Mesh.of(a=2, b=3)
TEXTS = ["[12, 6]", "[12:1+7+4/b, 6]", "[12:5+7/a, 6]", "[12:5+7/a, 6/b]", "[12/a, 6]", "[12/b, 6/a]",
         "[12, 6] partial a", "[12:5+7/a, 6] partial b", "[12:1+0+4+2+2+3/a.b, 6]",
         "[12:1+7+4/b, 6] partial a"]  # fmt: skip


@pytest.mark.parametrize("src", TEXTS)
def test_between_any_two_layouts_the_values_stay(src: str) -> None:
    whole = np.random.default_rng(0).standard_normal((12, 6))
    have = verify(parse_layout(src), MESH)
    assert str(have) == src
    values = scatter(whole, have, MESH, np.random.default_rng(1))
    for text in TEXTS:
        want = parse_layout(text)
        if want.partial and not have.partial:
            continue
        steps = redistribute(have, want, MESH, 8)
        found = execute(steps, values, MESH)
        np.testing.assert_allclose(assemble(found, want, MESH), whole, atol=1e-12)
        shapes = [want.local_shape(MESH, MESH.coordinate(r)) for r in range(6)]
        assert [found[r].shape for r in range(6)] == shapes


def test_groups_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(LayoutError, match="groups 12 elements"):
        verify(parse_layout("[12:5+6/a]"), MESH)
    with pytest.raises(LayoutError, match="splits 2 groups of dim 0 into 3 blocks"):
        verify(parse_layout("[12:5+7/b]"), MESH)
    assert isinstance(parse_layout("[12:5+7/a]"), TensorLayout)


def test_a_checkpoint_has_the_boxes_of_the_groups() -> None:
    for text in TEXTS:
        layout = parse_layout(text)
        if layout.partial:
            continue
        for rank in range(MESH.size):
            boxes = held_boxes(layout, MESH, rank)
            held = {
                place
                for h in boxes
                for place in itertools.product(
                    *(range(s, s + n) for s, n in zip(h.box.start, h.box.shape, strict=True))
                )
            }
            indices = layout.indices(MESH, MESH.coordinate(rank))
            assert held == set(itertools.product(*(i.tolist() for i in indices)))


@pytest.mark.parametrize("mode", ("recursive_programming", "dynamic_programming", "auto"))
@quick(lambda mode: mode == "auto")  # it also looks at what the others find
def test_searches_make_plans_of_such_models(mode: str) -> None:
    model, batch, loss = built(batch=8)
    plan = mw.plan(model, batch, loss=loss, cluster=mw.Cluster.local(4), mode=mode)
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()
