"""`auto` cuts a model into stages where that alone fits, or is quicker; what it chooses computes the right thing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import meshwright as mw
from meshwright.cost.cluster import Cluster, Level
from meshwright.errors import PlanError
from meshwright.examples import gpt
from meshwright.search.joint.front import Front
from meshwright.search.pipeline import choose as chosen
from tests.breadth import first, quick
from tests.search.planned import GPU, built, press_ctrl_c


def cluster(slow: float) -> Cluster:
    """Two nodes of two ranks, the link between nodes so many times slower than that inside."""
    levels = (Level("node", 2, 1e10 / slow, 1e-7 * slow), Level("gpu", 2, 1e10, 1e-7))
    return Cluster("nodes far apart", GPU, levels, 1 << 36, 0.0)


class Stop:
    """Presses Ctrl-C at the first report of some, and counts those after it."""

    def __init__(self, wanted: Callable[[str], bool]) -> None:
        self.wanted, self.interrupted, self.later = wanted, False, 0

    def __call__(self, stage: str, price: float | None, bound: float | None) -> None:
        self.later += self.interrupted
        if not self.interrupted and self.wanted(stage):
            self.interrupted = True
            press_ctrl_c()


def planned(slow: float, **how):
    net, batch, loss = built("wide gpt")
    return mw.plan(net, batch, loss=loss, cluster=cluster(slow), mode="auto", **how)


def small(slow: float = 1e3, **how):
    net, batch, loss = built("sequence")
    return mw.plan(net, batch, loss=loss, cluster=cluster(slow), mode="auto", **how)


@pytest.mark.slow
def test_stages_lie_on_both_sides_of_a_link_that_nothing_else_may_cross() -> None:
    plan, alone = planned(1e4), planned(1e4, pipeline=1)
    assert plan.techniques.pipeline > 1 and plan.techniques.micro_batches > 1
    assert plan.claims["step_seconds"] < 0.95 * alone.claims["step_seconds"]
    assert any("auto chose" in note and "stages" in note for note in plan.notes)
    for name in ("pipeline", "schedule", "micro_batches", "recompute"):
        value = getattr(plan.techniques, name)
        chosen = f"{name}={value!r}" if value else f"no {name}"
        (told,) = (n for n in plan.notes if n.startswith(f"auto chose {chosen}; "))
        assert "next best" in told or "nothing else fits" in told
    assert any("; next best" in n for n in plan.notes)
    axis = plan.mesh.names[0][0]
    pinned = plan.pin("lm_head", n=axis)  # stages that a search chose stay with a pin
    assert pinned.techniques.pipeline == plan.techniques.pipeline and pinned.ranks == plan.ranks
    net, batch, loss = built("wide gpt")
    mw.verify(net, batch, loss=loss, plan=plan).raise_if_different()


def test_a_quick_link_is_not_left_to_a_pipeline() -> None:
    assert small(1.0).techniques.pipeline == 1


def test_a_mesh_of_the_user_and_a_number_of_stages_stay() -> None:
    assert small(mesh={"dp": 2, "tp": 2}).techniques.pipeline == 1
    assert small(pipeline=1).techniques.pipeline == 1


@pytest.mark.slow
def test_no_choice_is_over_the_limit() -> None:
    limit = 0.5 * planned(1e4, pipeline=1).claims["peak_bytes"]
    plan = planned(1e4, memory=limit)
    assert plan.claims["peak_bytes"] <= limit


@pytest.mark.full
def test_stages_on_both_sides_of_a_slow_link_are_looked_at_though_others_look_quicker() -> None:
    """By sums, which leave out for how long reductions wait for the link, stages inside each node are the quickest:
    simulations of these once used up the search's patience, and one stage of 235 ms was the answer instead of 207."""
    fast = Cluster.preset("h100", nodes=3, ranks_per_node=4)
    node, gpu = fast.levels
    slow = replace(fast, levels=(replace(node, bytes_per_s=0.02 * node.bytes_per_s), gpu))
    config = gpt.GPTConfig(vocabulary=512, width=1536, layers=6, heads=8, sequence=512, tied=False)
    with torch.device("meta"):
        model, batch, loss = gpt.build(config, batch=96)
    auto, three = (
        mw.plan(model, batch, loss=loss, cluster=slow, mode="auto", **how) for how in ({}, {"pipeline": 3})
    )
    assert auto.techniques.pipeline == 3
    assert auto.claims["step_seconds"] <= 1.001 * three.claims["step_seconds"]


@pytest.mark.full
@pytest.mark.timeout(900)  # a minute alone
def test_a_larger_limit_never_gives_a_worse_plan() -> None:
    """Half of the memory once gave one stage at 1.26 s, four tenths two at 0.78 s: three pipelines did not fit after
    all, and the search was over. So it was where the device itself has no more memory."""
    peak = planned(1e4, pipeline=1).claims["peak_bytes"]
    steps = [planned(1e4, memory=share * peak).claims["step_seconds"] for share in (0.4, 0.45, 0.5, 0.6, 0.8)]
    assert all(more <= 1.001 * less for less, more in itertools.pairwise(steps)), steps
    assert steps[-1] < 0.95 * steps[0]
    net, batch, loss = built("wide gpt")
    world = cluster(1e4)
    small = replace(world, device=replace(world.device, memory_bytes=int(0.45 * peak)))
    own = mw.plan(net, batch, loss=loss, cluster=small, mode="auto")
    assert own.claims["step_seconds"] == pytest.approx(steps[1])


@pytest.mark.parametrize("given", [{"micro_batches": 4, "recompute": ""}])
def test_what_the_user_fixed_stays_beside_stages(given) -> None:
    plan = planned(1e4, **given)
    assert plan.techniques.pipeline > 1
    assert all(getattr(plan.techniques, name) == value for name, value in given.items())
    assert plan.techniques == replace(plan.techniques, **given)
    assert not any(
        n.startswith((f"auto chose {name}=", f"auto chose no {name}")) for n in plan.notes for name in given
    )


@pytest.mark.parametrize(
    "given",
    [
        *first(0, ({"pipeline": 2}, {"pipeline": 4, "schedule": "interleaved"})),  # of a small model below
        pytest.param({"pipeline": 2, "micro_batches": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_is_open_beside_the_stages_of_the_user_is_chosen(given) -> None:
    """Its schedule and micro-batches once were those that nobody chose: one micro-batch, for which each stage waits."""
    plan, plain = (
        planned(1e4, **given),
        planned(1e4, **{"schedule": "1f1b", "micro_batches": 1, "recompute": "", **given}),
    )
    assert all(getattr(plan.techniques, name) == value for name, value in given.items())
    assert (
        plan.techniques.micro_batches > 1
        and plan.claims["step_seconds"] < 0.95 * plain.claims["step_seconds"]
    )
    told = [n for n in plan.notes if n.startswith("auto chose")]
    assert told and not any(f" {name}=" in n for n in told for name in given)
    pinned = plan.pin("lm_head", n=plan.mesh.names[0][0])
    assert pinned.techniques.schedule == plan.techniques.schedule
    assert pinned.techniques.micro_batches == plan.techniques.micro_batches
    net, batch, loss = built("wide gpt")
    mw.verify(net, batch, loss=loss, plan=plan).raise_if_different()


@pytest.mark.parametrize(
    ("planned", "given"), first(1, ((small, {}), (planned, {}), (planned, {"micro_batches": 4})))
)
def test_recompute_is_chosen_for_the_stages_of_the_user_where_nothing_else_fits(planned, given) -> None:
    free = planned(1e4, pipeline=2, **given)
    plan = planned(1e4, pipeline=2, memory=0.9 * free.claims["peak_bytes"], **given)
    assert plan.claims["peak_bytes"] <= 0.9 * free.claims["peak_bytes"] and plan.techniques != free.techniques


@pytest.mark.parametrize("given", [{"interleave": 2}, {"offload": "activations"}], ids=str)
def test_a_plan_says_why_nothing_was_chosen_for_the_stages_of_the_user(given) -> None:
    net, batch, loss = built("mlp")
    plan = mw.plan(
        net,
        batch,
        loss=loss,
        cluster=replace(cluster(1e4), host_bytes_per_s=1e9),
        mode="auto",
        pipeline=2,
        **given,
    )
    assert plan.techniques.micro_batches == 1
    (note,) = (n for n in plan.notes if n.startswith("auto chose no schedule"))
    assert f"does not price {next(iter(given))}=" in note


@pytest.mark.parametrize(
    "given", [{}, {"pipeline": 2}, {"pipeline": 4}, {"pipeline": 2, "schedule": "gpipe"}], ids=str
)
@quick(lambda given: not given or "schedule" in given)
def test_a_model_without_layers_is_cut_between_its_products(given) -> None:
    """A plain sequence of modules, each too small for a layer, once was in one stage, or had one micro-batch."""
    plan = small(**given)
    assert plan.techniques.pipeline == given.get("pipeline", plan.techniques.pipeline) > 1
    assert plan.techniques.micro_batches > 1
    net, batch, loss = built("sequence")
    mw.verify(net, batch, loss=loss, plan=plan).raise_if_different()


def test_what_was_chosen_stays_with_a_module_put_into_a_stage() -> None:
    plan = small(1e3, pipeline=2)
    other = plan.pin_stage("0", 0)
    assert dict(other.techniques.stages) == {"0": 0}
    for name in chosen.CHOSEN:
        assert getattr(other.techniques, name) == getattr(plan.techniques, name)


# ---------------------------------------------------------------- an interrupt


def test_an_interrupt_before_stages_are_looked_at_ends_all() -> None:
    stop = Stop(lambda stage: stage == "the least memory")
    plan = small(1e3, progress=stop)
    assert stop.interrupted and stop.later <= 1  # what the interrupted search had found is told
    assert plan.techniques.pipeline == 1


def test_an_interrupt_while_stages_are_looked_for_gives_the_plan_in_one() -> None:
    stop = Stop(lambda stage: stage.endswith("stages"))
    plan = small(1e3, progress=stop)
    assert stop.interrupted and not stop.later
    assert plan.techniques.pipeline == 1 and plan.claims["step_seconds"] > 0


def test_an_interrupt_after_a_plan_in_stages_gives_that(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    search = chosen.stages

    def searched(*given, **named):
        found = search(*given, **named)
        looked.append(len(found))
        return found

    monkeypatch.setattr(chosen, "stages", searched)
    stop = Stop(lambda stage: bool(looked) and stage.endswith("stages"))
    plan = small(1e3, progress=stop)
    assert stop.interrupted and not stop.later and looked[0] > 1
    assert plan.techniques.pipeline > 1
    assert plan.claims["step_seconds"] < small(1e3, pipeline=1).claims["step_seconds"]


# ---------------------------------------------------------------- nothing fits in one stage


@pytest.fixture
def nothing_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan in one stage is refused, as one over the limit is; the ranks of a stage are planned as ever."""

    def refused(wanted):
        raise PlanError("nothing fits in one stage")

    monkeypatch.setattr(chosen, "plan_in_one_stage", refused)


def test_the_first_answer_is_in_stages_then_and_an_interrupt_gives_it(
    nothing_in_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    answers: list[float | None] = []
    search = chosen.stages

    def searched(*given, **named):
        found = search(*given, **named)
        looked.append(len(found))
        return found

    def progress(stage: str, price: float | None, bound: float | None) -> None:
        if looked and stage.endswith(" stages"):
            answers.append(price)
            press_ctrl_c()

    monkeypatch.setattr(chosen, "stages", searched)
    plan = small(1e3, progress=progress)
    assert plan.techniques.pipeline > 1 and answers == [plan.claims["step_seconds"]]
    assert any("nothing fits in one stage" in note for note in plan.notes)


def test_an_interrupt_while_an_answer_is_told_gives_that_answer(nothing_in_one: None) -> None:
    """It may come anywhere in the search, not only while a choice is simulated."""
    stop = Stop(lambda stage: stage.endswith(" stages"))
    plan = small(1e3, progress=stop)
    assert stop.interrupted and plan.techniques.pipeline > 1


def test_an_interrupt_before_there_is_any_answer_ends_all(
    nothing_in_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Front, "evaluated", interrupted)
    with pytest.raises(KeyboardInterrupt):
        small(1e3)


def test_what_was_planned_and_does_not_fit_is_no_next_best(
    nothing_in_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, told = [], []
    search, within, tell = chosen.stages, chosen._fits, chosen.explain_stages
    refused: list[float] = []

    def searched(*given, **named):
        looked.extend(search(*given, **named))
        return looked

    def fits(plan, *others) -> bool:
        if not refused:
            refused.append(plan.claims["step_seconds"])
            return False
        return within(plan, *others)

    def telling(best, found, given):
        told.append((best, list(found)))
        return tell(best, found, given)

    monkeypatch.setattr(chosen, "stages", searched)
    monkeypatch.setattr(chosen, "_fits", fits)
    monkeypatch.setattr(chosen, "explain_stages", telling)
    plan = small(1e3)
    (best, found), *_ = told
    assert looked[0] not in found and best in found
    assert not any("next best" in note and " at about -" in note for note in plan.notes)


def test_what_took_longer_than_predicted_does_so_under_smaller_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None fits, so the search goes on below them; a configuration that is too slow is not planned again."""
    shapes: list[object] = []
    split = chosen.split_as_found

    def slow(wanted, inside, taken, asked):
        shapes.append((taken, asked.pipeline, asked.schedule, asked.micro_batches))
        plan = split(wanted, inside, taken, asked)
        return replace(plan, claims={**plan.claims, "step_seconds": 1e6})

    monkeypatch.setattr(chosen, "split_as_found", slow)
    monkeypatch.setattr(chosen, "_fits", lambda *_: False)
    assert small(1e3).techniques.pipeline == 1
    assert shapes and len(shapes) == len(set(shapes))
