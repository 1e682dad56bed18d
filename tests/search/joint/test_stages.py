"""Pipelines that the joint search finds, against all configurations there are."""

from __future__ import annotations

import functools
import importlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import meshwright as mw
from meshwright.compile import captured_of
from meshwright.core.mesh import Mesh
from meshwright.core.techniques import Techniques
from meshwright.cost.cluster import Cluster, Level
from meshwright.errors import PlanError
from meshwright.examples import gpt
from meshwright.ops.analysis import factors_of
from meshwright.planning.search_request import request_for
from meshwright.search.context import SearchContext
from meshwright.search.joint.dimensions import points, sparing, stage_dimensions
from meshwright.search.joint.front import Front
from meshwright.search.joint.pareto import stage_front
from meshwright.search.layer_groups import folded
from meshwright.search.pipeline.configurations import outers
from meshwright.search.pipeline.stages import Staged, staged, stages
from meshwright.search.planner import Planner
from tests.breadth import quick
from tests.search.planned import GPU, built

DEEP = "deep mlp"
LAYERS = {"wide gpt": 6, "wide mlp": 4}


def cluster(slow: float = 1.0) -> Cluster:
    levels = (Level("node", 2, 1e9 / slow, 1e-6 * slow), Level("gpu", 2, 1e10, 1e-7))
    return Cluster("gpu 2x2", GPU, levels, 1 << 36, 1e10)


def planner(model: str, memory: float, machine: Cluster) -> Planner:
    """The planner of the ranks of a part of a cluster."""
    captured = captured_of(*built(model))
    folds = folded(captured.graph, captured.folding)
    request = request_for(machine, memory)
    assert request is not None
    context = SearchContext(folds.graph, factors_of(folds.graph), machine.mesh)
    return Planner(context, folds, {}, request)


def front_of(model: str, memory: float, machine: Cluster) -> Front:
    return stage_front(planner(model, memory, machine))


@functools.cache
def every(model: str, slow: float, among: int) -> list[Staged]:
    """All on a cluster, or one among so many, each simulated."""
    machine = cluster(slow)
    found: list[Staged] = []
    for outer in outers(machine, LAYERS[model]):
        inside = planner(model, 1e9, outer.inside(machine))
        made = stage_front(inside)
        for candidate in made.candidates:
            for asked in techniques_of(inside)[::among]:
                pieces = asked.micro_batches
                if pieces > candidate.examples or not outer.schedule.can_be(outer.ranks, pieces):
                    continue
                try:
                    one = made.evaluated(candidate, asked)
                except PlanError:
                    continue
                found.append(staged(made, candidate, one, outer, machine))
    return found


def techniques_of(inside: Planner) -> list[Techniques]:
    """All that is looked at, whether memory is short or not."""
    found = [point.techniques for point in points(stage_dimensions(inside), inside.techniques)]
    for asked in found:
        found += sparing(inside, asked)
    return found


@pytest.mark.parametrize(
    ("model", "share", "among"),
    [
        ("wide mlp", 0.3, 5),
        *(pytest.param("wide mlp", share, 1, marks=pytest.mark.full) for share in (1.0, 0.3)),
        *(pytest.param("wide gpt", share, 1, marks=pytest.mark.slow) for share in (1.0, 0.5, 0.2)),
    ],
)
def test_no_configuration_is_quicker(model: str, share: float, among: int) -> None:
    """`share`: of all configurations so many fit."""
    machine = cluster(slow=10.0)
    free = every(model, 10.0, among)
    memory = sorted(p.peak_bytes for p in free)[int(share * (len(free) - 1))]
    best, *others = stages(machine, functools.partial(front_of, model, memory), LAYERS[model], limit=memory)
    assert max(p.peak_bytes for p in (best, *others)) <= memory
    assert best.seconds <= 1.02 * min(p.seconds for p in free if p.peak_bytes <= memory)


def test_uneven_micro_batches_say_nothing_of_even_ones() -> None:
    """Six examples of a rank in four micro-batches take as long as eight; in two they are even, and quicker."""
    best = stages(
        cluster(10.0), functools.partial(front_of, "wide gpt", 17e6), LAYERS["wide gpt"], limit=17e6
    )[0]
    assert best.outer.taken == (2, 1) and best.found.techniques.micro_batches == 2
    assert best.outer.schedule.name == "zero_bubble_v"


def test_what_is_not_quicker_than_what_there_is_is_not_given() -> None:
    machine = cluster()
    made = functools.partial(front_of, "wide mlp", 1e9)
    best = stages(machine, made, LAYERS["wide mlp"], limit=1e9)[0]
    assert not stages(machine, made, LAYERS["wide mlp"], limit=1e9, enough=0.5 * best.seconds)


def test_the_slowest_link_is_left_to_the_pipeline() -> None:
    """Where a level sends a thousand times slower than the other, stages lie on both of its sides."""
    best = stages(cluster(1e3), functools.partial(front_of, DEEP, 1e9), 16, limit=1e9)[0]
    assert best.outer.taken[0] == 2


def test_a_rank_may_have_a_stage_of_its_own() -> None:
    """Where every link is a hundred times slower, nothing is shared: each rank has a stage, alone."""
    levels = (Level("node", 2, 1e8, 1e-5), Level("gpu", 2, 1e8, 1e-5))
    machine = Cluster("far apart", GPU, levels, 1 << 36, 1e10)
    best = stages(machine, functools.partial(front_of, DEEP, 1e9), 16, limit=1e9)[0]
    assert best.outer.taken == (2, 2)


@functools.cache
def deep() -> tuple[Any, Any, Any]:
    config = gpt.GPTConfig(vocabulary=64, width=128, layers=8, heads=4, sequence=128, tied=False)
    return gpt.build(config, batch=32)


@pytest.mark.parametrize("recompute", ["", "selective", "full"])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@quick(lambda schedule, recompute: schedule == "zero_bubble" or not recompute)
def test_the_peak_that_ranks_pipelines_is_near_the_predicted_one(schedule: str, recompute: str) -> None:
    """Weights' halves of backward wait with what they read: about as much as is kept without recompute, whatever is
    computed again in the first halves; layers that are computed again as a whole do both halves at once."""
    machine = Cluster.preset("h100", ranks_per_node=4)
    model, batch, loss = deep()
    captured = captured_of(model, batch, loss)
    folds = folded(captured.graph, captured.folding)
    outer = next(o for o in outers(machine, 8) if o.ranks == 4 and o.schedule.name == schedule)
    inside = outer.inside(machine)
    request = request_for(inside, 1e12)
    assert request is not None
    context = SearchContext(folds.graph, factors_of(folds.graph), inside.place(Mesh.of({"ranks": 1})))
    made = stage_front(Planner(context, folds, {}, request))
    asked = replace(made.planner.techniques, micro_batches=8, recompute=recompute)
    candidate = made.candidates[0]
    told = staged(made, candidate, made.evaluated(candidate, asked), outer, machine)
    plan = mw.plan(
        model, batch, loss=loss, mesh=4, mode="data_parallel", cluster=machine,
        pipeline=4, micro_batches=8, schedule=schedule, recompute=recompute,
    )  # fmt: skip
    near = 0.02 if schedule == "1f1b" else 0.1
    assert told.peak_bytes == pytest.approx(plan.claims["peak_bytes"], rel=near)


@pytest.mark.full  # the first test tries every schedule
def test_all_forwards_go_first_where_messages_take_long_and_memory_is_not_short() -> None:
    """No rank then waits for a round trip; under a limit that holds few micro-batches another schedule is taken."""
    model, batch, loss = deep()
    device = replace(GPU, flops={"f32": 1e12})
    machine = Cluster("slow", device, (Level("host", 4, 2.5e8, 1e-5),), 1 << 36, 1e10)

    def planned(**asked: Any) -> mw.Plan:
        return mw.plan(model, batch, loss=loss, cluster=machine, pipeline=4, mode="auto", **asked)

    best = planned()
    assert best.techniques.schedule == "gpipe"
    others = (planned(schedule=name) for name in ("1f1b", "zero_bubble"))
    assert best.claims["step_seconds"] < min(other.claims["step_seconds"] for other in others)
    tight = planned(memory=0.6 * best.claims["peak_bytes"])
    assert tight.techniques.schedule != "gpipe" or tight.techniques.recompute


def test_what_a_few_simulations_of_a_schedule_took_is_expected_of_its_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They were all simulated up to 10 % over the limit, where sums are within 2 %."""
    module = importlib.import_module("meshwright.search.pipeline.stages")
    monkeypatch.setattr(module, "_estimate", lambda row: row.bytes)
    known = module._Known()

    def row(of_sums: float, schedule: str = "1f1b") -> Any:
        outer = SimpleNamespace(schedule=SimpleNamespace(name=schedule))
        return SimpleNamespace(bytes=of_sums, candidate=of_sums, outer=outer)

    for ratio in (1.01, 1.0, 0.99):
        assert known.may_fit(row(109.0), 100.0)
        known.saw(row(50.0), SimpleNamespace(peak_bytes=50.0 * ratio))
    assert known.may_fit(row(103.0), 100.0) and not known.may_fit(row(104.0), 100.0)
    assert known.may_fit(row(109.0, "zero_bubble"), 100.0)
