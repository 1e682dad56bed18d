"""A large space without the states of dearer choices: the optimum is the same, and what is left out costs more."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from meshwright.search.budget import SPACE
from meshwright.search.solve import NoStates, Problem, eliminate
from meshwright.search.space import build
from meshwright.search.space import prune as narrow
from meshwright.search.space.families import runs
from tests.breadth import first
from tests.search.drawn import draw
from tests.search.planned import made
from tests.search.test_vectorized import of_model


@pytest.mark.parametrize("start", range(0, 120, 30))
def test_no_better_choice_loses_a_state(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow, "SPACE", replace(SPACE, prune_keeps=1))
    dropped = 0
    for seed in range(start, start + 30):
        drawn = draw(seed, most=10)
        lifted = {key: m - m.min() if np.isfinite(m).any() else m for key, m in drawn.pairs.items()}
        problem = Problem(drawn.unary, lifted)  # what is sent takes no less than nothing
        try:
            best = eliminate(problem)
        except NoStates:
            continue
        lower = {key: ((1 - 2**-21) * m).astype(np.float32) for key, m in problem.pairs.items()}
        for more in (1e-9, 1e-9 + 0.02 * abs(best.price)):
            most = best.price + more
            first = narrow.alone(problem.unary, most)
            assert math.isclose(eliminate(problem.only(first)).price, best.price, rel_tol=1e-12), seed
            kept = narrow.worth_keeping(problem.unary, lower.items(), most)
            dropped += sum(problem.sizes) - sum(map(len, kept))
            assert math.isclose(eliminate(problem.only(kept)).price, best.price, rel_tol=1e-12), seed
    assert dropped


@pytest.mark.parametrize("model", first(1, ["gpt", "wide gpt", "resnet"]))
def test_a_narrow_space_has_the_same_optimum(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = of_model(model, "8")
    axes = len(here.context.mesh.axes)
    whole = here.space(runs(axes, 3))
    known = eliminate(here.space(runs(axes, 2)).problem()).price
    monkeypatch.setattr(build, "SPACE", replace(SPACE, prune_pairs=0))
    slim = here.space(runs(axes, 3), most=known)
    assert slim.size < whole.size
    one, other = eliminate(slim.problem()), eliminate(whole.problem())
    assert math.isclose(one.price, other.price, rel_tol=1e-12) and one.price <= known * (1 + 1e-12)
    assert math.isclose(slim.price(one.states).total, one.price, rel_tol=1e-9)
    assert set(slim.choice(one.states).strategies) == set(whole.choice(other.states).strategies)


@pytest.mark.parametrize("share", [None, 0.85])
def test_space_c_is_never_dearer_than_two_runs(share: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SPACE", replace(SPACE, prune_pairs=0))
    limit = {}
    if share is not None:
        limit["memory"] = share * made("wide mlp", "2x2", "dynamic_programming").claims["peak_bytes"]
    two, more = (made("wide mlp", "2x2", "dynamic_programming", space=s, **limit) for s in "bc")
    assert more.claims["price_seconds"] <= two.claims["price_seconds"] * (1 + 1e-12)
    assert more.claims["bound_seconds"] <= more.claims["price_seconds"] * (1 + 1e-12)
