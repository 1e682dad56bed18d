"""A part of a concatenation that is one itself (Mamba's projection of gate, inputs and steps): sizes and places."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.capture import capture
from meshwright.core.layout import Cat, SubDim, dim_axes, dim_size
from meshwright.core.layout_text import parse_layout
from meshwright.partition import partition
from meshwright.predict.price import program_price
from meshwright.search.space.codes import place_dims, value_of


class Mixer(nn.Module):
    """A projection that is split in three, and the middle part again."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(64, 32 + 48 + 16), nn.Linear(16, 64)

    def forward(self, x: Tensor) -> Tensor:
        gate, both, steps = self.inward(x).split([32, 48, 16], dim=-1)
        inputs, keys = both.split([32, 16], dim=-1)
        return self.outward((gate * inputs).view(*x.shape[:-1], 2, 16).sum(-2) * keys * steps)


def test_sizes_add_up_and_axes_go_where_they_belong() -> None:
    dims = parse_layout("[{8 16 | {8 4 | 8 2} | 8} 3, 40]").dims
    value = value_of(dims, 2)
    assert math.prod(sum(map(math.prod, item)) for item in value.sizes) == math.prod(map(dim_size, dims))
    for place in range(len(value.places)):
        axes = [("a",) if k == place else () for k in range(len(value.places))]
        nested, *others = [item for dim in place_dims(dims, value, axes) for item in dim]
        assert isinstance(nested, Cat) and dim_axes((nested,)) == ()
        assert [i.axes for i in others if isinstance(i, SubDim)] == axes


def loss(model: Mixer, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


def test_the_search_prices_what_the_program_does() -> None:
    model, batch = Mixer(), {"x": torch.randn(65536, 64)}
    cluster = mw.Cluster.preset("h100", nodes=1)
    plan = mw.plan(model, batch, loss=loss, cluster=cluster, mode="dynamic_programming")
    (nested,) = [i for dim in plan.inputs["inward_weight"].dims for i in dim if isinstance(i, Cat)]
    assert any(isinstance(i, Cat) for part in nested.parts for i in part)
    price = program_price(partition(capture(model, batch, loss).graph, plan), cluster)
    assert math.isclose(plan.claims["price_seconds"], price.total, rel_tol=1e-6)
