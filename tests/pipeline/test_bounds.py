"""Bounds of steps in stages: below every schedule that is played, and below every plan there is."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.compile import captured_of, plan_captured
from meshwright.core.techniques import techniques_from
from meshwright.cost.cluster import Cluster, Level
from meshwright.errors import PlanError
from meshwright.ops.analysis import factors_of
from meshwright.pipeline.actions import BACKWARD, BACKWARD_INPUT, FORWARD, Action
from meshwright.pipeline.critical_path import chains, counts, shares_of
from meshwright.pipeline.levels import mesh_over
from meshwright.pipeline.play import play
from meshwright.pipeline.schedules import make
from meshwright.planning.search_request import request_for
from meshwright.search.compute_bound import Least
from meshwright.search.context import SearchContext
from meshwright.search.layer_groups import folded
from meshwright.search.pipeline.bounds import Bounds
from meshwright.search.pipeline.configurations import Outer
from meshwright.search.planner import Planner
from meshwright.search.space.wiring import Ties
from tests.search.planned import GPU, built

SCHEDULES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zero_bubble", 1),
    ("zero_bubble_v", 2),
]
SIZES = [(2, 2), (2, 8), (4, 4), (4, 12), (3, 6)]


def played(name: str, ranks: int, pieces: int, chunks: int, each: np.ndarray) -> float:
    """The end of a schedule whose stages take `each` [stages, 3]."""

    def seconds(action: Action) -> float:
        forward, inputs, weights = each[action.stage]
        return {FORWARD: forward, BACKWARD: inputs + weights, BACKWARD_INPUT: inputs}.get(
            action.kind, weights
        )

    schedule = make(name, ranks, pieces, chunks)
    return play(schedule, lambda a: seconds(a) if a.kind not in ("reduce", "update") else 0.0).end


@pytest.mark.parametrize(("ranks", "pieces"), SIZES)
@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_no_play_is_shorter_than_a_chain_or_the_counts_of_its_operators(name, chunks, ranks, pieces) -> None:
    draw = np.random.default_rng(0)
    every = chains(make(name, ranks, pieces, chunks))
    for _ in range(5):
        operators = draw.uniform(0.0, 1.0, (7 * ranks * chunks, 3))
        where = np.sort(draw.integers(0, ranks * chunks, len(operators)))
        stages = np.zeros((ranks * chunks, 3))
        np.add.at(stages, where, operators)
        end = played(name, ranks, pieces, chunks, stages)
        assert (every * stages).sum(axis=(1, 2)).max() <= end * (1 + 1e-9)
        found = counts(name, ranks, pieces, chunks, shares_of(operators.sum(axis=0)))
        assert found.least(operators).sum() <= end * (1 + 1e-9)
        assert found.least_of_any * operators.sum() <= end * (1 + 1e-9)


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_the_counts_see_that_ranks_wait(name: str, chunks: int) -> None:
    """For equal stages they are between what ranks compute on average and what is played."""
    ranks, pieces = 4, 4
    stages = np.full((ranks * chunks, 3), 1.0 / (ranks * chunks))
    found = counts(name, ranks, pieces, chunks, shares_of(stages.sum(axis=0))).least(stages).sum()
    mean, end = 3.0 * pieces / ranks, played(name, ranks, pieces, chunks, stages)
    share = 0.25 if chunks < 3 else 0.0  # stages of a rank may be uneven, and with several that helps
    assert mean + share * (end - mean) <= max(mean, found) <= end * (1 + 1e-9)


# ---------------------------------------------------------------- plans

LEVELS = (Level("node", 2, 1e8, 1e-5), Level("gpu", 2, 1e10, 1e-7))
CLUSTER = Cluster("two of two", GPU, LEVELS, 1 << 36, 1e10)


def bounds(model: str, layers: int) -> Bounds:
    captured = captured_of(*built(model))
    folds = folded(captured.graph, captured.folding)
    factors, request = factors_of(folds.graph), request_for(CLUSTER)
    assert request is not None

    def planner(cluster: Cluster) -> Planner:
        inside = request_for(cluster)
        assert inside is not None
        return Planner(SearchContext(folds.graph, factors, cluster.mesh), folds, {}, inside)

    least = Least(folds.graph, factors, Ties(folds.same, folds.weight), CLUSTER)
    return Bounds(CLUSTER, layers, (1, 2, 4), least, planner)


@pytest.mark.parametrize(
    ("model", "layers", "modes"),
    [
        ("wide mlp", 4, ("recursive_programming",)),
        pytest.param("wide mlp", 4, ("data_parallel", "recursive_programming"), marks=pytest.mark.full),
        pytest.param(
            "wide gpt", 4, ("data_parallel", "recursive_programming", "auto"), marks=pytest.mark.slow
        ),
    ],
)
def test_no_plan_is_quicker_than_its_configurations_bounds_and_none_than_the_least(
    model, layers, modes
) -> None:
    known, steps = bounds(model, layers), []
    captured = captured_of(*built(model))
    for outer, pieces in known.every:
        least = [known.mean(outer, pieces), known.ordered(outer, pieces), known.sent(outer, pieces)]
        assert least == sorted(least) and least[0] > 0
        for mode in modes:
            step = _step(captured, outer, pieces, mode)
            if step is not None:
                assert least[-1] <= step * (1 + 1e-9), (str(outer), pieces, mode)
                steps.append(step)
    alone = [plan_captured(captured, None, mode, None, request_for(CLUSTER), techniques_from({"pipeline": 1}))
             for mode in modes]  # fmt: skip
    floor = known.least.in_one(2)
    assert floor <= min(p.claims["step_seconds"] for p in alone)
    found = known.all(floor, min(steps))
    assert found.seconds <= min(steps) and found.configurations == len(known.every)
    # It is worth something: stages wait for one another, and a rank sends.
    unlimited = known.all(float("inf"), float("inf"))
    assert unlimited.seconds > min(known.mean(*one) for one in known.every)
    assert unlimited.seconds <= min(steps)


def _step(captured, outer: Outer, pieces: int, mode: str) -> float | None:
    asked = techniques_from(
        {"pipeline": outer.stages, "schedule": outer.schedule.name, "micro_batches": pieces, "recompute": ""}
    )
    try:
        plan = plan_captured(
            captured, mesh_over(CLUSTER, outer.taken), mode, None, request_for(CLUSTER), asked
        )
    except PlanError:  # fewer examples than micro-batches, or a rank without any
        return None
    return plan.claims["step_seconds"]
