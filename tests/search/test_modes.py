"""What each mode promises of the plans it finds: wishes kept, bounds that hold, nothing better left out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

import meshwright as mw
from meshwright.compile import captured_of, lower
from meshwright.core.mesh import Mesh
from meshwright.examples import gpt
from meshwright.ops.factors import analyze
from meshwright.ops.table import rules_of
from meshwright.plan.plan import Plan, fingerprint
from meshwright.predict.price import program_price
from meshwright.predict.tasks import simulate
from meshwright.search.space.build import Space
from meshwright.search.space.constraints import exactly
from meshwright.search.space.families import named
from meshwright.search.space.parameters import Storage
from meshwright.search.space.variables import Choice
from tests.breadth import quick
from tests.search.planned import SEARCHES, cluster, free, lowered, made, tight, tower


def said(plan: Plan) -> dict[str, Any]:
    """All of a plan but how long the search took."""
    claims = {k: v for k, v in plan.claims.items() if k != "search_seconds"}
    return {**vars(plan), "claims": claims, "origin": None}


# ---------------------------------------------------------------- bounds and candidates


@pytest.mark.parametrize(("model", "mesh"), [("mlp", "2x3"), ("gpt", "2x2"), ("recommender", "2")])
@pytest.mark.parametrize("kind", ("gpu", "gloo"))
@quick(lambda model, kind, **_: kind == "gpu")
def test_bounds_hold_and_the_exact_search_meets_its_own(model: str, mesh: str, kind: str) -> None:
    exact = free(model, mesh, "dynamic_programming", kind)
    axes = free(model, mesh, "recursive_programming", kind)
    auto = free(model, mesh, "auto", kind)
    assert exact.claims["gaps"]["sum"] <= 1e-9
    assert exact.claims["bound_seconds"] == pytest.approx(exact.claims["price_seconds"], rel=1e-9)
    # Few prime axes: all product states are in the space, the recursion's among them.
    for plan in (axes, auto):
        assert plan.claims["price_seconds"] >= exact.claims["price_seconds"] * (1 - 1e-9)
    for plan in (exact, axes, auto):  # the bound of the step is of every plan
        assert auto.claims["bound_seconds"] <= plan.claims["step_seconds"] * (1 + 1e-9)
    assert auto.claims["gaps"]["step"] == pytest.approx(
        auto.claims["step_seconds"] / auto.claims["bound_seconds"] - 1, abs=1e-9
    )


@pytest.mark.parametrize(("model", "mesh"), [("mlp", "2x3"), ("gpt", "2x2"), ("recommender", "2")])
@pytest.mark.parametrize("kind", ("gpu", "gloo"))
@quick(lambda model, kind, **_: kind == "gpu")
def test_auto_is_not_worse_than_any_candidate_or_mode(model: str, mesh: str, kind: str) -> None:
    auto = free(model, mesh, "auto", kind)
    step = simulate(lowered(model, auto), cluster(kind, mesh)).step_seconds
    assert auto.claims["step_seconds"] == pytest.approx(step, rel=1e-9)
    candidates = auto.claims["candidates"]
    assert {"data parallel", "recursion"} <= set(candidates) and len(candidates) >= 4
    assert auto.claims["step_seconds"] == min(s for s in candidates.values() if s is not None)
    for mode in ("recursive_programming", "dynamic_programming", "data_parallel"):
        other = simulate(lowered(model, free(model, mesh, mode, kind)), cluster(kind, mesh))
        assert step <= other.step_seconds * (1 + 1e-9), mode


def test_under_a_limit_auto_is_not_worse_either() -> None:
    auto = tight("wide mlp", "2x2", "auto", "gloo")
    for mode in ("recursive_programming", "dynamic_programming"):
        other = tight("wide mlp", "2x2", mode, "gloo")
        assert auto.claims["step_seconds"] <= other.claims["step_seconds"] * (1 + 1e-9), mode
    assert auto.claims["bound_seconds"] <= auto.claims["step_seconds"]


def test_space_of_the_named_axes_is_part_of_all_product_states() -> None:
    every = free("mlp", "8", "dynamic_programming")
    axes = made("mlp", "8", "dynamic_programming", space="a")  # one axis of 8: one letter of each operator
    runs = made("mlp", "8", "dynamic_programming", space="b")
    price = "price_seconds"
    assert every.claims[price] <= runs.claims[price] * (1 + 1e-9) <= axes.claims[price] * (1 + 1e-9) ** 2
    assert "(a)" in axes.claims["space"] and "(b)" in runs.claims["space"]


@pytest.mark.parametrize("model", ("mlp", "gpt"))
def test_a_greedy_recursion_is_not_better_than_the_exact_one(model: str) -> None:
    greedy = made(model, "2", "recursive_programming", inner="greedy")
    exact = free(model, "2", "recursive_programming")
    assert greedy.claims["price_seconds"] >= exact.claims["price_seconds"] * (1 - 1e-9)
    assert greedy.claims["price_seconds"] == pytest.approx(
        program_price(lowered(model, greedy), cluster("gpu", "2")).total, rel=1e-6
    )


@pytest.mark.parametrize("mode", SEARCHES)
@pytest.mark.parametrize("model", ("mlp", "gpt"))
@quick(lambda model, mode: (model == "mlp") == (mode == "auto"))
def test_the_same_question_has_the_same_answer(model: str, mode: str) -> None:
    mesh = "2x3" if model == "mlp" else "2x2"
    assert said(made(model, mesh, mode)) == said(free(model, mesh, mode))


# ---------------------------------------------------------------- every strategy of a tiny graph


def every_choice(
    graph: Any, on: Mesh, space: Space, codes: Mapping[str, Any], storage: Storage | None = None
) -> Iterator[tuple[float, Choice]]:
    """Every set of strategies in every layout of storage and hubs, with the price of the program it becomes."""
    rows = {name: list(states.rows) for name, states in space.nodes.items()}
    for picked in itertools.product(*rows.values()):
        one = Space(
            graph, space.factors, on, space.cluster, exactly(dict(zip(rows, picked, strict=True))),
            storage or Storage(((0,),)), codes=codes,
        )  # fmt: skip
        for states in itertools.product(*(range(parts.shape[1]) for parts in one.unary)):
            price = one.price(states).total
            if np.isfinite(price):
                yield price, one.choice(states)


@pytest.mark.parametrize("kind", ("gpu", "gloo"))
@quick(lambda kind: kind == "gpu")
def test_no_strategies_of_a_tiny_model_are_cheaper_than_those_found(kind: str) -> None:
    """All programs that two layers can become on two ranks, each priced from the program itself."""
    model, batch, loss = tower(6, 1, rows=8)
    captured = captured_of(model, batch, loss)
    graph, where = captured.graph, cluster(kind, "2")
    on = where.place(Mesh.of(tp=2))
    space = Space(graph, analyze(graph, rules_of(graph)), on, where, named([[0]]), Storage(((0,),)))
    best, count = np.inf, 0
    for price, choice in every_choice(graph, on, space, space.codes):
        plan = Plan(
            on, "all", fingerprint(graph), choice.strategies, choice.inputs,
            hubs=choice.hubs, again=choice.again, prices=where.prices,
        )  # fmt: skip
        count += 1
        if count % 97 == 0 or price < best:
            assert program_price(lower(captured, plan), where).total == pytest.approx(price, rel=1e-6)
        best = min(best, price)
    found = mw.plan(model, batch, loss=loss, cluster=where, mesh={"tp": 2}, mode="dynamic_programming")
    assert count > 100
    assert found.claims["price_seconds"] == pytest.approx(best, rel=1e-9)


@pytest.mark.full  # the second test has it of few layers
def test_candidates_near_the_best_are_told_as_the_whole_program_is_simulated() -> None:
    # Of eight layers, two and three tell 13 % too much or too little: which of two streams is full changes.
    model, batch, loss = gpt.build(gpt.GPTConfig(layers=8))
    cluster = mw.Cluster.preset("cpu", nodes=2, ranks_per_node=2)
    plan = mw.plan(model, batch, loss=loss, cluster=cluster, mode="auto", pipeline=1, interleave=1)
    step = simulate(lower(captured_of(model, batch, loss), plan), cluster).step_seconds
    assert plan.claims["step_seconds"] == pytest.approx(step, rel=1e-9)
    assert plan.claims["candidates"][plan.claims["chosen"]] == plan.claims["step_seconds"]
