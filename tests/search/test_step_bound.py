"""The bound of the step: chains that no simulated step of the same choice is shorter than, and what they are worth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.compile import captured_of, lower
from meshwright.core.mesh import Mesh
from meshwright.ops.factors import analyze
from meshwright.ops.table import rules_of
from meshwright.plan.plan import Plan, fingerprint
from meshwright.predict.tasks import simulate
from meshwright.search.solve import solve
from meshwright.search.space.build import Space
from meshwright.search.space.families import named
from meshwright.search.space.parameters import Storage
from meshwright.search.space.step_bound import entries, step_problem
from tests.breadth import quick
from tests.search.planned import cluster, free, tower
from tests.search.test_memory_of_plans import planner_of
from tests.search.test_modes import every_choice

MODELS = ["mlp", "gpt", "wide mlp"]
LARGER = ["llama", "bert", "resnet", "recommender", "wide gpt"]


@pytest.mark.parametrize("kind", ("gpu", "gloo"))
@pytest.mark.parametrize("model", [*MODELS, *(pytest.param(m, marks=pytest.mark.slow) for m in LARGER)])
@quick(lambda model, kind: kind == "gpu")
def test_no_step_is_shorter_than_any_chain_of_its_choice(model: str, kind: str) -> None:
    """For choices that the bound itself finds cheap, its prices disturbed: those that would break it if any did."""
    planner = planner_of(model, "2x2", kind)
    assert planner.evaluator is not None
    space = planner.space(named([[0], [1]]))
    whole = step_problem(space)
    chains = {"": whole, **{name: step_problem(space, name) for name in entries(space, solve(whole).states)}}
    assert len(chains) > 1
    draw = np.random.default_rng(0)
    for entry, problem in chains.items():
        for number in range(3):
            noise = [draw.uniform(0.5, 2.0, len(row)) for row in problem.unary]
            unary = tuple(row * n for row, n in zip(problem.unary, noise, strict=True))
            states = solve(replace(problem, unary=unary) if number else problem).states
            step = planner.evaluator.in_full(space.choice(states)).step_seconds
            for name, chain in chains.items():
                assert chain.price(states) <= step * (1 + 1e-9), (entry, number, name)


@pytest.mark.parametrize("kind", ("gpu", "gloo"))
@quick(lambda kind: kind == "gpu")
def test_no_step_of_a_tiny_model_is_shorter_than_the_bounds(kind: str) -> None:
    """Every 7th of all programs that two layers can become on two ranks, and the least of each chain over all."""
    model, batch, loss = tower(6, 1, rows=8)
    captured = captured_of(model, batch, loss)
    graph, where = captured.graph, cluster(kind, "2")
    on = where.place(Mesh.of(tp=2))
    # Without a smallest size even these parameters are stored in parts, or gathered.
    storage = Storage(((0,),), smallest_bytes=0, again=True)
    space = Space(graph, analyze(graph, rules_of(graph)), on, where, named([[0]]), storage)
    bounds = {
        entry: solve(step_problem(space, entry)).bound for entry in ("", "layers_0_weight", "layers_0_bias")
    }
    assert all(bound > 0 for bound in bounds.values())
    count, best = 0, np.inf
    for number, (_, choice) in enumerate(every_choice(graph, on, space, space.codes, storage)):
        if number % 7:
            continue
        plan = Plan(
            on, "all", fingerprint(graph), choice.strategies, choice.inputs,
            hubs=choice.hubs, again=choice.again, prices=where.prices,
        )  # fmt: skip
        best = min(best, simulate(lower(captured, plan), where).step_seconds)
        count += 1
    assert count > 20
    assert max(bounds.values()) <= best * (1 + 1e-9)


def test_what_comes_first_and_last_counts_on_slow_links() -> None:
    """The gap of a plan over slow links, of which much is the gather before the first product and the sum after it."""
    planner = planner_of("wide mlp", "2x2", "gloo")
    space = planner.space(named([[0], [1]]))
    base = solve(step_problem(space))
    better = max(solve(step_problem(space, name)).bound for name in entries(space, base.states))
    assert better > base.bound * 1.05
    claims = free("wide mlp", "2x2", "auto", "gloo").claims
    assert better * (1 - 1e-9) <= claims["bound_seconds"] <= claims["step_seconds"]
