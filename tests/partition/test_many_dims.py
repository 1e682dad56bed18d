"""Weights cut over two and three axes (2D and 3D tensor parallel): what ranks send is what the method's formulas say,
and the numbers are those of one device."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.compile import captured_of, lower, plan_captured
from meshwright.core.layout import SubDim, TensorLayout, dim_axes
from meshwright.core.mesh import Mesh
from meshwright.cost.cluster import Level
from meshwright.ops.strategy import Strategy
from meshwright.partition.collectives import program_collectives, sent_bytes
from meshwright.plan.plan import Plan
from meshwright.planning.search_request import request_for

RING = mw.Cluster.preset("h100")  # a reduce-scatter costs half of an all-reduce, as the formulas have it
ONE, TWO, THREE = {"x": 8}, {"x": 2, "y": 4}, {"x": 2, "y": 2, "z": 2}


class TwoProducts(nn.Module):
    """(rows, h) · w1 (h, e) · w2 (e, h), and an activation."""

    def __init__(self, h: int, e: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(h, e) / h**0.5)
        self.w2 = nn.Parameter(torch.randn(e, h) / e**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.w1 @ self.w2)


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


def layout_on(mesh: Mesh, shape: tuple[int, ...], *axes: str, grad: str = "") -> TensorLayout:
    """``layout_on(mesh, (1024, 256), "z", "xy")``: rows over z; columns over x, and each of these over y."""
    runs = dict(mesh.names)

    def prime(names: str) -> tuple[str, ...]:
        return tuple(axis for name in names for axis in runs[name])

    dims = tuple((SubDim(n, prime(a)),) for n, a in zip(shape, axes, strict=True))
    return TensorLayout(dims, (), prime(grad))


def planned(model: TwoProducts, x: torch.Tensor, mesh: dict[str, int]) -> Plan:
    """FEATURES 3.6. One axis cuts e alone. Two: activations (None, (x, y)), weights (x, y), and swapped for the second.
    Three: rows over z too, and weights stored ((z, y), x) and ((x, z), y), gathered over z where they are used."""
    captured = captured_of(model, x, loss)
    plan = plan_captured(captured, mesh, "semi_auto", {}, request_for(RING))
    (rows, h), e = x.shape, model.w1.shape[1]
    z = "z" if "z" in mesh else ""
    layout = functools.partial(layout_on, plan.mesh)

    def strategy(letters: str, sizes: tuple[int, ...], *axes: str) -> Strategy:
        names = [f"{letters[0]}{i}" for i in range(len(sizes))] if len(letters) == 1 else list(letters)
        pairs = zip(names, layout(sizes, *axes).dims, strict=True)
        return Strategy(tuple((n, d) for n, d in pairs if d[0].axes))

    if "y" not in mesh:
        cuts = {
            "matmul": strategy("mkn", (rows, h, e), "", "", "x"),
            "matmul_1": strategy("mkn", (rows, e, h), "", "x", ""),
        }
        inputs = {
            "batch_": layout((rows, h), "", ""),
            "w1": layout((h, e), "", "x"),
            "w2": layout((e, h), "x", ""),
        }
        hubs = {}
    else:
        cuts = {
            "matmul": strategy("mkn", (rows, h, e), z, "x", "y"),
            "matmul_1": strategy("mkn", (rows, e, h), z, "y", "x"),
            "relu": strategy("d", (rows, h), z, "xy"),
            "square": strategy("d", (rows, h), z, "xy"),
            "sum": strategy("a", (rows, h), z, "xy"),
        }
        inputs = {
            "batch_": layout((rows, h), z, "xy"),
            "w1": layout((h, e), "x" + z, "y"),
            "w2": layout((e, h), "y" + z, "x"),
        }
        hubs = {"matmul": layout((rows, e), z, "yx"), "matmul_1": layout((rows, h), z, "xy")}
        if z:
            hubs |= {"w1": layout((h, e), "x", "y", grad=z), "w2": layout((e, h), "y", "x", grad=z)}
    strategies = {name: cuts.get(name, Strategy()) for name in plan.strategies}
    return replace(plan, strategies=strategies, inputs=inputs, hubs=hubs)


def sent_elements(model: TwoProducts, plan: Plan, x: torch.Tensor, rank: int = 0) -> float:
    """What a rank sends forward for the two products, in elements."""
    parts = lower(captured_of(model, x, loss), plan)
    found = program_collectives(parts.local(rank), plan.mesh, rank)
    own = [c for c in found if c.phase == "forward" and c.node.startswith(("batch_", "matmul", "w"))]
    return sum(sent_bytes(c, plan.mesh) for c in own) / 4


@pytest.mark.parametrize(("mesh", "elements"), [(ONE, 458_752), (TWO, 327_680), (THREE, 229_376)])
def test_what_is_sent_is_what_the_formulas_say(mesh: dict[str, int], elements: int) -> None:
    rows, h, e = 1024, 256, 512
    x_, y, z = (mesh.get(a, 1) for a in "xyz")
    ranks = x_ * y * z
    if mesh is ONE:
        formula = 2 * (ranks - 1) * rows * h / ranks
    else:
        formula = 2 * (rows * e * (x_ - 1) + rows * h * (y - 1) + h * e * (z - 1)) / ranks
    assert formula == elements
    model, x = TwoProducts(h, e), torch.randn(rows, h)
    plan = planned(model, x, mesh)
    assert {sent_elements(model, plan, x, rank) for rank in range(8)} == {elements}


@pytest.mark.parametrize("mesh", [ONE, TWO, THREE, {"x": 4, "y": 2}], ids=str)
def test_products_cut_over_several_axes_are_those_of_one_device(mesh: dict[str, int]) -> None:
    model, x = TwoProducts(24, 48), torch.randn(16, 24)
    plan = planned(model, x, mesh)
    mw.verify(model, x, loss=loss, plan=plan).raise_if_different()


def test_a_weight_is_cut_in_two_by_pins_and_by_layouts() -> None:
    # A pin names both factors; a layout of the activation leaves the weight's other dim to the product.
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(24, 48, bias=False), nn.Linear(48, 24, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            device = mw.Layout((2, 2, 2), ("x", "y", "z"))
            h = mw.reshard(self.up(mw.reshard(x, device("z", ("x", "y")))), device("z", ("x", "y")))
            return mw.reshard(self.down(torch.relu(h)), device("z", ("x", "y")))

    model, x = Model(), torch.randn(16, 24)
    pins = {"up": {"k": "x", "n": "y"}, "down": {"k": "y", "n": "x"}}
    plan = mw.plan(model, x, loss=loss, mesh=THREE, mode="semi_auto", pins=pins)
    held = {
        name: layout.local_shape(plan.mesh, dict.fromkeys("xyz", 0)) for name, layout in plan.inputs.items()
    }
    assert held["up_weight"] == (24, 12) and held["down_weight"] == (12, 24)
    mw.verify(model, x, loss=loss, plan=plan).raise_if_different()


def test_the_search_cuts_a_weight_in_both_its_dims_where_that_is_best() -> None:
    # Square products of as many rows: a made-up node of eight, where every single cut sends more than several do.
    base = mw.Cluster.preset("h100")
    cluster = replace(
        base,
        levels=(Level("rank", 8, 4.5e11, 1e-7),),
        device=replace(base.device, memory_bytes=10**12),
    )
    with torch.device("meta"):
        model, x = TwoProducts(8192, 8192), torch.empty(8192, 8192)
    plan = mw.plan(model, x, loss=loss, cluster=cluster, mode="dynamic_programming")
    assert {letter for letter, _ in plan.strategies["matmul_1"].splits} == {"m", "k", "n"}
    stored = plan.inputs["w2"]
    assert all(dim_axes(dim) for dim in stored.dims)
    assert plan.claims["gaps"]["sum"] == pytest.approx(0.0, abs=1e-9)
