"""Graphs priced and solved as arrays over what is alike, held to the space that is made node by node."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench.graphs import distinct
from meshwright.compile import captured_of
from meshwright.core.graph import Graph
from meshwright.core.mesh import Mesh
from meshwright.core.techniques import techniques_from
from meshwright.cost.cluster import Cluster
from meshwright.ops.analysis import factors_of
from meshwright.search import planner as planner_module
from meshwright.search.budget import RECURSION
from meshwright.search.context import SearchContext
from meshwright.search.layer_groups import Folded, folded, without_folds
from meshwright.search.pins import module_seeds
from meshwright.search.planner import Planner, Request
from meshwright.search.recursion import recursive_programming, turns
from meshwright.search.solve import NoStates, Problem, eliminate
from meshwright.search.solve.eliminate import Eliminated
from meshwright.search.solve.eliminate_batched import Rounds, Tables, ends_of
from meshwright.search.space.build import Space
from meshwright.search.space.codes import NodeCodes
from meshwright.search.space.constraints import exactly
from meshwright.search.space.families import one_option
from meshwright.search.space.memory import memory_of
from meshwright.search.space.variables import Choice
from meshwright.search.vectorized import redistribution as ways
from meshwright.search.vectorized.prices import Priced
from meshwright.search.vectorized.spaces import array_space
from tests.breadth import first, quick
from tests.search.drawn import draw
from tests.search.planned import PINS, built, cluster

Pins = Mapping[str, Mapping[str, str]]
MODELS = ("mlp", "gpt", "llama", "resnet", "recommender", "wide gpt")
TURNS: dict[str, Sequence[Sequence[int]]] = {"2x3": ([0], [1], [0]), "8": ([0, 1], [2], [0])}


def planner(
    folds: Folded,
    on: Cluster,
    mesh: Mesh,
    pins: Pins | None = None,
    hosts: Sequence[str] = (),
    asked: Mapping[str, Any] | None = None,
) -> Planner:
    """`asked`: the techniques of a planner with a limit of memory."""
    context = SearchContext(folds.graph, factors_of(folds.graph), on.place(mesh))
    limit = None if asked is None else 1e9
    request = Request(on, memory_bytes=limit, techniques=techniques_from(asked or {}))
    return Planner(context, folds, module_seeds(context, pins or {}), request, frozenset(hosts))


def of_model(
    name: str,
    mesh: str,
    pins: Pins | None = None,
    hosts: Sequence[str] = (),
    asked: Mapping[str, Any] | None = None,
) -> Planner:
    captured = captured_of(*built(name))
    on = cluster("gpu", mesh)
    return planner(folded(captured.graph, captured.folding), on, on.mesh, pins, hosts, asked)


def on_nodes(graph: Graph, nodes: int, asked: Mapping[str, Any] | None = None) -> Planner:
    on = Cluster.preset("h100", nodes=nodes)
    return planner(without_folds(graph), on, on.mesh, asked=asked)


def of(rows: Mapping[str, np.ndarray]) -> Callable[[NodeCodes], np.ndarray]:
    return lambda codes: rows[codes.node.name]


def same_prices(here: Planner, turns: Sequence[Sequence[int]]) -> None:
    """Every state and every pair costs what it costs in a space, beside what the turns before have fixed."""
    arrays = here.arrays()
    now = np.zeros((len(arrays.names), len(here.context.mesh.axes)), dtype=np.int8)
    for turn in turns:
        here_now = dict(zip(arrays.names, now, strict=True))
        asked = Priced(arrays, turn, now)
        space = here.space(one_option(turn, of(here_now)))
        found, wanted = asked.tables.problem(), space.problem()
        assert list(space.variable.values()) == list(arrays.variable.values())
        for one, other in zip(found.unary, wanted.unary, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9)
        assert set(found.pairs) == set(wanted.pairs)
        for key, other in wanted.pairs.items():
            np.testing.assert_allclose(found.pairs[key], other, rtol=1e-9, atol=1e-15)
        states, price = asked.tables.solved()
        best = eliminate(wanted)
        assert math.isclose(price, best.price, rel_tol=1e-9)
        now = asked.rows(states)
        assert math.isclose(wanted.price(states.tolist()), best.price, rel_tol=1e-9)


@pytest.mark.parametrize("mesh", TURNS)
@pytest.mark.parametrize("model", MODELS)
@quick(lambda model, mesh: model == "mlp" or (mesh != "8" and model in ("gpt", "recommender")))
def test_prices_are_those_of_a_space(model: str, mesh: str) -> None:
    same_prices(of_model(model, mesh), TURNS[mesh])


def test_prices_where_sizes_tell_nodes_apart() -> None:
    """Sizes that powers of two do not divide, over more ranks than some sub-dims have room for."""
    same_prices(on_nodes(distinct(12), 128), ([0, 1, 2], [3, 4, 5], [6], [7, 8], [9], [2]))


@pytest.mark.parametrize("bits", [0, 4])
def test_prices_of_values_with_too_many_places(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all places of a value do not go into one number it is priced by itself: none do, and some."""
    monkeypatch.setattr(ways, "BITS", bits)
    same_prices(on_nodes(distinct(4), 2), ([0], [1, 2, 3], [0]))


def test_the_recursion_over_arrays_costs_what_its_space_says() -> None:
    here = on_nodes(distinct(12), 16)
    done = recursive_programming(
        here.space, here.context.mesh, vectorized=functools.partial(Priced, here.arrays())
    )
    node_by_node = recursive_programming(here.space, here.context.mesh)
    assert math.isclose(done.price, done.space.price(done.states).total, rel_tol=1e-9)
    assert done.price <= 1.002 * node_by_node.price


@pytest.mark.parametrize("model", ["mlp", "gpt", "recommender"])
def test_prices_beside_what_users_pin(model: str) -> None:
    same_prices(of_model(model, "2x3", PINS[model]), TURNS["2x3"])


def test_pins_tell_sizes_no_more_apart_than_they_are() -> None:
    """Twelve products of twelve sizes, all pinned alike: one kind more, and the prices of a space."""
    plain = on_nodes(distinct(12), 16)
    pins = {f"%up{i}": {"n": plain.context.mesh.axes[-1].name} for i in range(11)}
    here = planner(plain.folds, plain.request.cluster, plain.context.mesh, pins)
    assert len(here.arrays().sheets.kinds) == len(plain.arrays().sheets.kinds) + 1
    same_prices(here, ([0], [1, 2, 3], [0]))


def test_prices_where_the_host_runs_some_operators() -> None:
    graph = of_model("recommender", "2x3").context.graph
    tables = [n.name for n in graph.nodes if n.op == "aten.embedding.default"]
    assert tables
    same_prices(of_model("recommender", "2x3", hosts=tables), TURNS["2x3"])


def same_space(here: Planner) -> None:
    """The space that the recursion hands on is the one that is made node by node."""
    arrays = here.arrays()
    now = np.zeros((len(arrays.names), len(here.context.mesh.axes)), dtype=np.int8)
    for turn in turns(here.context.mesh):
        asked = Priced(arrays, turn, now)
        now = asked.rows(asked.tables.solved()[0])
    found = here.space(array_space(Priced(arrays, (), now)))
    wanted = here.space(exactly(dict(zip(arrays.names, now, strict=True))))
    assert found.variable == wanted.variable
    for one, other in zip(found.unary, wanted.unary, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-18)
    assert set(found.pairs) == set(wanted.pairs)
    for key, other in wanted.pairs.items():
        np.testing.assert_allclose(found.pairs[key], other, rtol=1e-9, atol=1e-15)
    states = eliminate(wanted.problem()).states
    assert found.choice(states) == wanted.choice(states)
    for one, other in zip(planner_memory(found), planner_memory(wanted), strict=True):
        np.testing.assert_allclose(one, other)


def planner_memory(space: Space) -> Sequence[np.ndarray]:
    return memory_of(space, 2).amounts


@pytest.mark.parametrize("model", ["wide gpt", "llama", "resnet"])
def test_the_space_of_one_choice_is_that_made_node_by_node(model: str) -> None:
    same_space(of_model(model, "2x3", PINS.get(model)))


def test_the_space_of_one_choice_where_weights_are_stored_cut_and_sizes_differ() -> None:
    same_space(on_nodes(distinct(12), 16))


def same_optima(here: Planner, turns: Sequence[Sequence[int]], scale: float) -> Choice:
    """With a price per byte the best choice costs what it costs in a space; what was found, as a space."""
    arrays, per_byte = here.arrays(demanding=True), scale * np.array([1.0, 0.5, 2.0, 1.5][: here.instants])
    now = np.zeros((len(arrays.names), len(here.context.mesh.axes)), dtype=np.int8)

    def best(space: Space) -> Eliminated:
        return eliminate(here.memory(space).weighed(space.problem(), per_byte))

    for turn in turns:
        asked = Priced(arrays, turn, now, per_byte)
        space = here.space(one_option(turn, of(dict(zip(arrays.names, now, strict=True)))))
        states, price = asked.tables.solved()
        assert math.isclose(price, best(space).price, rel_tol=1e-9)
        now = asked.rows(states)
    found = here.space(array_space(Priced(arrays, (), now, per_byte)))
    wanted = here.space(exactly(dict(zip(arrays.names, now, strict=True))))
    assert math.isclose(best(found).price, best(wanted).price, rel_tol=1e-9)
    assert found.choice(best(found).states) == wanted.choice(best(wanted).states)
    return found.choice(best(found).states)


TECHNIQUES: Sequence[Mapping[str, Any]] = (
    {},
    {"micro_batches": 4},
    {"slice_activation": True},
    {"recompute": "full", "micro_batches": 2},
    {"offload": ("optimizer", "activations")},
    {"offload": ("parameters",)},
)


@pytest.mark.parametrize("asked", first(3, TECHNIQUES[::-1]), ids=str)
def test_bytes_cost_what_they_cost_in_a_space(asked: Mapping[str, Any]) -> None:
    again = [
        len(same_optima(on_nodes(distinct(3), 2, asked), ([0], [1, 2, 3], [0]), scale).again)
        for scale in (1e-12, 1e-11)
    ]
    assert again[0] == 0 < again[1]


@pytest.mark.parametrize("model", ["wide gpt", "llama", "resnet", "recommender"])
@quick(lambda model: model in ("wide gpt", "recommender"))
def test_bytes_of_models_cost_what_they_cost_in_a_space(model: str) -> None:
    same_optima(of_model(model, "2x3", asked={}), TURNS["2x3"], 1e-10)


def test_the_recursion_over_arrays_with_a_price_of_bytes_takes_what_a_space_would() -> None:
    here = on_nodes(distinct(12), 16, {})
    per_byte = np.full(3, 1e-11)

    def weighed(space: Space) -> Problem:
        return here.memory(space).weighed(space.problem(), per_byte)

    priced = functools.partial(Priced, here.arrays(demanding=True), per_byte=per_byte)
    done = recursive_programming(here.space, here.context.mesh, vectorized=priced)
    node_by_node = recursive_programming(here.space, here.context.mesh, problem=weighed)
    cheapest = recursive_programming(here.space, here.context.mesh)
    bytes_of, others, free = (here.memory(x.space).totals(x.states) for x in (done, node_by_node, cheapest))
    assert bytes_of.max() <= 1.05 * others.max() and bytes_of.max() < 0.8 * free.max()
    assert weighed(done.space).price(done.states) <= 1.02 * node_by_node.price
    assert math.isclose(done.price, done.space.price(done.states).total, rel_tol=1e-9)


@pytest.mark.parametrize("start", range(0, 210, 30))
def test_rounds_find_what_elimination_finds(start: int) -> None:
    for seed in range(start, start + 30):
        problem = draw(seed, most=12)
        tables = Tables(Rounds(len(problem.unary), ends_of(list(problem.pairs))), np.array(problem.sizes))
        for v, row in enumerate(problem.unary):
            tables.add_states(np.array([v]), row[:, None])
        for number, (u, v) in enumerate(tables.rounds.ends.tolist()):
            tables.add_pairs(np.array([number]), problem.pairs[u, v][:, :, None])
        try:
            states, price = tables.solved()
        except NoStates:
            price = math.inf
        else:
            assert math.isclose(price, problem.price(states.tolist()), rel_tol=1e-12, abs_tol=1e-12), seed
        try:
            wanted = eliminate(problem).price
        except NoStates:
            wanted = math.inf
        assert price == pytest.approx(wanted, abs=1e-9), seed


def test_arrays_are_for_graphs_of_which_much_is_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    few = replace(RECURSION, single_space_nodes=20)
    monkeypatch.setattr(planner_module, "RECURSION", few)
    unlike = of_model("gpt", "8")
    assert len(unlike.codes) > 20 and unlike.vectorized() is None
    assert on_nodes(distinct(20), 1).vectorized() is not None
    fewer = replace(few, arrays_nodes=len(unlike.codes) - 1)
    monkeypatch.setattr(planner_module, "RECURSION", fewer)
    assert of_model("gpt", "8").vectorized() is not None
