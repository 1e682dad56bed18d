"""Bounds, pruning and the whole solve, against enumeration and an integer program."""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import replace

import numpy as np
import pytest

from meshwright.search.budget import SOLVE
from meshwright.search.solve import NoStates, Problem, Solution, completed, eliminate, solve
from meshwright.search.solve.trws import Sweeps, consistent
from tests.search.builder import Builder
from tests.search.drawn import draw
from tests.search.oracle import brute_force, integer_program

bounds = sys.modules[solve.__module__]


@pytest.fixture
def thorough(monkeypatch):
    """Small problems are easy enough to eliminate at once; here they go all the way round."""
    monkeypatch.setattr(bounds._Search, "_easy", lambda self, part, rounds: 0.0)
    monkeypatch.setattr(bounds, "SOLVE", replace(SOLVE, modest_work=0.0))


def check(problem: Problem, truth: float, **options) -> Solution | None:
    if math.isinf(truth):
        with pytest.raises(NoStates):
            solve(problem, **options)
        return None
    found = solve(problem, **options)
    assert found.price == problem.price(found.states)
    assert found.bound <= truth + 1e-9
    assert found.price >= truth - 1e-9
    if found.exact:
        assert found.price == pytest.approx(truth, abs=1e-9) and found.bound == found.price
    return found


@pytest.mark.parametrize("start", range(0, 210, 21))
def test_exact_on_small_problems(start, thorough):
    for seed in range(start, start + 21):
        problem = draw(seed, most=6, states=4)
        found = check(problem, brute_force(problem.unary, problem.pairs))
        assert found is None or found.exact, seed


def test_a_level_below_all_states_of_a_variable_leaves_nothing_to_eliminate(thorough, monkeypatch):
    asked = []

    def too_low(self, sweeps, whole, budget):
        asked.append(budget)
        return bounds._Few(self.bound - 1.0, [np.zeros(0, np.intp) for _ in sweeps.least], whole)

    monkeypatch.setattr(bounds._Search, "_affordable", too_low)
    for seed in range(300):
        problem = draw(seed, most=6, states=4)
        check(problem, brute_force(problem.unary, problem.pairs))
    assert asked


@pytest.mark.parametrize("start", range(280, 340, 12))
def test_states_known_before_change_no_optimum(start, thorough):
    for seed in range(start, start + 12):
        problem = draw(seed, most=6, states=4)
        truth = brute_force(problem.unary, problem.pairs)
        if math.isfinite(truth):
            best = eliminate(problem).states
            for first in (tuple(0 for _ in best), completed(problem, {0: best[0]}), best):
                check(problem, truth, first=first)
            assert completed(problem, dict(enumerate(best[:-1])))[:-1] == best[:-1]
            assert problem.price(completed(problem, dict(enumerate(best[:-1])))) == pytest.approx(truth)


@pytest.mark.parametrize("seed", range(340, 380))
def test_states_known_before_are_no_bound(seed):
    """Where the problem is eliminated at once no sweep has made a bound yet: what is known must not pass for it."""
    problem = draw(seed, most=6, states=4)
    truth = brute_force(problem.unary, problem.pairs)
    worst = tuple(int(row.argmax()) for row in problem.unary)
    if math.isfinite(truth):
        found = check(problem, truth, first=worst)
        assert found is not None and found.exact and found.price == pytest.approx(truth, abs=1e-9)


@pytest.mark.parametrize("start", range(210, 280, 7))
def test_with_too_little_work_the_bound_still_holds(start, thorough):
    for seed in range(start, start + 7):
        if seed % 3 == 1:  # with forbidden entries a solve may find nothing, and says so
            continue
        problem = draw(seed, most=6, states=4)
        for limit in (0.0, 20.0, 60.0):
            check(problem, brute_force(problem.unary, problem.pairs), limit_work=limit)


@pytest.mark.parametrize("seed", range(60))
def test_a_state_above_the_optimum_is_in_no_optimum(seed):
    """`least` holds for each state: the best price with that state, by enumeration, is never below it."""
    problem = draw(seed, most=5, states=4)
    try:
        kept = consistent(problem)
    except NoStates:
        assert math.isinf(brute_force(problem.unary, problem.pairs))
        return
    for row, k in zip(problem.unary, kept, strict=True):
        assert set(k) <= set(np.flatnonzero(np.isfinite(row)))
    problem = problem.only(kept)
    sweeps = Sweeps(problem)
    best = [np.full(k, math.inf) for k in problem.sizes]
    for states in itertools.product(*map(range, problem.sizes)):
        price = problem.price(states)
        for v, s in enumerate(states):
            best[v][s] = min(best[v][s], price)
    before = -math.inf
    for _ in range(6):
        bound = sweeps.round()
        assert before - 1e-9 <= bound <= best[0].min() + 1e-9
        before = bound
        for least, truth in zip(sweeps.least, best, strict=True):
            assert (least <= truth + 1e-9).all()


@pytest.mark.parametrize("seed", range(0, 70, 7))
def test_a_chain_is_exact_in_one_round(seed):
    """Seeds that are multiples of seven are chains: bound, every reduced cost and the decoded choice are exact."""
    problem = draw(seed, most=7, states=5)
    if seed % 3 == 1:
        return
    sweeps = Sweeps(problem)
    truth = eliminate(problem).price
    assert sweeps.round() == pytest.approx(truth, abs=1e-9)
    assert problem.price(sweeps.decode()) == pytest.approx(truth, abs=1e-9)
    for v in range(len(problem.unary)):
        for s in range(problem.sizes[v]):
            fixed = [np.arange(k) for k in problem.sizes]
            fixed[v] = np.array([s])
            assert sweeps.least[v][s] == pytest.approx(eliminate(problem.only(fixed)).price, abs=1e-9)


@pytest.mark.parametrize("seed", range(0, 60, 2))
def test_a_solution_bounds_the_price_with_each_state(seed, thorough):
    problem = draw(seed, most=5, states=4)
    if math.isinf(brute_force(problem.unary, problem.pairs)):
        return
    found = solve(problem)
    for v, row in enumerate(found.least):
        for s, least in enumerate(row):
            truth = brute_force(problem.unary, problem.pairs, lambda states, v=v, s=s: states[v] == s)
            assert least <= truth + 1e-9


def layers(count: int, states: int, seed: int, hub: bool = False) -> Problem:
    """Blocks like a transformer's: a residual stream, three readers of one value, joins; perhaps one input for all."""
    rng = np.random.default_rng(seed)
    builder = Builder()

    def variable(*sources: int) -> int:
        v = builder.add_variable(rng.exponential(1, states))
        for u in sources:
            builder.add_pair(
                u, v, rng.exponential(1, (states, states)) * (rng.random((states, states)) > 0.1)
            )
        return v

    x = variable()
    bias = variable() if hub else None
    for _ in range(count):
        h = variable(x)
        q, k, v = (variable(h) for _ in range(3))
        scores = variable(q, k, *([bias] if bias is not None else []))
        x = variable(variable(scores, v), x)
        wide = variable(x)
        x = variable(variable(wide), x)
    return builder.problem()


@pytest.mark.parametrize("hub", [False, True])
def test_layers_equal_plain_elimination(hub, thorough):
    problem = layers(4, 12, seed=3, hub=hub)
    found = solve(problem)
    assert found.exact
    assert found.price == pytest.approx(eliminate(problem).price, abs=1e-9)


def test_a_second_solve_starts_where_the_first_ended(thorough):
    problem = layers(6, 14, seed=1)
    first = solve(problem)
    dearer = Problem(tuple(row + 0.01 * np.arange(len(row)) for row in problem.unary), problem.pairs)
    seen: list[float] = []
    again = solve(dearer, start=first.messages, progress=lambda *a: seen.append(a[4]))
    assert again.exact and again.price == pytest.approx(eliminate(dearer).price, abs=1e-9)
    cold: list[float] = []
    solve(dearer, progress=lambda *a: cold.append(a[4]))
    assert seen[0] > cold[0]  # the first bound


def test_the_same_answer_every_time(thorough):
    problem = layers(5, 9, seed=2)
    assert len({solve(problem).states for _ in range(3)}) == 1


def test_progress_is_told_and_an_interrupt_returns_the_best_so_far(thorough):
    problem = layers(5, 20, seed=4)
    told = []
    full = solve(problem, progress=lambda *a: told.append(a))
    assert {stage for stage, *_ in told} <= {"bound", "eliminate"} and told
    for _, done, total, price, bound in told:
        assert 0 < done <= total and bound <= full.price + 1e-9 <= price + 2e-9

    found = solve(problem, ended=lambda: True)
    assert found.stopped and not found.exact
    assert found.bound <= full.price <= found.price == problem.price(found.states)


def test_forbidden_through_neighbours_is_found_without_elimination():
    """x0 must equal x1, x1 must equal x2, x2 must differ from what x0 may be."""
    builder = Builder()
    for allowed in ((0, np.inf), (0, 0), (np.inf, 0)):
        builder.add_variable(allowed)
    same = [[0, np.inf], [np.inf, 0]]
    builder.add_pair(0, 1, same)
    builder.add_pair(1, 2, same)
    with pytest.raises(NoStates, match="variable 1 has no state"):
        solve(builder.problem())


@pytest.mark.slow
@pytest.mark.parametrize("start", range(4000, 6100, 100))
def test_exact_on_many(start, thorough):
    for seed in range(start, start + 100):
        problem = draw(seed, most=12, states=5)
        found = check(problem, integer_program(problem.unary, problem.pairs))
        assert found is None or found.exact, seed
