"""Stages against every way to cut a small graph, and on real models: balance, what crosses, pins, memory."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.compile import captured_of
from meshwright.core.graph import Graph, Input, Node, Ref, TensorType
from meshwright.errors import PlanError
from meshwright.examples import gpt, mlp
from meshwright.ops.saved import saved
from meshwright.pipeline.split import Costs, copied, crossing, split


def chain(sizes: list[int], skips: list[tuple[int, int]]) -> Graph:
    """Operators one after another, each with a result of a size; `skips` are reads of an earlier result."""
    nodes, name = [], "x"
    for n, size in enumerate(sizes):
        more = tuple(Ref(f"n{a}") for a, b in skips if b == n and a < n - 1)
        kind = TensorType("f32", (size,))
        nodes.append(Node(f"n{n}", "test.op", (Ref(name), *more), (), (kind,), (True,), f"m{n}"))
        name = f"n{n}"
    entry = Input("x", "batch", "x", TensorType("f32", (1,)), needs_grad=True)
    return Graph("chain", (entry,), tuple(nodes), (("loss", name),))


def costs(graph: Graph, seconds: list[float], rate: float = 1e-3) -> Costs:
    """So many seconds an operator, and a link of `rate` seconds a byte."""
    times = {n.name: s for n, s in zip(graph.nodes, seconds, strict=True)}
    return Costs(times, {n.name: 1.0 for n in graph.nodes}, {}, lambda size: rate * size)


def slowest(graph: Graph, given: Costs, of: dict[str, int], stages: int) -> float:
    """What the slowest stage takes, worked out from the definition."""
    links = [0.0] * (stages + 1)
    for cut in range(1, stages):
        sizes = (graph.types[v].size_bytes * 2 for v in crossing(graph, of, cut))
        links[cut] = given.link(sum(sizes)) / 2
    spans = [sum(given.seconds[n] for n in of if of[n] == s) for s in range(stages)]
    return max(spans[s] + links[s] + links[s + 1] for s in range(stages))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_other_split_is_quicker(data):
    count = data.draw(st.integers(2, 9))
    stages = data.draw(st.integers(1, min(count, 4)))
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=count, max_size=count))
    seconds = data.draw(st.lists(st.floats(0.1, 5.0), min_size=count, max_size=count))
    skips = data.draw(st.lists(st.tuples(st.integers(0, count), st.integers(0, count)), max_size=3))
    graph = chain(sizes, skips)
    given_costs = costs(graph, seconds)
    best = math.inf
    for cuts in itertools.combinations(range(1, count), stages - 1):
        edges = [0, *cuts, count]
        of = {f"n{n}": s for s in range(stages) for n in range(edges[s], edges[s + 1])}
        best = min(best, slowest(graph, given_costs, of, stages))
    found = split(graph, stages, given_costs)
    assert slowest(graph, given_costs, dict(found.of), stages) == pytest.approx(max(found.seconds))
    assert best <= max(found.seconds) * (1 + 1e-9) <= best * 1.0101


def test_a_heavy_head_gets_a_stage_of_its_own():
    graph = chain([8] * 9, [])
    found = split(graph, 2, costs(graph, [1.0] * 8 + [8.0], rate=0.0))
    assert [found.of[f"n{n}"] for n in range(9)] == [0] * 8 + [1]
    assert found.seconds == (8.0, 8.0)


def test_of_equal_splits_the_one_that_sends_least_is_taken():
    graph = chain([100, 100, 1, 100, 100], [])
    found = split(graph, 2, costs(graph, [2.0, 1.999, 0.0, 2.0, 2.0], rate=0.0))
    assert [found.of[f"n{n}"] for n in range(5)] == [0, 0, 0, 1, 1]
    assert found.crossing == (("n2",),)


def test_memory_moves_the_cut_and_is_refused_when_nothing_fits():
    graph = chain([1] * 6, [])
    given_costs = costs(graph, [1.0] * 6, rate=0.0)
    even = split(graph, 2, given_costs)
    assert even.seconds == (3.0, 3.0)
    # The first stage holds two micro-batches, so it may have fewer operators.
    tight = split(graph, 2, given_costs, limit_bytes=4.0, in_flight=(2, 1))
    assert tight.seconds == (2.0, 4.0) and tight.memory == (4.0, 4.0)
    with pytest.raises(PlanError, match="no split into 2 stages fits") as raised:
        split(graph, 2, given_costs, limit_bytes=3.0, in_flight=(2, 1))
    assert "at best stage" in str(raised.value)


def test_wishes_are_kept_or_refused():
    graph = chain([1] * 6, [])
    given_costs = costs(graph, [1.0] * 6, rate=0.0)
    found = split(graph, 2, given_costs, pins={"n0": 0, "n1": 1})
    assert [found.of[f"n{n}"] for n in range(6)] == [0, 1, 1, 1, 1, 1]
    for pins, says in (
        ({"n1": 1, "n3": 0}, "after m1 in stage 1"),
        ({"n1": 2}, "from 0 to 1"),
        ({"n0": 1}, "leave no operator"),
    ):
        with pytest.raises(PlanError, match=says):
            split(graph, 2, given_costs, pins=pins)
    with pytest.raises(PlanError, match="7 pipeline stages for a model of 6 operators"):
        split(graph, 7, given_costs)


def of_model(graph: Graph) -> Costs:
    """Prices by size, for a split of a real model: what matters is that they are there."""
    held = {
        n.name: sum(
            graph.types[n.uses[p]].size_bytes for p in saved(n, graph.types, [True] * len(n.uses)).inputs
        )
        for n in graph.nodes
    }
    return Costs(
        {n.name: 1e-9 * sum(t.size_bytes for t in n.outputs) for n in graph.nodes},
        held,
        {i.name: 4.0 * i.type.size_bytes for i in graph.input_of("parameter")},
        lambda size: 1e-10 * size,
    )


@pytest.mark.parametrize("build", [gpt.build, mlp.build])
def test_real_models_are_cut_where_little_crosses(build):
    graph = captured_of(*build()).graph
    found = split(graph, 3, of_model(graph))
    assert set(found.of) | found.copied == {n.name for n in graph.nodes}
    assert not set(found.of) & found.copied
    # Nothing goes backward, and nothing that the batch alone decides is sent.
    for node in graph.nodes:
        for use in node.uses:
            made = graph.producers.get(use)
            if made is not None and made.name in found.of and node.name in found.of:
                assert found.of[made.name] <= found.of[node.name]
    for values in found.crossing:
        assert values and all(graph.producers[v].name not in found.copied for v in values)
    assert max(found.seconds) < 0.6 * sum(found.seconds)


def test_what_batch_or_parameters_alone_decide_is_made_in_each_stage():
    graph = captured_of(*gpt.build()).graph
    free = copied(graph)
    assert free
    roles = {i.name: {i.role} for i in graph.inputs}  # what a value follows from
    for node in graph.nodes:
        sources = set().union(*(roles[u] for u in node.uses))
        roles.update(dict.fromkeys(node.values, sources))
        mixed = {"batch", "parameter"} <= sources
        assert (node.name in free) == (not mixed), node.name
