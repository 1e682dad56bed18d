"""Memory that searches go by: sums that lead never exceed the simulation; layers evaluated once equal all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.compile import captured_of
from meshwright.core.mesh import Mesh
from meshwright.core.techniques import ACTIVATIONS, techniques_from
from meshwright.ops.analysis import factors_of
from meshwright.planning.search_request import request_for
from meshwright.predict.tasks import simulate
from meshwright.search.context import SearchContext
from meshwright.search.exact_spaces import families_of
from meshwright.search.layer_groups import folded, without_folds
from meshwright.search.planner import Planner
from meshwright.search.solve import Problem, solve
from meshwright.search.space.families import named
from meshwright.search.space.memory import fixed_bytes, memory_of
from tests.breadth import first, quick
from tests.search.planned import MESHES, built, cluster, free, lowered, peaks

LARGER = ("llama", "bert", "resnet", "recommender", "wide gpt")
MODELS = ["wide mlp", "mlp", "gpt", *(pytest.param(name, marks=pytest.mark.slow) for name in LARGER)]


def planner_of(model: str, mesh: str, kind: str) -> Planner:
    """As a search would have it: layers planned once, and an evaluator for all of them."""
    return planner_for(*built(model), mesh=mesh, kind=kind)


def planner_for(model: Any, batch: Any, loss: Any, mesh: str = "2x2", kind: str = "gpu") -> Planner:
    """The same of any model."""
    captured = captured_of(model, batch, loss)
    where = cluster(kind, mesh)
    request = request_for(where)
    assert request is not None
    folds = (
        folded(captured.graph, captured.folding, {})
        if captured.folding.blocks
        else without_folds(captured.graph)
    )
    context = SearchContext(folds.graph, factors_of(folds.graph), where.place(Mesh.of(MESHES[mesh])))
    return Planner(context, folds, {}, request)


@pytest.mark.parametrize("kind", ("gpu", "gloo"))
@pytest.mark.parametrize("model", MODELS)
@quick(lambda model, kind: kind == "gpu")
def test_the_sums_are_not_more_than_the_simulation(model: str, kind: str) -> None:
    """For choices drawn among those that are not absurdly dear; a sum that said more could refuse what fits."""
    planner = planner_of(model, "2x2", kind)
    space = planner.space(named([[0], [1]]))
    memory, problem = memory_of(space, 2), space.problem()
    draw = np.random.default_rng(0)
    assert planner.evaluator is not None
    for number in range(6):
        noise = [draw.uniform(0.2, 5.0, len(u)) for u in problem.unary]
        unary = tuple(u * n for u, n in zip(problem.unary, noise, strict=True))
        states = solve(replace(problem, unary=unary)).states
        evaluation = planner.evaluator(space.choice(states))
        sums = memory.totals(states) + fixed_bytes(space)
        assert sums.max() <= evaluation.peak_bytes, (number, sums, evaluation)


AGAIN = {"recompute": "full"}


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        ("mlp", {"micro_batches": 2}),
        ("deep llama", AGAIN),
        pytest.param("deep llama", {"micro_batches": 2}, marks=pytest.mark.full),
        pytest.param("wide gpt", AGAIN, marks=pytest.mark.slow),
        pytest.param("wide gpt", {"micro_batches": 2}, marks=pytest.mark.slow),
        pytest.param("wide gpt", {**AGAIN, "micro_batches": 2}, marks=pytest.mark.slow),
        pytest.param("deep llama", {**AGAIN, "micro_batches": 2}, marks=pytest.mark.slow),
        pytest.param("wide gpt-oss", AGAIN, marks=pytest.mark.slow),
    ],
)
def test_the_sums_under_techniques_are_near_the_simulation_and_not_above(
    model: str, asked: dict[str, object]
) -> None:
    """What is computed again of one layer is in them; gradients that micro-batches add up in a bucket are there once.
    They do not know in which order results go, and so may be a little high."""
    planner = planner_of(model, "2x2", "gpu").under(techniques_from(asked))
    space = planner.space(named([[0], [1]]))
    memory, problem, draw = planner.memory(space), planner.problem(space), np.random.default_rng(0)
    shares: list[float] = []
    for _ in range(5):
        unary = tuple(u * draw.uniform(0.2, 5.0, len(u)) for u in problem.unary)
        states = solve(replace(problem, unary=unary)).states
        sums = memory.totals(states).max() + fixed_bytes(space)
        shares.append(sums / planner.found(space, states, {}, timed=False).claims["peak_bytes"])
    assert max(shares) <= 1.02 and np.median(shares) >= 0.75, shares


class Compared(torch.nn.Module):
    """A value with three readers in layouts of their own, of which one only compares it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return self.b(torch.where(h > 0, h, h.mean(-1, keepdim=True)))


def test_a_value_that_is_only_compared_sends_no_gradient_back() -> None:
    """Of choices drawn at random: some bring it to the three readers in one message, whose gradients are two."""
    planner = planner_for(Compared(), torch.randn(8, 8), lambda m, x: m(x).square().mean())
    space, draw = planner.space(families_of(planner)[0][1]), np.random.default_rng(1)
    problem = space.problem()
    pairs = {key: np.where(np.isfinite(m), 0.0, np.inf) for key, m in problem.pairs.items()}
    assert planner.evaluator is not None
    for _ in range(40):
        unary = tuple(np.where(np.isfinite(u), draw.random(len(u)), np.inf) for u in problem.unary)
        assert planner.evaluator(space.choice(solve(Problem(unary, pairs)).states)).peak_bytes > 0


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("gpu", "dynamic_programming"), pytest.param("gloo", "auto", marks=pytest.mark.slow)],
)
def test_six_layers_are_judged_as_they_are(kind: str, mode: str) -> None:
    """From programs with two and three layers: the step and the peak to a thousandth of
    the program of all six."""
    where = cluster(kind, "2x2")
    plan = free("wide gpt", "2x2", mode, kind)
    assert plan.folds and plan.folds[0][2] >= 5
    step = simulate(lowered("wide gpt", plan), where).step_seconds
    assert plan.claims["step_seconds"] == pytest.approx(step, rel=1e-3)
    assert plan.claims["peak_bytes"] == pytest.approx(peaks("wide gpt", plan, where)[0].bytes, rel=1e-3)


def few_and_full(name: str, repeats: int, asked: dict[str, object]) -> tuple[Any, Any]:
    """What a choice of shardings costs under techniques, judged from a few of its equal layers and from all."""
    planner = planner_of(name, "2", "gpu")
    space = planner.space(named([[0]]))
    choice = space.choice(solve(space.problem()).states)
    evaluator = planner.under(techniques_from(asked)).evaluator
    assert evaluator is not None and planner.folds.repeats == (repeats,)
    return evaluator.from_few_layers(choice), evaluator.in_full(choice)


@pytest.mark.parametrize(
    "asked",
    [
        {"offload": "activations"},
        {"offload": ("activations", "optimizer"), "recompute": "selective"},
        {"offload": "parameters", "threshold_kb": 0},
        {"recompute": "full"},
        {"recompute": "full", "slice_activation": True},
        {"optimizer_parallel": 3, "threshold_kb": 0},
        {"optimizer_parallel": 3, "threshold_kb": 0, "prefetch": 3},
    ],
    ids=str,
)
# Each is in another one.
@quick(lambda asked: asked not in ({"offload": "activations"}, {"recompute": "full"}))
def test_techniques_are_judged_from_a_few_layers_as_from_all(asked: dict[str, object]) -> None:
    """What is brought back a layer ahead is there once, however many layers there are."""
    few, full = few_and_full("wide gpt", 6, asked)
    assert few.peak_bytes == pytest.approx(full.peak_bytes, rel=1e-3), (few, full)
    assert few.step_seconds == pytest.approx(full.step_seconds, rel=1e-3)


@pytest.mark.full
@pytest.mark.parametrize(
    "asked",
    (
        {"recompute": "selective", "offload": ACTIVATIONS},
        {"recompute": "full", "slice_activation": True},
    ),
    ids=str,
)
def test_layers_of_two_kinds_in_turn_are_judged_from_a_few_as_from_all(asked: dict[str, object]) -> None:
    """A copy of a local and a global layer has two: fewer copies show the first and the last, and one between."""
    few, full = few_and_full("wide gpt-oss", 5, asked)
    assert few.peak_bytes == pytest.approx(full.peak_bytes, rel=1e-9), (few, full)
    assert few.step_seconds == pytest.approx(full.step_seconds, rel=1e-9)


@pytest.mark.parametrize("micro_batches", first(1, (2, 1)))
def test_what_comes_back_from_the_host_is_judged_from_a_few_layers_as_from_all(micro_batches: int) -> None:
    """Beside layers that are computed again it comes further ahead: in three or four layers there is always less to
    bring than in many."""
    planner = planner_of("deep llama", "2x2", "gpu")
    space = planner.space(families_of(planner)[0][1])
    choice = space.choice(solve(space.problem()).states)
    asked = {"recompute": "selective", "micro_batches": micro_batches, "offload": "activations"}
    evaluator = planner.under(techniques_from(asked)).evaluator
    assert evaluator is not None and planner.folds.repeats == (8,)
    few, full = evaluator.from_few_layers(choice), evaluator.in_full(choice)
    assert few.peak_bytes == pytest.approx(full.peak_bytes, rel=1e-3), (few, full)
    assert few.host_bytes == pytest.approx(full.host_bytes, rel=1e-3), (few, full)


@pytest.mark.full  # the two tests before judge as much of other layers
def test_what_all_layers_read_is_judged_from_a_few_layers_as_from_all() -> None:
    """Cosine and sine of positions, made once and resharded for every layer: each reshard has a number, of which the
    last layer's is another one for each number of layers. Of choices drawn among those that are not absurdly dear."""
    planner = planner_of("rotary llama", "2x2", "gpu")
    space, evaluator = (
        planner.space(families_of(planner)[0][1]),
        planner.under(techniques_from({"offload": ACTIVATIONS})).evaluator,
    )
    assert evaluator is not None and planner.folds.repeats == (8,)
    problem, draw = space.problem(), np.random.default_rng(0)
    for number in range(4):
        noise = [draw.uniform(0.2, 5.0, len(u)) for u in problem.unary]
        unary = tuple(u * n for u, n in zip(problem.unary, noise, strict=True))
        choice = space.choice(solve(replace(problem, unary=unary)).states)
        few, full = evaluator.from_few_layers(choice), evaluator.in_full(choice)
        assert few.peak_bytes == pytest.approx(full.peak_bytes, rel=1e-3), (number, few, full)


def test_a_weight_that_is_gathered_for_a_view_is_kept_for_who_reads_the_view() -> None:
    """The view keeps nothing, but its reader keeps what lies in the same memory."""
    planner = planner_of("transposed", "2x2", "gpu")
    space = planner.space(named([[0], [1]]))
    gathered = memory_of(space, 2).pairs
    ends = space.variable["node", "permute"], space.variable["parameter", "weight"]
    assert {float(block.max()) for block in gathered[ends]} == {0.0, space.graph.types["weight"].size_bytes}


def test_a_view_of_a_weight_that_is_gathered_is_kept_for_its_reader() -> None:
    planner = planner_of("transposed", "2x2", "gpu")
    space = planner.space(named([[0], [1]]))
    (reader,) = (node.name for node, _ in space.graph.consumers["permute"])
    ends = sorted(space.variable["node", name] for name in ("permute", reader))
    gathered = memory_of(space, 2).pairs[ends[0], ends[1]]
    assert float(gathered.max()) == space.graph.types["weight"].size_bytes
