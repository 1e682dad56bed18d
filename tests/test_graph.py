"""The graph prints, the print parses back, and verify names the first law that is broken."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.graph import (
    DTYPES,
    ROLES,
    Device,
    Dtype,
    Graph,
    Input,
    Node,
    Ref,
    TensorType,
    map_refs,
    prune,
    verify,
)
from meshwright.core.graph_text import parse, parse_type
from meshwright.errors import GraphError

names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
types = st.builds(
    TensorType, st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 300), max_size=4).map(tuple)
)
numbers = st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.booleans()
plain = numbers | st.none() | texts | st.sampled_from(sorted(DTYPES)).map(Dtype) | st.just(Device())


@st.composite
def graphs(draw: Any) -> Graph:
    """Any legal graph: nested arguments, several results, awkward strings."""
    fresh = iter(draw(st.lists(names, min_size=12, max_size=12, unique=True)))
    inputs = []
    for _ in range(draw(st.integers(1, 3))):
        ties = tuple(draw(st.lists(texts, max_size=2)))
        dim = draw(st.none() | st.integers(0, 3))
        kind = draw(types)
        grad = draw(st.booleans())
        inputs.append(Input(next(fresh), draw(st.sampled_from(ROLES)), draw(texts), kind, grad, ties, dim))
    known = [i.name for i in inputs]
    nodes = []
    for _ in range(draw(st.integers(0, 4))):
        values = st.recursive(
            plain | st.sampled_from(known).map(Ref),
            lambda s: st.lists(s, max_size=3).map(tuple),
            max_leaves=5,
        )
        outputs = tuple(draw(st.lists(types, min_size=0, max_size=3)))
        grads = tuple(draw(st.booleans()) and t.is_float for t in outputs)
        args = tuple(draw(st.lists(values, max_size=4)))
        keys = draw(st.lists(st.sampled_from(["dim", "scale", "dtype"]), max_size=2, unique=True))
        kwargs = tuple((key, draw(values)) for key in keys)
        op = draw(st.sampled_from(["aten.linear.default", "meshwright.dropout", "mylib.op.Tensor"]))
        node = Node(next(fresh), op, args, kwargs, outputs, grads, draw(texts), draw(texts))
        nodes.append(node)
        known += node.values
    mutations = tuple((draw(texts), draw(st.sampled_from(known))) for _ in range(draw(st.integers(0, 2))))
    return Graph(
        draw(texts), tuple(inputs), tuple(nodes), (("loss", draw(st.sampled_from(known))),), mutations
    )


def keeps_the_laws(graph: Graph) -> None:
    """It parses back, is pruned and knows who reads what: of one graph, because drawing one takes longer than that."""
    assert parse(str(verify(graph))) == graph
    small = prune(graph)
    assert verify(small).inputs == graph.inputs
    assert prune(small) == small
    read = {u for n in small.nodes for u in n.uses} | {v for _, v in (*small.outputs, *small.mutations)}
    assert all(read.intersection(n.values) for n in small.nodes)
    for node in graph.nodes:
        assert node.with_uses(node.uses) == node
        for port, name in enumerate(node.uses):
            assert (node, port) in graph.consumers[name]


@given(graphs())
@settings(max_examples=25)
def test_any_graph_parses_back_is_pruned_and_knows_who_reads(graph: Graph) -> None:
    keeps_the_laws(graph)


@pytest.mark.full
@given(graphs())
@settings(max_examples=200)
def test_many_graphs_parse_back_are_pruned_and_know_who_reads(graph: Graph) -> None:
    keeps_the_laws(graph)


@given(types)
def test_types_parse_back(type_: TensorType) -> None:
    assert parse_type(str(type_)) == type_


def test_references_are_replaced_anywhere() -> None:
    assert map_refs((Ref("a"), 1, (Ref("b"), ("x", Ref("a")))), lambda r: r.name) == (
        "a",
        1,
        ("b", ("x", "a")),
    )


F = TensorType("f32", (2,))
X = Input("x", "batch", "x", F)


def relu(name: str, use: str, grad: bool = False, type_: TensorType = F) -> Node:
    return Node(name, "aten.relu.default", (Ref(use),), (), (type_,), (grad,), source="m.py:3  relu(x)")


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (Graph("g", (Input("x", "weight", "x", F),), (), (("loss", "x"),)), "unknown role 'weight'"),
        (Graph("g", (X, X), (), (("loss", "x"),)), "%x is defined twice"),
        (
            Graph("g", (X,), (relu("a", "b"), relu("b", "x")), (("loss", "a"),)),
            "%a reads %b, which is not defined before",
        ),
        (Graph("g", (X,), (relu("x", "x"),), (("loss", "x"),)), "%x is defined twice"),
        (
            Graph("g", (X,), (relu("a", "x", True, TensorType("i64", ())),), (("loss", "a"),)),
            "cannot have a gradient",
        ),
        (
            Graph("g", (X,), (Node("a", "op.x", (), (), (F,), ()),), (("loss", "a"),)),
            "1 results and 0 gradient flags",
        ),
        (Graph("g", (X,), (), (("loss", "y"),)), "'loss' reads %y"),
        (Graph("g", (X,), (), (("loss", "x"),), (("bn.mean", "y"),)), "'bn.mean' reads %y"),
    ],
)
def test_verify_names_the_broken_law(graph: Graph, message: str) -> None:
    with pytest.raises(GraphError) as error:
        verify(graph)
    assert message in str(error.value)


def test_verify_says_where() -> None:
    with pytest.raises(GraphError, match=r"m\.py:3"):
        verify(Graph("g", (X,), (relu("a", "b"),), (("loss", "a"),)))


@pytest.mark.parametrize(
    "line",
    ["%a = aten.relu.default(%x)", "%a: f33[2] = aten.relu.default(%x)", "%a: f32[2] = op.x(import os)"],
)
def test_parse_names_the_line(line: str) -> None:
    with pytest.raises(GraphError, match="line 3 of the graph text"):
        parse(f'graph "g" {{\n  %x: f32[2] = batch("x")\n  {line}\n  return loss=%a\n}}')


def test_sizes() -> None:
    assert TensorType("bf16", (3, 4)).size_bytes == 24
    assert TensorType("f64", ()).size_bytes == 8
    assert not TensorType("b8", (2,)).is_float
