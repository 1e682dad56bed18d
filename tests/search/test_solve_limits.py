"""The cheapest choice under memory limits, against enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import linprog

from meshwright.search.solve import LimitedSolution, Memory, NoStates, Problem, solve, solve_limited
from meshwright.search.solve.multipliers import multipliers
from meshwright.search.solve.repair import Moves, mixes
from tests.search.builder import Builder
from tests.search.drawn import draw, draw_memory
from tests.search.oracle import brute_force


def limits_for(problem: Problem, memory: Memory, seed: int) -> np.ndarray:
    """Such that some choice drawn at random fits with at most a little room; one in seven fits nothing."""
    rng = np.random.default_rng([seed, 2])
    allowed = [s for s in itertools.product(*map(range, problem.sizes)) if math.isfinite(problem.price(s))]
    if not allowed:
        return np.ones(memory.instants)
    if seed % 7 == 6:
        return np.min([memory.totals(s) for s in allowed], axis=0) * 0.99
    return memory.totals(allowed[int(rng.integers(len(allowed)))]) * rng.uniform(1.0, 1.2)


def against_enumeration(seed: int) -> tuple[LimitedSolution, float] | None:
    """Solve problem `seed` and hold it against every choice; None where no choice has a price at all."""
    problem = draw(seed, most=5, states=4)
    memory = draw_memory(seed, problem)
    limits = limits_for(problem, memory, seed)
    if math.isinf(brute_force(problem.unary, problem.pairs)):
        with pytest.raises(NoStates):
            solve_limited(problem, memory, limits)
        return None
    hidden = 1.0 + 0.05 * (seed % 4)  # what the simulation needs over the sum: the bytes under-estimate

    def fits(states: tuple[int, ...]) -> bool:
        return bool((memory.totals(states) * hidden <= limits).all())

    def missed(states: tuple[int, ...]) -> np.ndarray:
        return memory.totals(states) * hidden - limits

    truth = brute_force(problem.unary, problem.pairs, fits)
    found = solve_limited(problem, memory, limits, missed if seed % 2 else fits, enough=0.0)
    assert found.bound <= truth + 1e-9, seed
    assert (found.multipliers >= 0).all()
    if found.states is None:
        assert found.price == math.inf and found.nearest is not None and found.least is not None
    else:
        assert fits(found.states) and found.price == problem.price(found.states), seed
        assert found.price >= truth - 1e-9, seed
    return found, truth


def hit(found: LimitedSolution, truth: float) -> bool:
    """The optimum was found; or there is none, and none was found."""
    return found.price == truth or abs(found.price - truth) < 1e-9


@pytest.mark.parametrize("start", range(0, 70, 14))
def test_what_is_found_fits_and_lies_between_bound_and_price(start):
    results = [r for seed in range(start, start + 14) if (r := against_enumeration(seed))]
    assert np.mean([hit(*r) for r in results]) >= 0.75


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 3100, 100))
def test_on_many(start):
    results = [r for seed in range(start, start + 100) if (r := against_enumeration(seed))]
    assert np.mean([hit(*r) for r in results]) >= 0.95
    # what is missed for good: a choice fits, and none was found
    assert np.mean([f.states is None and math.isfinite(truth) for f, truth in results]) <= 0.02


@pytest.mark.parametrize("seed", range(40))
def test_multipliers_solve_their_linear_program(seed):
    """The same program given to HiGHS: equal optimum, and the multipliers reach it as a dual bound."""
    rng = np.random.default_rng(seed)
    count, instants = int(rng.integers(1, 30)), int(rng.integers(1, 5))
    prices, amounts = rng.normal(5, 2, count), rng.random((count, instants)) * 2
    limits, far = np.ones(instants), 100.0
    found, high, mix = multipliers(prices, amounts, limits, far)
    excess = np.vstack([amounts - limits, -np.ones(instants)])
    cost = np.append(prices, far)
    truth = linprog(cost, A_ub=excess.T, b_ub=np.zeros(instants), A_eq=np.ones((1, count + 1)), b_eq=[1.0])
    assert high == pytest.approx(truth.fun, abs=1e-8)
    assert (cost + excess @ found).min() == pytest.approx(truth.fun, abs=1e-8)
    assert sum(mix.values()) == pytest.approx(1.0)


def blocks(count: int, states: int, seed: int) -> tuple[Problem, Memory]:
    """A residual chain whose cheap states need much memory."""
    rng = np.random.default_rng(seed)
    builder, amounts = Builder(), []
    for v in range(count):
        need = rng.choice([1.0, 0.5, 0.25, 0.125], states)
        builder.add_variable(rng.exponential(0.2, states) + 0.3 / need)
        amounts.append(np.stack([need, need * rng.random(states)], axis=1) * 1e9)
        for u in {max(0, v - 1), max(0, v - 3)} - {v}:
            builder.add_pair(u, v, rng.exponential(0.5, (states, states)))
    return builder.problem(), Memory(tuple(amounts))


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_the_gap_is_small_where_there_are_many_variables(share):
    problem, memory = blocks(30, 10, seed=5)
    most = memory.totals(solve(problem).states)
    least = np.array([solve(memory.alone(problem, t)).price for t in range(2)])
    limits = least + share * (most - least)
    found = solve_limited(problem, memory, limits)
    assert found.states is not None and (memory.totals(found.states) <= limits * (1 + 1e-9)).all()
    assert found.price - found.bound <= 0.02 * found.price
    # the multipliers are prices per byte: at them, an unlimited solve gives the bound
    weighed = solve(memory.weighed(problem, found.multipliers))
    assert weighed.bound - found.multipliers @ limits <= found.price + 1e-9


def test_room_for_all_costs_one_solve_and_no_multiplier():
    problem, memory = blocks(10, 6, seed=1)
    found = solve_limited(problem, memory, [math.inf, 1e30])
    assert found.solves == 1 and not found.multipliers.any()
    assert found.price == solve(problem).price == found.bound


def test_nothing_fits_and_the_report_says_how_much_is_needed():
    problem, memory = blocks(8, 5, seed=2)
    least = np.array([solve(memory.alone(problem, t)).price for t in range(2)])
    found = solve_limited(problem, memory, least * [0.9, 1.5])
    assert found.states is None and found.bound == math.inf  # a proof
    np.testing.assert_allclose(found.least, least, rtol=1e-9)
    assert found.nearest is not None and memory.totals(found.nearest)[0] >= least[0] * (1 - 1e-9)


def test_a_part_without_a_known_choice_is_searched_on(monkeypatch):
    """A solve may end without a choice of its part, where to prove that there is none takes too much work."""
    calls: list[int] = []

    def sometimes(problem, **options):
        calls.append(0)
        if len(calls) % 3 == 0:
            raise NoStates(None, proven=False)
        return solve(problem, **options)

    monkeypatch.setattr("meshwright.search.solve.lagrange.solve", sometimes)
    for seed in range(40):
        calls.clear()
        against_enumeration(seed)


def test_a_refusal_without_a_number_tightens_until_it_is_accepted():
    problem, memory = blocks(20, 8, seed=3)
    limits = memory.totals(solve(problem).states) * 0.7
    asked = []

    def fits(states: tuple[int, ...]) -> bool:
        asked.append(states)
        return bool((memory.totals(states) * 1.1 <= limits).all())

    found = solve_limited(problem, memory, limits, fits)
    held = solve_limited(problem, memory, limits / 1.1)
    assert found.states is not None and (memory.totals(found.states) * 1.1 <= limits).all()
    assert len(asked) == len(set(asked)), "no states are simulated twice"
    assert held.bound - 1e-9 <= found.price <= held.price * 1.03
    assert found.bound <= held.price


def test_an_interrupt_returns_what_was_accepted():
    problem, memory = blocks(20, 8, seed=4)
    limits = memory.totals(solve(problem).states) * 0.8

    prices = []
    found = solve_limited(
        problem,
        memory,
        limits,
        progress=lambda stage, done, total, price, bound: prices.append(price),
        enough=0.0,
        ended=lambda: prices != [] and prices[-1] < math.inf,
    )
    assert found.stopped and found.states is not None
    assert (memory.totals(found.states) <= limits).all() and found.bound <= found.price


@pytest.mark.parametrize("seed", range(30))
def test_moves_know_what_each_change_costs(seed):
    problem = draw(3 * seed, most=5, states=4)
    memory = draw_memory(seed, problem)
    moves = Moves(problem, memory, (0,) * len(problem.unary))
    rng = np.random.default_rng(seed)
    for _ in range(4):
        now = tuple(moves.states)
        for v, k in enumerate(problem.sizes):
            for s in range(k):
                then = (*now[:v], s, *now[v + 1 :])
                assert moves.dearer[v][s] == pytest.approx(problem.price(then) - problem.price(now), abs=1e-9)
                np.testing.assert_allclose(
                    moves.more[v][s], memory.totals(then) - memory.totals(now), atol=1e-9
                )
        v = int(rng.integers(len(now)))
        moves.make(v, int(rng.integers(problem.sizes[v])))
    np.testing.assert_allclose(moves.totals, memory.totals(moves.states), atol=1e-9)


def test_a_mix_takes_over_the_groups_that_fit():
    """Four variables in two pairs; the second pair saves more per byte, and only one of the two has room."""
    builder = Builder()
    for _ in range(4):
        builder.add_variable([10.0, 0.0])
    builder.add_pair(0, 1, [[0, 50], [50, 0]])
    builder.add_pair(2, 3, [[3, 50], [50, 0]])
    memory = Memory(tuple(np.array([[0.0], [need]]) for need in (5.0, 5.0, 4.0, 4.0)))
    found = list(mixes(builder.problem(), memory, (0, 0, 0, 0), (1, 1, 1, 1), np.array([10.0])))
    assert found[0] == (0, 0, 1, 1)
