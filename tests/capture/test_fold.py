"""Folding finds the layers, and only what is truly equal."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from meshwright.capture import Block, capture, fold
from meshwright.core.folding import signature
from meshwright.core.graph import Graph, Input, Node, Ref, TensorType, map_refs, verify
from meshwright.examples import gpt, mlp
from meshwright.examples.zoo import hugging_face
from tests.breadth import first
from tests.capture.run_graph import bind, interpret

T = TensorType("f32", (4, 8))
W = TensorType("f32", (8, 8))


def layers(
    count: int, *, shared: bool = False, skip: int | None = None, seeds: bool = True, masks: str = ""
) -> Graph:
    """`count` layers of linear, relu, dropout and residual; `skip` makes one layer read its grandparent. `masks` has a
    letter for the mask of each layer, again from the first one on; a mask is computed before all layers."""
    inputs = [Input("x", "batch", "x", T), Input("mask", "buffer", "mask", T)]
    inputs += [Input(f"w{i}", "parameter", f"w{i}", W, True) for i in range(1 if shared else count)]
    nodes: list[Node] = []
    stream = ["x"]

    def add(name: str, op: str, *args: object) -> str:
        nodes.append(Node(name, op, args, (), (T,), (True,)))
        return name

    for letter in sorted(set(masks)):
        nodes.append(Node(f"mask_{letter}", "aten.neg.default", (Ref("mask"),), (), (T,), (False,)))
    for i in range(count):
        h = add(f"a{i}", "aten.linear.default", Ref(stream[-1]), Ref("w0" if shared else f"w{i}"))
        h = add(f"b{i}", "aten.mul.Tensor", Ref(h), Ref(f"mask_{masks[i % len(masks)]}" if masks else "mask"))
        h = add(f"c{i}", "meshwright.dropout", Ref(h), 0.1, i if seeds else 0)
        h = add(f"d{i}", "aten.relu.default", Ref(h))
        stream.append(add(f"e{i}", "aten.add.Tensor", Ref(h), Ref(stream[-2] if i == skip else stream[-1])))
    return verify(Graph("layers", tuple(inputs), tuple(nodes), (("loss", stream[-1]),)))


def test_layers_fold() -> None:
    found = fold(layers(10))
    assert [(b.start, b.length, b.repeats) for b in found.blocks] == [(0, 5, 10)]
    assert found.unique_nodes == 5


def test_shared_weights_fold_with_another_key() -> None:
    (own,), (shared,) = fold(layers(6)).blocks, fold(layers(6, shared=True)).blocks
    assert (shared.length, shared.repeats) == (5, 6)
    assert fold(layers(3)).blocks[0].key == own.key


def test_another_wiring_ends_a_block() -> None:
    found = fold(layers(8, skip=4))
    covered = {i for b in found.blocks for i in range(b.start, b.stop)}
    assert max(b.repeats for b in found.blocks) <= 4
    assert all(b.start > 24 or b.stop <= 24 for b in found.blocks), "the odd layer is inside a block"
    assert len(covered) >= 30


@pytest.mark.parametrize(("masks", "count"), [("lg", 12), ("lllg", 14), ("lllllg", 62)])
def test_layers_that_take_turns_are_one_block(masks: str, count: int) -> None:
    """As local and global attention do, which differ in the mask that they read."""
    (block, *rest) = fold(layers(count, masks=masks)).blocks
    assert (block.start, block.length, block.repeats) == (2, 5 * len(masks), count // len(masks))
    assert all(b.start >= block.stop and b.repeats == 2 for b in rest), "of the layers left over"


def test_a_few_odd_layers_take_no_turns() -> None:
    """Equal neighbours leave out more than blocks of layers that take turns would."""
    blocks = fold(layers(12, masks="mmmmmmmmmmnn")).blocks
    assert [(b.start, b.length, b.repeats) for b in blocks] == [(2, 5, 10), (52, 5, 2)]


def test_another_literal_ends_a_block() -> None:
    graph = layers(8)
    odd = replace(graph.nodes[17], args=(graph.nodes[17].args[0], 0.0, 3))
    graph = replace(graph, nodes=(*graph.nodes[:17], odd, *graph.nodes[18:]))
    assert max(b.repeats for b in fold(graph).blocks) == 4


def test_floats_may_rise_with_the_layer() -> None:
    """As the rate of stochastic depth does; plans do not depend on it."""
    graph = layers(8)
    nodes = [
        replace(n, args=(n.args[0], 0.01 * (i + 1), i)) if i % 5 == 2 else n
        for i, n in enumerate(graph.nodes)
    ]
    (block,) = fold(replace(graph, nodes=tuple(nodes))).blocks
    assert block == fold(graph).blocks[0]


@pytest.mark.parametrize(
    ("op", "one", "other", "alike"),
    [
        ("aten.mul.Tensor", 0.5, 0.25, True),
        ("aten.mul.Tensor", 0.5, -2.0, True),
        ("aten.mul.Tensor", 2.0, 2, False),
        ("aten.mul.Tensor", 2, 3, False),
        ("aten.mul.Tensor", 0.5, 0.0, False),
        ("aten.mul.Tensor", 0.0, -0.0, False),
        ("aten.mul.Tensor", 0.5, float("inf"), False),
        ("aten.mul.Tensor", float("inf"), float("-inf"), False),
        ("aten.mul.Tensor", float("nan"), float("nan"), True),
        ("aten.pow.Tensor_Scalar", 2.0, 3.0, False),
    ],
)
def test_which_literals_are_alike(op: str, one: float, other: float, alike: bool) -> None:
    made = [Node("a", op, (Ref("x"), value), (), (T,), (True,)) for value in (one, other)]
    assert (signature(made[0]) == signature(made[1])) == alike


def test_nothing_to_fold() -> None:
    found = fold(layers(1))
    assert found.blocks == () and found.unique_nodes == 5
    assert fold(Graph("empty", (), (), ())).unique_nodes == 0


def test_names_do_not_matter() -> None:
    graph = layers(6)

    def other(name: str) -> str:
        return f"z_{name}" if name not in {i.name for i in graph.inputs} else name

    nodes = (
        replace(n, name=other(n.name), args=map_refs(n.args, lambda r: Ref(other(r.name))))
        for n in graph.nodes
    )
    renamed = replace(graph, nodes=tuple(nodes), outputs=(("loss", other(graph.loss)),))
    assert fold(verify(renamed)) == fold(graph)


class Decay(nn.Module):
    """A layer with a buffer of its own, from which it computes a factor, as linear attention does. It is read twice."""

    slope: torch.Tensor

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)
        self.register_buffer("slope", torch.full((24,), slope))

    def forward(self, x_bd: torch.Tensor) -> torch.Tensor:
        """[batch, width] → [batch, width]."""
        h_bd = self.down(torch.relu(self.up(x_bd)))
        kept_bd = torch.exp(-self.slope * 2) * torch.ones(len(x_bd), 24)
        return torch.tanh(x_bd * kept_bd + h_bd) * kept_bd


class Decays(nn.Module):
    """Layers of which each is called `times` times before the next, and all of them in so many `rounds`."""

    def __init__(self, count: int, times: int = 1, rounds: int = 1) -> None:
        super().__init__()
        self.enter = nn.Linear(24, 24)
        self.layers = nn.ModuleList(Decay(0.1 * i) for i in range(count))
        self.times, self.rounds = times, rounds

    def forward(self, x_bd: torch.Tensor) -> torch.Tensor:
        """[batch, width] → [batch, width]."""
        x_bd = self.enter(x_bd)
        for layer in [*self.layers] * self.rounds:
            for _ in range(self.times):
                x_bd = layer(x_bd)
        return x_bd


@pytest.mark.parametrize(
    ("made", "repeats"),
    [((6,), 6), ((6, 2), 6), ((1, 6), 6), ((2, 1, 4), 4)],
    ids=["once", "twice", "one layer", "two layers that take turns"],
)
def test_layers_with_work_on_their_own_buffers_fold(made: tuple[int, ...], repeats: int) -> None:
    torch.manual_seed(0)
    model, batch = Decays(*made).train(), {"x": torch.randn(8, 24)}
    c = capture(model, batch, lambda m, b: m(b["x"]).square().mean())
    (block,) = c.folding.blocks
    assert block.repeats == repeats
    outside = len(c.graph.nodes) - block.length * block.repeats
    assert outside < 16, "nothing of a layer is left before all layers, or it is there once"
    result = interpret(c.graph, bind(c.graph, c.constants, model, batch))
    assert torch.equal(result["loss"], model(batch["x"]).square().mean())


@pytest.mark.parametrize("count", first(1, [3, 2, 6]))
def test_layers_of_models(count: int) -> None:
    config = gpt.GPTConfig(vocabulary=96, width=48, layers=count, heads=4, sequence=24, dropout=0.1)
    c = capture(*gpt.build(config))
    (block,) = c.folding.blocks
    assert block.repeats == count
    modules = {
        n.module.split(".")[1] for n in c.graph.nodes[block.start : block.start + block.length] if n.module
    }
    assert modules == {"0"}, "a block is a layer, not the end of one and the start of the next"
    c = capture(*mlp.build(depth=count))
    assert [b.repeats for b in c.folding.blocks] == [count]


@pytest.mark.zoo
@pytest.mark.parametrize("name", first(1, ("bert", "llama", "gpt2", "qwen3", "vit")))
def test_layers_of_the_zoo(name: str) -> None:
    c = capture(*hugging_face(name, layers=3))
    (block,) = c.folding.blocks
    assert block.repeats == 3
    assert c.folding.unique_nodes == len(c.graph.nodes) - 2 * block.length


def test_a_thousand_layers_are_one_block() -> None:
    graph = layers(1000)
    found = fold(graph)
    assert found.blocks == (Block(0, 5, 1000, found.blocks[0].key),)
