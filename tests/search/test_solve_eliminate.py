"""Elimination against enumeration and against an integer program."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from meshwright.search.solve import NoStates, Problem, eliminate, estimate
from tests.breadth import quick
from tests.search.builder import Builder
from tests.search.drawn import draw
from tests.search.oracle import brute_force, integer_program


def best(problem: Problem, **options) -> float:
    try:
        found = eliminate(problem, **options)
    except NoStates:
        return math.inf
    assert found.price == problem.price(found.states)
    return found.price


@pytest.mark.parametrize("seed", range(0, 210, 7))
@quick(lambda seed: seed % 21 == 0)
def test_equals_both_oracles(seed):
    for s in range(seed, seed + 7):
        problem = draw(s, most=6, states=4)
        truth = brute_force(problem.unary, problem.pairs)
        assert best(problem) == pytest.approx(truth, abs=1e-9), s
        assert integer_program(problem.unary, problem.pairs) == pytest.approx(truth, abs=1e-6), s


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 3100, 100))
def test_equals_the_integer_program_on_many(start):
    for s in range(start, start + 100):
        problem = draw(s, most=12, states=5)
        truth = integer_program(problem.unary, problem.pairs)
        assert best(problem) == pytest.approx(truth, abs=1e-9), s


def ring(n: int, k: int, seed: int = 0) -> Problem:
    rng = np.random.default_rng(seed)
    builder = Builder()
    for _ in range(n):
        builder.add_variable(rng.random(k))
    for v in range(n):
        builder.add_pair(v, (v + 1) % n, rng.random((k, k)))
    return builder.problem()


def test_chunks_give_what_the_whole_sum_gives(monkeypatch):
    """Chunks cut rows and states unevenly; they must not change the result."""
    problem = ring(5, 13)
    whole = best(problem)
    for block in (1, 7, 13 * 13, 5 * 13 * 13 + 1):
        monkeypatch.setattr(sys.modules[eliminate.__module__], "BLOCK", block)
        assert best(problem) == whole


def test_the_estimate_counts_what_is_done():
    problem = ring(4, 10)
    plan = estimate(problem)
    # the first two are minima over products of three, then two variables are left, then one
    assert plan.work == 10**3 + 10**3 + 10**2 + 10
    assert plan.largest == 100
    assert sorted(plan.order) == [0, 1, 2, 3]


def test_a_hub_costs_one_dimension_not_all():
    """Every variable of a chain reads one input: tables name the input and one neighbour, whatever the length."""
    builder = Builder()
    hub = builder.add_variable(np.zeros(4))
    for i in range(30):
        v = builder.add_variable(np.arange(5.0))
        builder.add_pair(hub, v, np.ones((4, 5)))
        if i:
            builder.add_pair(v - 1, v, np.ones((5, 5)))
    assert estimate(builder.problem()).largest <= 4 * 5


def test_variables_of_one_state_cost_nothing():
    builder = Builder()
    for k in (1, 50, 1, 50, 1):
        builder.add_variable(np.zeros(k))
    for u in range(5):
        for v in range(u):
            sizes = [(1, 50, 1, 50, 1)[i] for i in (u, v)]
            builder.add_pair(u, v, np.full(sizes, 2.0))
    problem = builder.problem()
    assert estimate(problem).work <= 50 * 50 + 50 + 3
    assert best(problem) == 20.0


def test_builder_adds_transposes_and_takes_the_diagonal():
    builder = Builder()
    u = builder.add_variable([1.0, 2.0])
    v = builder.add_variable([0.0, 0.0, 0.0])
    matrix = np.arange(6.0).reshape(3, 2)
    builder.add_pair(v, u, matrix)
    builder.add_pair(u, v, matrix.T)
    builder.add_pair(u, u, [[10.0, 99.0], [99.0, 20.0]])
    problem = builder.problem()
    assert problem.price([1, 2]) == 22.0 + 2 * matrix[2, 1]
    assert problem.price([0, 1]) == 11.0 + 2 * matrix[1, 0]


def test_what_is_not_allowed_is_an_error():
    builder = Builder()
    builder.add_variable([0.0, np.inf])
    builder.add_variable([0.0])
    builder.add_pair(0, 1, [[np.inf], [0.0]])
    with pytest.raises(NoStates, match="no choice of states"):
        eliminate(builder.problem())


def test_float32_misses_by_rounding_only():
    problem = ring(8, 20)
    assert best(problem, dtype=np.float32) == pytest.approx(best(problem), rel=1e-6)
