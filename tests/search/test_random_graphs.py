"""Searches of random models against an integer program over the same space, and against every plan of the smallest."""

from __future__ import annotations

import itertools
import math

import pytest

from meshwright.core.graph import Graph
from meshwright.ops.analysis import factors_of
from meshwright.partition import partition
from meshwright.plan.plan import Plan, fingerprint
from meshwright.predict.price import program_price
from meshwright.search.solve import solve
from meshwright.search.space.build import Space
from meshwright.search.space.families import Family, named, runs
from meshwright.search.space.parameters import Storage
from tests.breadth import quick
from tests.search.oracle import integer_program
from tests.search.planned import cluster
from tests.search.random_graphs import random_graph

KINDS = ("gpu", "gloo")
MESHES = ("2x2", "2x3", "3")


def space_of(graph: Graph, kind: str, mesh: str, family: Family | None = None) -> Space:
    on = cluster(kind, mesh)
    axes = len(on.mesh.axes)
    stored = Storage(tuple((n,) for n in range(axes)), smallest_bytes=0)
    return Space(graph, factors_of(graph), on.mesh, on, family or named([[n] for n in range(axes)]), stored)


def exact(seed: int) -> None:
    """What the search finds is what HiGHS finds."""
    graph, mesh = random_graph(seed), "8" if seed % 10 == 9 else MESHES[seed % 3]
    family = runs(3, 2) if mesh == "8" else None  # product states of three axes are minutes of HiGHS
    problem = space_of(graph, KINDS[seed % 2], mesh, family).problem()
    found = solve(problem)
    unary = [1e6 * row for row in problem.unary]  # microseconds: HiGHS is exact to 1e-6 of its unit
    truth = 1e-6 * integer_program(unary, {key: 1e6 * m for key, m in problem.pairs.items()})
    assert found.exact and found.price == pytest.approx(truth, rel=1e-9), seed


@pytest.mark.parametrize("start", range(0, 12, 4))
@quick(lambda start: start < 8)
def test_the_optimum_is_that_of_the_integer_program(start: int) -> None:
    for seed in range(start, start + 4):
        exact(seed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("start", range(1000, 3000, 100))
def test_the_optimum_is_that_of_the_integer_program_on_many(start: int) -> None:
    for seed in range(start, start + 100):
        exact(seed)


SMALL = 3000  # plans of a model of which every program is made


def cheapest_program(graph: Graph, space: Space) -> float:
    """The least price of all programs that plans of a space give, none of which knows of the space."""
    found = math.inf
    for states in itertools.product(*(range(parts.shape[1]) for parts in space.unary)):
        if math.isinf(space.price(states).total):
            continue
        choice = space.choice(states)
        plan = Plan(
            space.mesh,
            "every",
            fingerprint(graph),
            choice.strategies,
            choice.inputs,
            hubs=choice.hubs,
            again=choice.again,
            prices=space.cluster.prices,
        )
        found = min(found, program_price(partition(graph, plan), space.cluster).total)
    return found


def of_two_ranks(seed: int) -> tuple[Graph, Space]:
    graph = random_graph(seed, most=3)
    return graph, space_of(graph, KINDS[seed % 2], "2")


def agrees_with_every_program(graph: Graph, space: Space) -> None:
    assert solve(space.problem()).price == pytest.approx(cheapest_program(graph, space), rel=1e-6)


@pytest.mark.full  # test_modes.py tries all of two layers
def test_no_program_of_a_small_model_is_cheaper() -> None:
    graph, space = of_two_ranks(46)
    assert space.hubs, "a value that is read twice"
    agrees_with_every_program(graph, space)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 300, 50))
def test_no_program_of_many_small_models_is_cheaper(start: int) -> None:
    seen = 0
    for seed in range(start, start + 50):
        graph, space = of_two_ranks(seed)
        if len(graph.nodes) > 2 and math.prod(parts.shape[1] for parts in space.unary) <= SMALL:
            agrees_with_every_program(graph, space)
            seen += 1
    assert seen > 4
