"""Strategies in the model's own code: what each rank holds, what is sent, and numbers that hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.compile import captured_of, lower, plan_captured
from meshwright.partition import RESHARD, Partition
from meshwright.partition.collectives import program_collectives
from tests.breadth import quick

LAYOUT = mw.Layout((2, 2, 2), ("dp", "sp", "mp"))


class Net(nn.Module):
    """`body(model, x)`, squared and averaged; `w` is a weight to multiply with."""

    def __init__(
        self, body: Callable[..., torch.Tensor], *parts: nn.Module, w: tuple[int, ...] = (8, 8)
    ) -> None:
        super().__init__()
        self.body, self.parts = body, nn.ModuleList(parts)
        self.w = nn.Parameter(torch.randn(*w))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.body(self, x)).square().mean()


def parts_of(
    body: Callable[..., torch.Tensor], *parts: nn.Module, mesh: Any = None, mode: str = "semi_auto",
    x: tuple[int, ...] = (8, 8), w: tuple[int, ...] = (8, 8), prove: bool = True,
) -> Partition:  # fmt: skip
    """The partition of a plan that was proved."""
    torch.manual_seed(0)
    model, batch, loss = Net(body, *parts, w=w), {"x": torch.randn(*x)}, lambda m, b: m(b["x"])
    captured = captured_of(model, batch, loss)
    plan = plan_captured(captured, mesh, mode, None)
    if prove:
        mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()
    return lower(captured, plan)


def matmul(*ins: Any, out: Any = None, **how: Any) -> Partition:
    return parts_of(lambda m, x: mw.shard(torch.matmul, ins, out)(x, m.w), **how)


def shapes(parts: Partition, op: str) -> list[tuple[tuple[int, ...], ...]]:
    """Per rank: the local shapes of what the first node of an operator reads and makes."""
    found = []
    for rank in range(parts.plan.mesh.size):
        local = parts.local(rank)
        node = next(n for n in local.nodes if n.op == op)
        found.append((*(local.types[u].shape for u in node.uses), node.outputs[0].shape))
    return found


def kinds(parts: Partition) -> list[tuple[str, str, str]]:
    return [
        (c.phase, c.kind, parts.plan.mesh.show(c.axes))
        for c in program_collectives(parts.local(0), parts.plan.mesh, 0)
    ]


# ---------------------------------------------------------------- tuples


@pytest.mark.parametrize(
    ("ins", "ranks", "local"),
    [
        (((2, 4), (4, 1)), 8, ((4, 2), (2, 8), (4, 8))),
        (((1, 8), (8, 1)), 8, ((8, 1), (1, 8), (8, 8))),
        (((2, 2), (2, 2)), 8, ((4, 4), (4, 4), (4, 4))),
        # A product below the ranks repeats the computation: all ranks hold parts of these sizes.
        (((2, 1), (1, 1)), 8, ((4, 8), (8, 8), (4, 8))),
        (((1, 2), (2, 1)), 8, ((8, 4), (4, 8), (8, 8))),
        (((1, 1), (1, 2)), 8, ((8, 8), (8, 4), (8, 4))),
        (((1, 1), (1, 1)), 8, ((8, 8), (8, 8), (8, 8))),
        (((2, 1), (1, 1)), 6, ((4, 8), (8, 8), (4, 8))),
    ],
)
def test_a_product_of_cuts_gives_these_local_shapes(ins: Any, ranks: int, local: Any) -> None:
    parts = matmul(*ins, mesh=ranks)
    assert shapes(parts, "aten.matmul.default") == [local] * ranks
    cuts = ins[0][0] * ins[0][1] * ins[1][1]
    repeated = ranks // cuts
    grads = parts.resharded.layouts["w"].grad
    assert (
        parts.plan.mesh.count(grads) == ins[0][0]
    )  # reduced over the batch's cut alone: nothing is counted twice
    text = [n for n in parts.plan.notes if "compute the same" in n]
    assert [n.split()[0] for n in text] == ([str(repeated)] if repeated > 1 else [])


@pytest.mark.parametrize("ranks", (3, 6))
@pytest.mark.parametrize("ins", [((3, 1), (1, 1)), ((1, 3), (3, 1)), ((1, 1), (1, 3))])
@quick(lambda ins, ranks: ranks == 6)
def test_ranks_need_not_be_a_power_of_two(ins: Any, ranks: int) -> None:
    found = shapes(matmul(*ins, mesh=ranks), "aten.matmul.default")
    assert sorted({max(s) for s in found}) and len(set(found)) == 2  # 8 on 3 ranks: blocks of 3, 3, 2


@pytest.mark.parametrize(
    ("out", "layout"),
    [
        (None, "[8/ranks0, 8]"),
        ((2, 1), "[8/ranks0, 8]"),  # (a, c): the sum is reduced
        ((8, 1), "[8/ranks0.ranks1.ranks2, 8]"),  # (a·b, c): the sum is scattered
        ((4, 2), "[8/ranks0.ranks1, 8/ranks2]"),  # any other layout is reached as well
        ((1, 1), "[8, 8]"),
    ],
)
def test_an_output_strategy_is_honoured(out: Any, layout: str) -> None:
    parts = matmul((2, 4), (4, 1), out=(out,) if out else None, mesh=8)
    end = [n for n in parts.resharded.graph.nodes if n.op == "meshwright.pin.default"][-1]
    found = parts.resharded.layouts[end.name]
    assert str(found.forward) == (layout if out else str(found.forward))
    before = parts.resharded.graph.producers[end.uses[0]]
    source = before.uses[0] if before.op == RESHARD else before.name
    assert parts.resharded.layouts[source].partial == ("ranks1", "ranks2")
    if out:
        assert not found.partial


def test_operators_without_a_strategy_are_data_parallel() -> None:
    parts = parts_of(
        lambda m, x: m.parts[1](mw.shard(torch.matmul, ((1, 4), (4, 1)))(m.parts[0](x), m.w)),
        nn.Linear(8, 8), nn.Linear(8, 4), mesh=4,
    )  # fmt: skip
    plan = parts.plan
    assert {n: r for n, r in plan.reasons.items() if "linear" in n} == {
        "linear": "data parallel",
        "linear_1": "data parallel",
    }
    assert [str(plan.strategies[n]) for n in ("linear", "linear_1")] == ["d0=8/ranks0.ranks1"] * 2
    assert str(plan.strategies["matmul"]) == "k=8/ranks0.ranks1"


@pytest.mark.parametrize("mode", ["semi_auto", "sharding_propagation"])
def test_beside_pins_each_micro_batch_keeps_an_example_on_every_rank(mode: str) -> None:
    """Eight examples in four micro-batches: over the two ranks of dp, and no further over those of tp."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh()), torch.randn(8, 8)
    pins, mesh = {"0": {"n": "tp"}, "2": {"k": "tp"}}, {"dp": 2, "tp": 2}

    def loss(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return m(x).square().mean()

    def plan(**options: Any) -> mw.Plan:
        return mw.plan(model, x, loss=loss, mesh=mesh, mode=mode, **options)

    free = ("dp", "tp") if mode == "semi_auto" else ("dp",)
    assert plan(pins=pins).strategies["tanh"].splits[0][1][0].axes == free
    made = plan(pins=pins, micro_batches=4)
    assert made.strategies["tanh"].splits[0][1][0].axes == ("dp",)
    mw.verify(model, x, loss=loss, plan=made).raise_if_different()
    with pytest.raises(mw.PlanError, match="8 examples over 4 ranks"):  # nothing says how else to split
        plan(micro_batches=4)


# ---------------------------------------------------------------- layouts


def ranges(parts: Partition, value: str, rank: int) -> list[tuple[int, int]]:
    """Per dim: first and last + 1 of the global indices that a rank holds (they are contiguous)."""
    mesh = parts.plan.mesh
    found = []
    for index in parts.resharded.layouts[value].indices(mesh, mesh.coordinate(rank)):
        assert np.array_equal(index, np.arange(index[0], index[-1] + 1))
        found.append((int(index[0]), int(index[-1]) + 1))
    return found


# The reference's table for x(32, 784) and w(784, 512): (dp, sp, mp) → rows and columns of x, rows of w.
TABLE = {
    (0, 0, 0): ((0, 16), (0, 196)),
    (0, 0, 1): ((16, 32), (0, 196)),
    (0, 1, 0): ((0, 16), (196, 392)),
    (0, 1, 1): ((16, 32), (196, 392)),
    (1, 0, 0): ((0, 16), (392, 588)),
    (1, 0, 1): ((16, 32), (392, 588)),
    (1, 1, 0): ((0, 16), (588, 784)),
    (1, 1, 1): ((16, 32), (588, 784)),
}


@pytest.mark.parametrize("both", (("sp", "dp"), ("dp", "sp")), ids=".".join)
@pytest.mark.parametrize("order", (None, (3, 1, 0, 2, 7, 5, 6, 4)))
def test_the_table_of_the_higher_order_form(order: Any, both: tuple[str, str]) -> None:
    """Along the contracted dim the blocks go by dp first, whichever alias is named first: the order of the matrix."""
    layout = mw.Layout((2, 2, 2), ("dp", "sp", "mp"), order)
    parts = matmul(layout("mp", both), layout(both, "None"), x=(32, 784), w=(784, 512), prove=False)
    x = next(n.name for n in parts.resharded.graph.nodes if n.op == "meshwright.pin.default")
    for place, (at, (rows, columns)) in enumerate(TABLE.items()):
        rank = order[place] if order else place
        assert parts.plan.mesh.coordinate(rank) == dict(zip(("dp", "sp", "mp"), at, strict=True))
        assert ranges(parts, x, rank) == [rows, columns]
        assert ranges(parts, "w", rank) == [columns, (0, 512)]
    assert set(shapes(parts, "aten.matmul.default")) == {((16, 196), (196, 512), (16, 512))}
    assert kinds(parts)[:1] == [("forward", "all_reduce", "dp,sp")]


@pytest.mark.parametrize("order", (None, (3, 1, 0, 2, 7, 5, 6, 4)))
def test_the_higher_order_form_computes_the_same(order: Any) -> None:
    layout = mw.Layout((2, 2, 2), ("dp", "sp", "mp"), order)
    matmul(layout("mp", ("sp", "dp")), layout(("sp", "dp"), "None"))


def test_layouts_of_several_shapes_share_a_mesh() -> None:
    """(2, 4) and (2, 2, 2) are names for runs of the same prime axes."""
    parts = parts_of(
        lambda m, x: mw.reshard(
            mw.shard(torch.matmul, (LAYOUT("dp", "sp"), LAYOUT("sp", None)))(x, m.w),
            mw.Layout((2, 4), ("a", "b"))(None, "b"),
        )
    )
    assert parts.plan.mesh.size == 8 and len(parts.plan.mesh.axes) == 3
    assert any(str(v.forward) == "[8, 8/ranks1.ranks2]" for v in parts.resharded.layouts.values())


def test_two_and_three_dimensional_tensor_parallel() -> None:
    """The product takes what it can as it is cut; the rest is gathered before it."""
    two = mw.Layout((2, 4), ("x", "y"))
    parts = matmul(two(None, ("x", "y")), two("x", "y"))
    assert ("forward", "all_gather", "y") in kinds(parts)
    assert str(parts.resharded.layouts["w"].forward) == "[8/x, 8/y0.y1]"
    three = mw.Layout((2, 2, 2), ("x", "y", "z"))
    matmul(three(("z", "y"), "x"), three(("x", "z"), "y"))


# ---------------------------------------------------------------- modules and functions


def test_a_module_takes_and_gives_what_it_is_told() -> None:
    inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    parts = parts_of(lambda m, x: m.parts[0](x), mw.shard(inner, ((2, 1),), ((1, 4),)), mesh=8)
    pins = [n for n in parts.resharded.graph.nodes if n.op == "meshwright.pin.default"]
    assert [str(parts.resharded.layouts[p.name].forward) for p in pins] == [
        "[8/ranks0, 8]",
        "[8, 4/ranks0.ranks1]",
    ]


def test_a_function_of_several_operators_may_want_its_inputs_moved() -> None:
    """The reference's `shard(dense_relu, ((4, 2), (4, 2), (8,)))`, scaled: 10 does not divide by 8, and k is cut in
    two ways."""

    def dense_relu(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.matmul(x, w) + b)

    parts = parts_of(
        lambda m, x: mw.shard(dense_relu, ((4, 2), (4, 2), (8,)))(x, m.w, m.parts[0].bias),
        nn.Linear(1, 10), mesh=8, w=(8, 10),
    )  # fmt: skip
    assert any("in_strategy of dense_relu" in n and "is moved" in n for n in parts.plan.notes)


@pytest.mark.parametrize("mode", ("semi_auto", "sharding_propagation"))
def test_reshard_fixes_a_layout_in_the_middle(mode: str) -> None:
    parts = parts_of(
        lambda m, x: torch.relu(mw.reshard(m.parts[0](x), (1, 4))), nn.Linear(8, 8), mesh=4, mode=mode
    )
    pin = next(n for n in parts.resharded.graph.nodes if n.op == "meshwright.pin.default")
    assert str(parts.resharded.layouts[pin.name].forward) == "[8, 8/ranks0.ranks1]"


# ---------------------------------------------------------------- dims of several factors


@pytest.mark.parametrize(
    ("make", "ins", "first"),
    [
        (lambda: nn.Conv2d(8, 8, 3, padding=1), (1, 4, 1, 1), "i=8/ranks0.ranks1"),
        (lambda: nn.Conv2d(8, 8, 2, stride=2), (1, 1, 2, 1), "y0=4/ranks0"),
        (lambda: nn.Conv2d(8, 8, 2, stride=2), (2, 2, 1, 1), "n=4/ranks0 i=8/ranks1"),
        (lambda: nn.ConvTranspose2d(8, 8, 2, stride=2), (1, 4, 1, 1), "i=8/ranks0.ranks1"),
        (lambda: nn.MaxPool2d(2), (1, 2, 2, 1), "a1=8/ranks0 y0=4/ranks1"),
        (lambda: nn.AvgPool2d(2), (1, 1, 2, 2), "y0=4/ranks0 y1=4/ranks1"),
        (lambda: nn.GroupNorm(4, 8), (2, 2, 1, 1), "n=4/ranks0 g=4/ranks1"),
    ],
)
def test_a_dim_of_which_a_part_stays_whole_is_split_by_the_rest(
    make: Callable[[], nn.Module], ins: tuple[int, ...], first: str
) -> None:
    parts = parts_of(lambda m, x: m.parts[0](x), mw.shard(make(), (ins,)), mesh=4, x=(4, 8, 8, 8))
    node = next(n for n in parts.resharded.graph.nodes if n.uses[0].startswith("pin"))
    assert str(parts.plan.strategies[node.name]).startswith(first)
    assert not [n for n in parts.plan.notes if "is moved" in n]


@pytest.mark.parametrize(
    ("ins", "name"),
    [
        (((2, 1, 1, 1), (2, 1, 1, 1)), "n=4/ranks0 o=8/ranks1"),
        (((2, 2, 1, 1), (1, 2, 1, 1)), "n=4/ranks0 i=8/ranks1"),
    ],
)
def test_a_convolution_is_split_by_examples_and_channels(ins: Any, name: str) -> None:
    parts = parts_of(
        lambda m, x: mw.shard(nn.functional.conv2d, ins)(x, m.w), mesh=4, x=(4, 8, 6, 6), w=(8, 8, 3, 3)
    )
    assert str(parts.plan.strategies["conv2d"]) == name


def test_a_group_is_not_split() -> None:
    with pytest.raises(mw.MeshwrightError, match="2 runs of 4 elements, each of which stays unsplit"):
        parts_of(
            lambda m, x: m.parts[0](x), mw.shard(nn.GroupNorm(2, 8), ((1, 4, 1, 1),)), mesh=4, x=(4, 8, 8, 8)
        )


# ---------------------------------------------------------------- the reference's nets


class Reference(nn.Module):
    """The reference's example: two products and two activations with strategies, and a third product by default."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(features, hidden) * features**-0.5)
        self.w2 = nn.Parameter(torch.randn(hidden, hidden) * hidden**-0.5)
        self.w3 = nn.Parameter(torch.randn(hidden, classes) * hidden**-0.5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = mw.shard(torch.matmul, ((2, 4), (4, 1)))(x, self.w1)
        x = mw.shard(torch.relu, ((4, 1),))(x)
        x = mw.shard(torch.matmul, ((1, 8), (8, 1)))(x, self.w2)
        x = mw.shard(torch.relu, ((8, 1),))(x)
        return nn.functional.cross_entropy(torch.matmul(x, self.w3), y)


@pytest.mark.parametrize(("features", "hidden"), [(48, 32), pytest.param(784, 512, marks=pytest.mark.slow)])
def test_the_reference_net_on_eight_ranks(features: int, hidden: int) -> None:
    torch.manual_seed(0)
    model = Reference(features, hidden, 10)
    batch = {"x": torch.randn(32, features), "y": torch.randint(0, 10, (32,))}
    report = mw.verify(model, batch, loss=lambda m, b: m(**b), mesh=8, mode="semi_auto").raise_if_different()
    plan = report.plan
    r = "ranks0", "ranks1", "ranks2"
    assert [str(plan.strategies[n]) for n in ("matmul", "relu", "matmul_1", "relu_1", "matmul_2")] == [
        f"m=32/{r[0]} k={features}/{r[1]}.{r[2]}",
        f"d0=32/{r[0]}.{r[1]}",
        f"k={hidden}/{'.'.join(r)}",
        f"d0=32/{'.'.join(r)}",
        f"m=32/{'.'.join(r)}",
    ]
    assert not [n for n in plan.notes if "is moved" in n]
