"""The simulation of failures against closed forms, and the intervals of checkpoints against Young and Daly."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from meshwright.predict.goodput import (
    TIERS,
    Failures,
    Running,
    best_interval,
    fatal_rate,
    goodput,
    predicted,
    simulate,
    with_restarts,
    young_interval,
)
from tests.breadth import quick

LLAMA = Running(ranks=16_384, replicas=128)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("job", [LLAMA, replace(LLAMA, repair=86_400.0, save=60.0, copy_share=0.05)])
@quick(lambda tier, job: job is LLAMA)
def test_the_simulation_gives_the_closed_form(tier, job):
    found = goodput(job, Failures(), tier, days=5400.0)
    assert found.simulated == pytest.approx(found.predicted, abs=2e-3)


def test_llama_was_interrupted_every_three_hours():
    assert 1 / fatal_rate(LLAMA, Failures(), "restart") == pytest.approx(54 * 86_400 / 419)


def test_without_failures_only_saves_cost():
    calm = Failures(per_rank_s=1e-30)
    assert simulate(LLAMA, calm, "restart", 90.0, days=10.0) == pytest.approx(0.9, abs=1e-3)
    assert best_interval(10.0, 0.0) == math.inf and with_restarts(math.inf, 10.0, 300.0, 0.0) == 1.0


def test_a_lost_replica_costs_its_share_until_it_is_back():
    # nothing else costs: half of the two replicas is away for as long as it takes to fail
    rate = 1 / 10_000
    job = Running(ranks=2, replicas=2, step=0.0, going_on=0.0, save=0.0, restart=0.0, repair=1000.0)
    found = predicted(job, Failures(rate, 0.0), "continue", math.inf)
    assert found == pytest.approx(10_000 / 11_000)


@pytest.mark.parametrize("save", [1.0, 10.0, 300.0])
def test_the_best_interval_is_best_and_nearly_youngs(save):
    rate = fatal_rate(LLAMA, Failures(), "restart")
    best = best_interval(save, rate)
    root = math.sqrt(save * rate / 2)
    daly = math.sqrt(2 * save / rate) * (1 + root / 3 + save * rate / 18) - save  # his third order
    assert best == pytest.approx(daly, rel=1e-3)
    assert best < young_interval(save, rate) == pytest.approx(best, rel=2 * root)
    at = [with_restarts(best * f, save, 300.0, rate) for f in (0.9, 1.0, 1.1)]
    assert max(at) == at[1]


def test_a_single_replica_restarts():
    one = replace(LLAMA, replicas=1)
    alone, restarted = (goodput(one, Failures(), tier) for tier in ("continue", "restart"))
    assert alone.simulated == restarted.simulated and alone.interval == restarted.interval
