"""Equal layers take the same strategies wherever they stand, and each kind of layer has its variables once."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.capture import Captured, capture
from meshwright.cost.cluster_data import Device, Level
from meshwright.search.equal_layers import ties_of
from meshwright.search.layer_groups import folded
from meshwright.search.techniques.layers import layers_of
from tests.breadth import first

TURNS = "rrrgrrrgrrrgrr"  # two of three periods stay after folding, and two layers

CORE = Device("a slow core", {"f32": 1e9}, 8_000_000_000, 1e9, launch_seconds=1e-7)
FOUR = mw.Cluster("four ranks", CORE, (Level("rank", 4, bytes_per_s=1e9, latency_seconds=1e-7),))


class Block(nn.Module):
    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.kind = kind

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        h = torch.relu(h) if self.kind == "r" else nn.functional.gelu(h)
        return x + scale * self.down(h)


class Turns(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.ones(2))
        self.layers = nn.ModuleList(Block(kind, width) for kind in TURNS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x, self.scales[number % 2])  # equal layers read it from different places
        return x.square().mean()


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


@pytest.fixture(scope="module")
def turns() -> Captured:
    torch.manual_seed(0)
    return capture(Turns(), torch.randn(8, 8), loss_of)


def test_each_kind_of_layer_has_its_variables_once(turns: Captured) -> None:
    folds = folded(turns.graph, turns.folding)
    ties, layers = ties_of(folds), layers_of(folds.graph)
    kinds = {layer.name: TURNS[int(layer.name.rpartition(".")[2])] for layer in layers}
    firsts = {layer.name: [ties.first(node.name) for node in layer.nodes] for layer in layers}
    assert len(layers) < len(TURNS)
    for one, other in itertools.combinations(layers, 2):
        assert (firsts[one.name] == firsts[other.name]) == (kinds[one.name] == kinds[other.name])
    stands_for = {layer.name: sum(ties.times(node.name) for node in layer.nodes) for layer in layers}
    assert sum(stands_for.values()) == sum(len(layer.nodes) for layer in layers_of(turns.graph))


def test_parameters_and_results_follow_their_layers(turns: Captured) -> None:
    folds = folded(turns.graph, turns.folding)
    ties = ties_of(folds)
    weights = [i for i in folds.graph.input_of("parameter") if i.target.endswith(".up.weight")]
    assert len({ties.first(i.name) for i in weights}) == 2
    relus = [n for n in folds.graph.nodes if n.op == "aten.relu.default"]
    assert len({ties.first(n.values[0]) for n in relus}) == 1 < len(relus)


def test_pins_set_a_layer_apart(turns: Captured) -> None:
    pinned = next(n.name for n in turns.graph.nodes if n.module == "layers.1.up")
    folds = folded(turns.graph, turns.folding, {pinned: "pinned"})
    ties = ties_of(folds)
    alone = [n.name for n in folds.graph.nodes if n.module.startswith("layers.1.")]
    others = {ties.first(n.name) for n in folds.graph.nodes if not n.module.startswith("layers.1.")}
    assert alone and not others.intersection(map(ties.first, alone))


@pytest.mark.parametrize("mode", first(1, ["auto", "recursive_programming", "dynamic_programming"]))
def test_equal_layers_are_sharded_in_the_same_way(mode: str) -> None:
    torch.manual_seed(0)
    model, batch = Turns(width=16), torch.randn(8, 16)
    plan = mw.plan(model, batch, loss=loss_of, cluster=FOUR, mode=mode)
    graph = capture(model, batch, loss_of).graph
    kinds = [
        [plan.strategies[node.name] for node in layer.nodes]
        for layer in layers_of(graph)
        if TURNS[int(layer.name.rpartition(".")[2])] == "r"
    ]
    assert any(strategy.splits for strategy in kinds[0])
    assert all(each == kinds[0] for each in kinds)
    mw.verify(model, batch, loss=loss_of, plan=plan)
