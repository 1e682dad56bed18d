"""Two copies of each kind of layer stand for all: sums, factors and plans are those of the full graph."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from meshwright.capture import Captured, capture, fold
from meshwright.core.graph import Graph, Input, Node, Ref, TensorType, verify
from meshwright.core.mesh import Mesh
from meshwright.examples.zoo import hugging_face
from meshwright.ops.factors import analyze
from meshwright.ops.table import rules_of
from meshwright.search.annotations import renumber
from meshwright.search.layer_groups import Folded, folded
from meshwright.search.modes import make_plan
from tests.breadth import first, quick

T = TensorType("f32", (4, 8))
W = TensorType("f32", (8, 8))
PINS = {
    "gpt2": {"*.c_attn": {"n": "tp"}, "*.c_fc": {"n": "tp"}},
    "llama": {f"*.{x}_proj": {"n": "tp"} for x in ("q", "k", "v", "gate", "up")},
    "t5": {f"*.{x}": {"n": "tp"} for x in ("q", "k", "v", "wi")},
    "bert": {f"*.{x}": {"n": "tp"} for x in ("query", "key", "value", "intermediate.dense")},
    "vit": {f"*.{x}_proj": {"n": "tp"} for x in "qkv"},
}
_captured: dict[str, Captured] = {}


def captured(name: str) -> Captured:
    if name not in _captured:
        found = capture(*hugging_face(name, layers=6))
        _captured[name] = replace(found, graph=renumber(found.graph))
    return _captured[name]


def layers(count: int, length: int = 5, *, extra: Callable[[int], str] | None = None) -> Graph:
    """Layers of linear, mul with a mask, relus and a residual; `extra` names a further parameter that layer i adds."""
    inputs = {"x": Input("x", "batch", "x", T), "mask": Input("mask", "buffer", "mask", T)}
    nodes: list[Node] = []
    stream = "x"

    def add(name: str, op: str, *args: object, module: str = "") -> str:
        nodes.append(Node(name, op, args, (), (T,), (True,), module))
        return name

    for i in range(count):
        inputs[f"w{i}"] = Input(f"w{i}", "parameter", f"w{i}", W, True)
        h = add(f"a{i}", "aten.linear.default", Ref(stream), Ref(f"w{i}"), module=f"layers.{i}.up")
        h = add(f"b{i}", "aten.mul.Tensor", Ref(h), Ref("mask"))
        for k in range(length - 4):
            h = add(f"c{i}_{k}", "aten.relu.default", Ref(h))
        other = extra(i) if extra else stream
        if extra:
            inputs[other] = Input(other, "parameter", other, T, True)
        h = add(f"d{i}", "aten.mul.Tensor", Ref(h), Ref(other))
        stream = add(f"e{i}", "aten.add.Tensor", Ref(h), Ref(stream))
    return verify(Graph("layers", tuple(inputs.values()), tuple(nodes), (("loss", stream),)))


def check_sums(made: Folded) -> None:
    """Any function of nodes, edges, or values with their readers: the weighted sum is the sum over the full graph."""
    draw = random.Random(0)
    names = (*made.weight, *(v for v in made.value_weight if v not in made.weight))
    kind = {name: draw.random() for name in names if name not in made.same}
    kind |= {name: kind[first] for name, first in made.same.items()}
    values = {v: kind[v] for n in made.graph.nodes for v in n.values}
    here = {**kind, **values}
    full: dict[str, float] = {
        **made.unfold_inputs({i.name: kind[i.name] for i in made.graph.inputs}),
        **made.unfold_values(values),
        **made.unfold({n.name: kind[n.name] for n in made.graph.nodes}),
    }

    def nodes(graph: Graph, of: Mapping[str, float], weight: Mapping[str, int] | None) -> float:
        return sum(of[n.name] ** 2 * (weight[n.name] if weight else 1) for n in graph.nodes)

    def edges(graph: Graph, of: Mapping[str, float], weight: Mapping[str, int] | None) -> float:
        return sum(
            of[u] / (1 + port + of[n.name]) * (weight[n.name] if weight else 1)
            for n in graph.nodes
            for port, u in enumerate(n.uses)
        )

    def hubs(graph: Graph, of: Mapping[str, float], weight: Mapping[str, int] | None) -> float:
        return sum(
            of[v] * sum({of[n.name] + port for n, port in uses}) * (weight[v] if weight else 1)
            for v, uses in graph.consumers.items()
        )

    for total in (nodes, edges):
        assert total(made.full, full, None) == pytest.approx(total(made.graph, here, made.weight))
    assert hubs(made.full, full, None) == pytest.approx(hubs(made.graph, here, made.value_weight))


@pytest.mark.zoo
@pytest.mark.parametrize("name", first(1, ("llama", "t5", *(n for n in PINS if n not in ("llama", "t5")))))
def test_sums_and_factors_of_the_zoo(name: str) -> None:
    graph, folding = captured(name).graph, captured(name).folding
    made = folded(graph, folding)
    verify(made.graph)
    assert len(made.graph.nodes) == len(graph.nodes) - sum(b.length * (b.repeats - 2) for b in folding.blocks)
    assert sum(made.weight.values()) == len(graph.nodes)
    assert sum(made.value_weight.values()) == len(graph.types)
    check_sums(made)
    full, small = analyze(graph, rules_of(graph)), analyze(made.graph, rules_of(made.graph))
    for node, site in made.unfold(small.sites).items():
        assert full.sites[node].trees == site.trees
        for letter in site.trees:
            assert full.unsharded[node, letter] == small.unsharded[site.node.name, letter]
            assert full.batch[node, letter] == small.batch[site.node.name, letter]
    assert full.dims == {
        **made.unfold_inputs({i.name: small.dims[i.name] for i in made.graph.inputs}),
        **made.unfold_values(small.dims),
    }
    for kind in ("types", "needs_grad"):
        full_kind, here = getattr(graph, kind), getattr(made.graph, kind)
        for value, stand_in in made.unfold_values({v: v for v in made.graph.producers}).items():
            assert (value in full_kind) == (stand_in in here)
            assert kind != "types" or full_kind[value] == here[stand_in]


@pytest.mark.zoo
@pytest.mark.parametrize(
    ("mode", "mesh"),
    [
        ("data_parallel", {"dp": 4}),
        ("sharding_propagation", {"tp": 4}),
        ("sharding_propagation", {"dp": 2, "tp": 2}),
    ],
)
@pytest.mark.parametrize("name", PINS)
@quick(lambda name, **_: name == "llama")  # the others have layers like those of llama
def test_plans_of_the_zoo(name: str, mode: str, mesh: Mapping[str, int]) -> None:
    graph, folding = captured(name).graph, captured(name).folding
    pins = PINS[name] if mode == "sharding_propagation" else None
    full = make_plan(graph, Mesh.of(mesh), mode, pins)
    small = make_plan(graph, Mesh.of(mesh), mode, pins, folding)
    assert small == full and small.to_json() == full.to_json()


def test_two_layers_stand_for_many() -> None:
    graph = layers(10)
    made = folded(graph, fold(graph))
    verify(made.graph)
    assert [n.name for n in made.graph.nodes] == [n.name for n in graph.nodes[:10]]
    assert made.graph.outputs == (("loss", "e1"),)
    assert [i.name for i in made.graph.inputs] == ["x", "mask", "w0", "w1"]
    assert set(made.weight.items()) >= {("a0", 1), ("a1", 9)}
    assert made.same == {f"{x}1": f"{x}0" for x in "abdew"} | {"c1_0": "c0_0"}
    assert made.unfold_inputs({i.name: i.name for i in made.graph.inputs})["w7"] == "w1"
    assert made.unfold({n.name: n.name for n in made.graph.nodes})["e9"] == "e1"
    check_sums(made)


def kept(graph: Graph, kinds: Mapping[str, Any] | None = None) -> list[int]:
    """The layers of which nodes are left."""
    made = folded(graph, fold(layers(10)), kinds)
    verify(made.graph)
    check_sums(made)
    return [int(n.name[1:]) for n in made.graph.nodes if n.name[0] == "a"]


def test_layers_that_are_told_apart_stay_apart() -> None:
    assert kept(layers(10), {"a3": "pinned"}) == [0, 1, 3, 4, 5]
    assert kept(layers(10), {f"a{i}": "pinned" for i in range(10)}) == [0, 1]
    assert kept(layers(10), {f"a{i}": i // 5 for i in range(10)}) == [0, 1, 5, 6]
    assert kept(layers(10), {"x": "no node", "e9": "last"}) == [0, 1, 9]


def test_a_value_that_others_read_ends_a_run() -> None:
    graph = layers(10)
    end = Node("end", "aten.add.Tensor", (Ref("e9"), Ref("c4_0")), (), (T,), (True,))
    assert kept(replace(graph, nodes=(*graph.nodes, end), outputs=(("loss", "end"),))) == [0, 1, 4, 5, 6]
    assert kept(replace(graph, outputs=(("loss", "e9"), ("hidden", "e5")))) == [0, 1, 6, 7]


def test_a_parameter_read_elsewhere_keeps_its_layer() -> None:
    graph = layers(10)
    end = Node("end", "aten.linear.default", (Ref("e9"), Ref("w4")), (), (T,), (True,))
    assert kept(replace(graph, nodes=(*graph.nodes, end), outputs=(("loss", "end"),))) == [0, 1, 4, 5, 6]


def test_a_parameter_that_two_layers_share_keeps_both() -> None:
    graph = layers(12, extra=lambda i: f"g{2 if i == 7 else i}")
    made = folded(graph, fold(graph))
    check_sums(made)
    assert [n.name for n in made.graph.nodes if n.name[0] == "a"] == [
        "a0",
        "a1",
        "a2",
        "a3",
        "a4",
        "a7",
        "a8",
        "a9",
    ]


def test_replaced_buffers_fold_with_their_layers() -> None:
    graph = layers(10, extra=lambda i: f"g{i}")
    folding = fold(graph)
    every = replace(graph, mutations=tuple((f"g{i}", f"d{i}") for i in range(10)))
    made = folded(every, folding)
    assert made.graph.mutations == (("g0", "d0"), ("g1", "d1"))
    one = folded(replace(graph, mutations=(("g4", "d4"),)), folding)
    assert one.graph.mutations == (("g4", "d4"),)
    assert [n.name for n in one.graph.nodes if n.name[0] == "a"] == ["a0", "a1", "a4", "a5", "a6"]


def test_pins_of_single_layers_are_planned_as_they_are() -> None:
    graph, mesh = layers(10), Mesh.of(tp=2)
    for pins in ({"layers.3.up": {"n": "tp"}}, {"layers.*.up": {"n": "tp"}}, {"%c8_0": {"d1": "tp"}}):
        full = make_plan(graph, mesh, "sharding_propagation", pins)
        assert make_plan(graph, mesh, "sharding_propagation", pins, fold(graph)) == full


def test_a_thousand_layers_are_two() -> None:
    graph = layers(1000, 65)
    folding = fold(graph)
    made = folded(graph, folding)
    names = made.unfold({n.name: n.name for n in made.graph.nodes})
    assert len(names) == 65_000 and len(made.graph.nodes) == 130
