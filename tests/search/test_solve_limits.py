"""The cheapest choice under memory limits, against enumeration."""

from __future__ import annotations

import math

import numpy as np
import pytest

from meshwright.search.solve import NoStates, solve, solve_limited
from tests.search.drawn import draw, draw_memory
from tests.search.oracle import brute_force


def limits_for(problem, memory, seed: int) -> np.ndarray:
    """Between the fewest bytes of any choice and those of the cheapest one; now and then below the fewest."""
    rng = np.random.default_rng([seed, 2])
    cheapest = memory.totals(solve(problem).states)
    fewest = np.array([solve(memory.alone(problem, t)).price for t in range(memory.instants)])
    return fewest + (cheapest - fewest) * rng.uniform(-0.05, 1.05, memory.instants)


@pytest.mark.parametrize("start", range(0, 210, 14))
def test_feasible_and_between_bound_and_price(start):
    gaps = []
    for seed in range(start, start + 14):
        problem = draw(seed, most=5, states=4)
        memory = draw_memory(seed, problem)
        try:
            limits = limits_for(problem, memory, seed)
        except NoStates:
            with pytest.raises(NoStates):
                solve_limited(problem, memory, np.ones(memory.instants))
            continue
        hidden = 1.0 + 0.1 * (
            seed % 4
        )  # what the simulation needs over the sum: the bytes are an under-estimate

        def fits(states, memory=memory, limits=limits, hidden=hidden) -> bool:
            return bool((memory.totals(states) * hidden <= limits).all())

        truth = brute_force(problem.unary, problem.pairs, fits)
        told = seed % 2  # every other caller says by how much
        accept = (lambda s, m=memory, li=limits, h=hidden: m.totals(s) * h - li) if told else fits
        found = solve_limited(problem, memory, limits, accept, enough=0.0)
        assert found.bound <= truth + 1e-9, seed
        assert (found.multipliers >= 0).all()
        if found.states is None:
            assert found.price == math.inf and found.nearest is not None and found.least is not None
            gaps.append(math.isinf(truth))
            continue
        assert fits(found.states) and found.price == problem.price(found.states), seed
        assert found.price >= truth - 1e-9, seed
        gaps.append(found.price - truth < 1e-9)
    assert np.mean(gaps) >= 0.5
