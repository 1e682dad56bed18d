"""What `auto` chooses beside cuts and storage, against plans made with every combination of the techniques."""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.compile import captured_of
from meshwright.errors import PlanError
from meshwright.examples import gpt, llama, zoo
from meshwright.ops.analysis import factors_of
from meshwright.plan.plan import Plan
from meshwright.search import joint
from meshwright.search.budget import TECHNIQUES
from meshwright.search.joint.dimensions import pieces_of
from meshwright.search.joint.neighbours import quicker
from meshwright.search.planner import Planner, SearchResult
from meshwright.search.solve import NoStates, solve_limited
from tests.breadth import first
from tests.search.planned import MESHES, built, cluster, free, peaks


def planned(model: str, mesh: str, share: float, **techniques: Any) -> Plan:
    """By `auto`, within a share of what the plan without a limit takes."""
    net, batch, loss = built(model)
    limit = share * free(model, mesh, "auto").claims["peak_bytes"]
    return mw.plan(
        net,
        batch,
        loss=loss,
        mesh=MESHES[mesh],
        mode="auto",
        cluster=cluster("gpu", mesh),
        memory=limit,
        **techniques,
    )


OFFLOADS = ((), ("optimizer",))


def steps(model: str, mesh: str, share: float, pieces: tuple[int, ...]) -> dict[str, float]:
    """The step of every combination that fits."""
    found: dict[str, float] = {}
    for recompute, count, offload in itertools.product(("", "selective", "full"), pieces, OFFLOADS):
        techniques = {"recompute": recompute, "micro_batches": count, "offload": offload}
        try:
            plan = planned(model, mesh, share, **techniques)
        except PlanError:
            continue
        if plan.claims["peak_bytes"] <= share * free(model, mesh, "auto").claims["peak_bytes"]:
            found[str(techniques)] = plan.claims["step_seconds"]
    return found


@pytest.mark.parametrize(
    "rows, counts",
    [
        (1, (1,)),
        (7, (1, 7)),
        (16, (1, 2, 4, 8, 16)),
        (96, (1, 2, 4, 8, 16, 32, 96)),
        (100, (1, 2, 4, 10, 20, 50, 100)),
    ],
)
def test_batches_of_any_size_have_micro_batches(rows: int, counts: tuple[int, ...]) -> None:
    """Powers of two alone are 1, 2 and 4 of 100 rows: what fits with 50 micro-batches was refused."""
    with torch.device("meta"):
        net, batch = torch.nn.Linear(4, 4), {"x": torch.empty(rows, 4)}
    captured = captured_of(net, batch, lambda model, batch: model(batch["x"]).square().mean())
    assert pieces_of(captured.graph, factors_of(captured.graph), 1).values == counts


SLOW = (pytest.mark.slow, pytest.mark.timeout(1500))  # dozens of plans each, minutes beside other work


@pytest.mark.parametrize(
    ("model", "mesh", "share", "pieces"),
    [
        ("wide mlp", "2", 0.35, (1, 2)),
        *(
            pytest.param(*case, (1, 2, 4), marks=SLOW)
            for case in itertools.product(("wide gpt", "wide mlp"), ("2", "2x2"), (0.7, 0.4, 0.25))
        ),
    ],
)
def test_no_combination_is_quicker(model: str, mesh: str, share: float, pieces: tuple[int, ...]) -> None:
    every = steps(model, mesh, share, pieces)
    try:
        plan = planned(model, mesh, share)
    except PlanError as error:
        assert "no plan fits" in error.what and not every
        return
    if not every:  # it takes more pieces than were tried, or keeps more on the host
        assert plan.techniques.micro_batches not in pieces or plan.techniques.offload not in OFFLOADS
        return
    best = min(every, key=every.__getitem__)
    assert plan.claims["step_seconds"] <= 1.03 * every[best], (str(plan.techniques), best)


@functools.cache
def tight(model: str, mesh: str, share: float) -> Plan:
    return planned(model, mesh, share)


DEEP = ("wide gpt", "2x2", 0.28)
TIGHT = first(1, (("wide mlp", "2", 0.35), DEEP, ("wide gpt", "2x2", 0.4)))


@pytest.mark.full  # the test after the next shows it with more room
def test_where_computing_alone_takes_as_long_no_technique_is_looked_at() -> None:
    plan = tight("wide gpt", "2x2", 0.5)
    assert not plan.techniques.non_defaults() and plan.claims["gaps"]["step"] < 0.01
    assert plan.claims["peak_bytes"] <= 0.5 * free("wide gpt", "2x2", "auto").claims["peak_bytes"]
    assert any(note.startswith("auto did not look at recompute, micro_batches, ") for note in plan.notes)


def test_where_memory_is_short_a_recipe_is_offered_before_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Techniques are tried with the recipe known, and what they came to is known to the search without them."""
    limit = 0.9 * free("deep llama", "2x2", "auto").claims["peak_bytes"]
    offered: list[Any] = []
    known: list[float] = []
    with_techniques = joint.quickest

    def searched(planner: Planner, *rest: Any) -> SearchResult | None:
        offered.append(planner.request.stop.offered)
        return with_techniques(planner, *rest)

    def search(planner: Planner, below: float) -> SearchResult:
        offered.append(planner.request.stop.offered)
        known.append(below)
        raise PlanError("seen enough")

    monkeypatch.setattr(joint, "quickest", searched)
    monkeypatch.setattr("meshwright.search.cost_modes.auto", search)
    with pytest.raises(PlanError, match="seen enough"):
        planned("deep llama", "2x2", 0.9, pipeline=1)
    early = offered[0]()
    assert early.techniques.recompute and early.claims["peak_bytes"] <= limit
    later = offered[-1]()
    assert later.claims["peak_bytes"] <= limit
    assert known[-1] == pytest.approx(1.01 * later.claims["step_seconds"])


def test_no_search_without_techniques_follows_a_choice_near_its_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It took three quarters of the time of MiniMax on 128 ranks, to gain 2 % at most."""

    def search(planner: Planner, below: float) -> SearchResult:
        raise AssertionError("a search was begun")

    monkeypatch.setattr("meshwright.search.cost_modes.auto", search)
    monkeypatch.setattr(joint, "_is_near", lambda *_: True)
    plan = planned("deep llama", "2x2", 0.9, pipeline=1)
    assert plan.techniques.non_defaults()
    assert plan.claims["peak_bytes"] <= 0.9 * free("deep llama", "2x2", "auto").claims["peak_bytes"]


def test_no_search_follows_where_a_choice_without_techniques_computes_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A recipe whose step is within 1 % of computing alone: GPT-OSS 20B on 128 ranks is planned in a fifth."""

    def search(planner: Planner, below: float) -> SearchResult:
        raise AssertionError("a search was begun")

    best = free("wide gpt", "2x2", "auto").claims["step_seconds"]
    monkeypatch.setattr("meshwright.search.cost_modes.auto", search)
    plan = planned("wide gpt", "2x2", 0.9)
    assert not plan.techniques.non_defaults() and plan.claims["step_seconds"] <= 1.01 * best
    assert plan.claims["gaps"]["joint"] <= 0.02
    assert any(note.startswith("auto did not look at recompute, micro_batches, ") for note in plan.notes)


@pytest.mark.full  # test_solve_limits.py has such a search
@pytest.mark.parametrize("call", first(1, range(3)))
def test_a_search_that_finds_nothing_and_proves_nothing_is_left_out(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count()

    def undecided(*args: Any, **options: Any) -> Any:
        if next(calls) == call:
            raise NoStates(None, proven=False)
        return solve_limited(*args, **options)

    best = free("wide gpt", "2x2", "auto").claims["step_seconds"]
    monkeypatch.setattr("meshwright.search.memory_limit.solve_limited", undecided)
    plan = planned("wide gpt", "2x2", 0.5)
    assert next(calls) > call
    assert plan.techniques.pipeline == 1
    assert plan.claims["step_seconds"] <= 1.05 * best


@pytest.mark.parametrize(("model", "mesh", "share"), TIGHT)
def test_every_rank_of_what_was_chosen_is_within_the_limit(model: str, mesh: str, share: float) -> None:
    plan = tight(model, mesh, share)
    found = peaks(model, plan, cluster("gpu", mesh))
    assert plan.techniques.non_defaults(), "nothing was chosen, so nothing is shown"
    assert max(p.bytes for p in found) <= share * free(model, mesh, "auto").claims["peak_bytes"]
    assert plan.claims["peak_bytes"] == pytest.approx(found[0].bytes)


@pytest.mark.parametrize(("model", "mesh", "share"), TIGHT)
def test_what_was_chosen_computes_what_one_device_computes(model: str, mesh: str, share: float) -> None:
    net, batch, loss = built(model)
    mw.verify(net, batch, loss=loss, plan=tight(model, mesh, share)).raise_if_different()


@pytest.mark.full  # the test after the next shows it of activations
def test_weights_or_activations_go_to_the_host() -> None:
    plan = tight(*DEEP)
    assert {"activations", "parameters"}.intersection(plan.techniques.offload), str(plan.techniques)


@pytest.mark.full  # another search; the next test shows it of activations
def test_weights_or_activations_go_to_the_host_where_that_is_quicker_than_computing_again() -> None:
    plan = tight(*DEEP)
    held = planned("wide gpt", "2x2", 0.28, offload=("optimizer",), slice_activation=False)
    assert plan.claims["step_seconds"] <= 0.98 * held.claims["step_seconds"]


def test_activations_alone_go_to_the_host_where_nothing_else_is_as_quick() -> None:
    """Computing again costs a ninth of the step, the link next to nothing; micro-batches would cost 1 %, which is what
    they must save to be left for it."""
    config = llama.LlamaConfig(vocabulary=64, width=32, inner=64, layers=4, heads=2, kv_heads=2, sequence=128)
    net, batch, loss = llama.build(config, batch=2)
    how: Any = {"mesh": MESHES["2"], "mode": "auto", "cluster": cluster("gpu", "2"), "optimizer_states": 0}
    how["micro_batches"] = 1
    whole = mw.plan(net, batch, loss=loss, **how).claims["peak_bytes"]
    plan = mw.plan(net, batch, loss=loss, memory=0.8 * whole, **how)
    assert plan.techniques.non_defaults() == {"offload": ("activations",)}
    without = mw.plan(net, batch, loss=loss, memory=0.8 * whole, offload=(), **how)
    assert plan.claims["step_seconds"] < 0.97 * without.claims["step_seconds"]  # one layer of four again


@pytest.mark.slow  # each claim is planned with; tests/search/test_too_large.py does so for smaller models
def test_what_alone_would_fit_is_named() -> None:
    net, batch, loss = built("wide gpt")
    limit = 0.4 * free("wide gpt", "2x2", "auto").claims["peak_bytes"]
    how: Any = {"mesh": MESHES["2x2"], "mode": "dynamic_programming", "cluster": cluster("gpu", "2x2")}
    with pytest.raises(PlanError, match="no plan fits") as caught:
        mw.plan(net, batch, loss=loss, memory=limit, **how)
    assert "offload=('optimizer',)" in caught.value.hint
    named = mw.plan(net, batch, loss=loss, memory=limit, offload=("optimizer",), **how)
    assert named.claims["peak_bytes"] <= limit


@pytest.mark.slow
def test_what_the_user_fixed_stays_and_the_rest_is_chosen() -> None:
    plan = planned("wide gpt", "2x2", 0.45, micro_batches=1, offload=())
    assert plan.techniques.micro_batches == 1 and not plan.techniques.offload
    assert plan.techniques.recompute
    assert not any("auto chose micro_batches" in note for note in plan.notes)


def test_where_memory_suffices_nothing_is_chosen() -> None:
    plan = free("wide gpt", "2x2", "auto")
    assert not {"recompute", "micro_batches", "offload"} & set(plan.techniques.non_defaults())


@pytest.mark.parametrize(("model", "mesh", "share"), TIGHT)
def test_each_open_technique_is_explained(model: str, mesh: str, share: float) -> None:
    said = [note for note in tight(model, mesh, share).notes if note.startswith("auto chose")]
    words = [note.removeprefix("auto chose ").removeprefix("no ") for note in said]
    assert [re.split("[;=:]", word)[0] for word in words] == [
        "recompute",
        "micro_batches",
        "slice_activation",
        "offload",
    ]
    assert any("next best" in note for note in said)
    assert any("fit" in note for note in said)


def test_a_first_answer_is_a_recipe_under_what_makes_it_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has no layers to compute again: micro-batches and the host make room."""
    monkeypatch.setattr("meshwright.search.joint.TECHNIQUES", replace(TECHNIQUES, small_size=0))
    told: list[tuple[str, float]] = []

    def progress(stage: str, price: float | None, bound: float | None) -> None:
        if price is not None:
            told.append((stage, price))

    plan = planned("wide mlp", "2", 0.35, progress=progress)
    stage, seconds = told[0]
    assert stage == "recipe" and plan.claims["step_seconds"] <= seconds


@pytest.mark.parametrize(("model", "mesh", "share"), TIGHT)
def test_nothing_that_was_simulated_is_quicker(model: str, mesh: str, share: float) -> None:
    said = [note for note in tight(model, mesh, share).notes if "next best" in note]
    assert said and not any(" at -" in note for note in said), said


def test_what_is_found_to_be_quicker_when_a_search_ends_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a next best at less than nothing."""
    seen: list[float] = []

    def found_at_the_end(made: Any, over: Any, near: Any, best: SearchResult) -> SearchResult | None:
        other = quicker(made, over, near, best)
        if other is not None:
            made.planner.request.stop.interrupt()
            seen.extend(one.claims["step_seconds"] for one in (best, other))
        return other

    monkeypatch.setattr("meshwright.search.joint.quicker", found_at_the_end)
    plan = planned("wide mlp", "2", 0.6)
    assert seen[1] < seen[0] and plan.claims["step_seconds"] == pytest.approx(seen[1])
    assert not any(" at -" in note for note in plan.notes)


def test_what_the_host_has_no_room_for_is_said() -> None:
    net, batch, loss = built("wide mlp")
    on = replace(cluster("gpu", "2"), host_memory_bytes=1e5)
    plan = mw.plan(net, batch, loss=loss, cluster=on, mode="data_parallel", offload="optimizer")
    moments = 2 * sum(p.nbytes for p in net.parameters())
    assert plan.claims["host_bytes"] >= moments > on.host_memory_bytes
    assert any("of a rank on its host" in note for note in plan.notes)


def test_micro_batches_that_would_be_inexact_are_not_chosen() -> None:
    net, batch, loss = zoo.hugging_face("resnet")
    machine = cluster("gpu", "2")
    plain = mw.plan(net, batch, loss=loss, mesh=2, mode="auto", cluster=machine)
    plan = mw.plan(
        net, batch, loss=loss, mesh=2, mode="auto", cluster=machine, memory=0.8 * plain.claims["peak_bytes"]
    )
    assert plan.techniques.micro_batches == 1
    assert any("look" in note and "inexact" in note for note in plan.notes)


def test_a_plan_and_its_file_say_the_same() -> None:
    plan = tight("wide mlp", "2", 0.35)
    assert Plan.from_json(plan.to_json()).techniques == plan.techniques


def test_where_nothing_fits_the_most_frugal_techniques_are_named() -> None:
    with pytest.raises(PlanError, match="no plan fits") as caught:
        planned("llama", "2", 0.02)
    assert "recompute='full'" in caught.value.why and "micro_batches=" in caught.value.why


@functools.cache
def hardly_fits() -> Plan:
    """Only with an example or two of a rank at a time, which cuts alone over examples do not leave."""
    return planned("wide mlp", "2x2", 0.39)


def test_what_fits_with_very_many_micro_batches_is_not_refused() -> None:
    limit = 0.39 * free("wide mlp", "2x2", "auto").claims["peak_bytes"]
    assert hardly_fits().claims["peak_bytes"] <= limit


def test_slices_that_change_nothing_are_not_chosen() -> None:
    assert not hardly_fits().techniques.slice_activation


def test_what_was_chosen_can_be_asked_for() -> None:
    chosen = hardly_fits()
    names = ("recompute", "micro_batches", "slice_activation", "offload")
    asked = planned("wide mlp", "2x2", 0.39, pipeline=1, **{n: getattr(chosen.techniques, n) for n in names})
    assert asked.claims["step_seconds"] <= 1.02 * chosen.claims["step_seconds"]


def test_gradients_are_accumulated_in_shards_where_that_is_quicker() -> None:
    """With room for no more than shards of them, fewer micro-batches fit: what a user may ask for, `auto` finds."""
    with torch.device("meta"):
        config = gpt.GPTConfig(vocabulary=64, width=1024, layers=2, heads=8, sequence=1024)
        net, batch, loss = gpt.build(config, batch=32)
    machine = mw.Cluster.preset("a100-40", nodes=1, ranks_per_node=4)
    plan = mw.plan(net, batch, loss=loss, cluster=machine, mode="auto", memory=0.75e9, pipeline=1)
    assert plan.techniques.gradient_accumulation_shard and plan.techniques.micro_batches > 1
    assert any("gradient_accumulation_shard=True; next best False at" in note for note in plan.notes)
