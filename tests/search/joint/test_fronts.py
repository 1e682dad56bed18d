"""Fronts of choices: what is estimated of one that was simulated is what the simulation said."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright.compile import captured_of
from meshwright.cost.cluster import Cluster
from meshwright.examples import gpt
from meshwright.ops.analysis import factors_of
from meshwright.planning.search_request import request_for
from meshwright.search.budget import TECHNIQUES
from meshwright.search.context import SearchContext
from meshwright.search.evaluate import peak_on
from meshwright.search.exact_spaces import families_of
from meshwright.search.joint.dimensions import dimensions, points
from meshwright.search.joint.front import Front
from meshwright.search.joint.pareto import _nearly, front
from meshwright.search.layer_groups import folded
from meshwright.search.planner import Planner
from meshwright.search.solve import Problem, Solution, solve
from meshwright.search.space.memory import fixed_bytes
from meshwright.search.stop import never
from tests.breadth import first, quick
from tests.search.joint.test_stages import cluster, planner

HOSTED = ("optimizer", "activations", "parameters")
ASKED = ({}, {"recompute": "full"}, {"offload": ("activations",)}, {"recompute": "full", "micro_batches": 2})


@pytest.mark.parametrize("order", [1, -1], ids=["plain first", "plain last"])
@quick(lambda order: order == 1)
def test_a_peak_that_was_simulated_is_not_estimated_by_another(order: int) -> None:
    """What lives for a moment differs by what is kept at all: of each set of techniques it is known apart."""
    made_for = planner("wide gpt", 1e9, cluster())
    made = front(Front(made_for), made_for.space(families_of(made_for)[0][1]))
    candidate = next(c for c in made.candidates if c.examples > 1)
    found = {
        asked: made.evaluated(candidate, asked)
        for asked in (replace(made_for.techniques, **change) for change in ASKED[::order])
    }
    # Sums may be a little over a simulation: they do not know in which order results go.
    seen = {asked: max(made_for.peak_bytes(one), made.sums(candidate, asked)) for asked, one in found.items()}
    assert {asked: made.peak_bytes(candidate, asked) for asked in found} == pytest.approx(seen)
    assert len({round(made._missed(candidate, asked)) for asked in found}) > 1


def test_a_front_is_the_same_whatever_the_limit() -> None:
    """So that what a smaller limit leads to is known under a larger one, too."""
    fronts: list[list[tuple[int, ...]]] = []
    for memory in (1e6, 3e6, 1e9):
        made_for = planner("wide gpt", memory, cluster())
        made = front(Front(made_for), made_for.space(families_of(made_for)[0][1]))
        fronts.append([candidate.states for candidate in made.candidates])
    assert fronts[0] == fronts[1] == fronts[2]


@pytest.mark.parametrize(("gap", "solves"), [(0.005, 1), (0.018, 2)])
def test_what_is_far_from_its_bound_is_solved_with_more_work(
    gap: float, solves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama-405B on 16,384 ranks: the best choice of a front was missed by 1.8 %, and the step was 11 % slower."""
    made_for, work = planner("wide gpt", 1e9, cluster()), list[float]()
    made, problem = Front(made_for), made_for.space(families_of(made_for)[0][1]).problem()

    def limited(asked: Problem, limit_work: float, **options: Any) -> Solution:
        work.append(limit_work)
        found = solve(asked, limit_work=limit_work, **options)
        return replace(found, price=(1 + gap) * found.bound) if limit_work == TECHNIQUES.front_work else found

    monkeypatch.setattr("meshwright.search.joint.pareto.solve", limited)
    found = _nearly(made, problem, never)
    assert found.price == pytest.approx((1 + gap if solves == 1 else 1) * found.bound)
    assert work == [TECHNIQUES.front_work, TECHNIQUES.front_more_work][:solves]


@pytest.mark.full
def test_more_slices_and_more_on_the_host_make_no_step_shorter() -> None:
    """So that what was simulated with less of them says what more of them takes at least."""
    made_for = planner("wide gpt", 1e9, cluster())
    made = front(Front(made_for), made_for.space(families_of(made_for)[0][1]))
    words = ("optimizer", "activations", "parameters")
    asked = [
        replace(made_for.techniques, offload=offload, slice_activation=slices)
        for count in range(len(words) + 1)
        for offload in itertools.combinations(words, count)
        for slices in (False, True)
    ]
    for candidate in made.candidates[:4]:
        for techniques in asked:
            least = made.plainer_seconds(candidate, techniques)
            assert least > 0 or techniques == asked[0]
            assert made.likely_seconds(candidate, techniques) >= least
            step = made.evaluated(candidate, techniques).claims["step_seconds"]
            assert step >= (1 - TECHNIQUES.as_quick) * least


def test_a_choice_that_may_use_memory_that_more_on_the_host_saves_says_nothing() -> None:
    made_for = planner("wide gpt", 1e9, cluster())
    made = front(Front(made_for), made_for.space(families_of(made_for)[0][1]))
    plain, candidate = made_for.techniques, next(c for c in made.candidates if c.layer_bytes > 0)
    peak, more = made_for.peak_bytes(made.evaluated(candidate, plain)), replace(plain, offload=("optimizer",))
    for room, known in ((1.01 * candidate.layer_bytes, True), (0.99 * candidate.layer_bytes, False)):
        made.planner.request = replace(made_for.request, memory_bytes=peak + room)
        assert (made.plainer_seconds(candidate, more) > 0) == known


def test_micro_batches_split_activations_and_not_weights_that_backward_gathers() -> None:
    """What sums miss with one micro-batch says what they miss with two."""
    with torch.device("meta"):
        captured = captured_of(*gpt.build(gpt.GPTConfig(width=512, layers=4), batch=4))
    machine = Cluster.preset("h100", nodes=1, ranks_per_node=2)
    request, folds = request_for(machine, 64e6), folded(captured.graph, captured.folding)
    assert request is not None
    context = SearchContext(folds.graph, factors_of(folds.graph), machine.mesh)
    made_for = Planner(context, folds, {}, request)
    made = front(Front(made_for), made_for.space(families_of(made_for)[0][1]))
    candidate = max(made.candidates, key=lambda one: one.layer_bytes)
    plain, asked = made_for.techniques, replace(made_for.techniques, micro_batches=2)
    made.evaluated(candidate, plain)
    estimate = made.peak_bytes(candidate, asked)
    assert estimate == pytest.approx(made_for.peak_bytes(made.evaluated(candidate, asked)), rel=0.05)


@pytest.mark.parametrize(
    "words", [("optimizer",), ("parameters",), ("optimizer", "parameters")], ids="+".join
)
@quick(lambda words: len(words) == 2)
def test_what_the_update_takes_with_the_host_is_known_before_a_simulation(words: tuple[str, ...]) -> None:
    """The host's processor and the copies are most of such a step: its order among others depends on them."""
    made_for = planner("wide gpt", 1e9, cluster())
    made = front(Front(made_for), made_for.space(families_of(made_for)[0][1]))
    plain, hosted = made_for.techniques, replace(made_for.techniques, offload=words)
    for candidate in made.candidates[:3]:
        expected = made.least_seconds(candidate, hosted) - made.least_seconds(candidate, plain)
        before, after = (made.evaluated(candidate, asked).evaluation for asked in (plain, hosted))
        assert before is not None and after is not None
        assert expected > 0 and after.step_seconds - before.step_seconds == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("slower", [1, 4000], ids=["quick host link", "slow host link"])
@pytest.mark.parametrize("recompute", first(1, ["selective", "", "full"]))
@quick(lambda recompute, slower: slower > 1)
def test_no_step_is_shorter_than_its_bound(recompute: str, slower: float) -> None:
    """Recompute, the starts of kernels for each micro-batch and waits for the host are in the bound."""
    machine = replace(cluster(), host_bytes_per_s=cluster().host_bytes_per_s / slower)
    made_for = planner("wide gpt", 1e9, machine)
    made = front(Front(made_for), made_for.space(families_of(made_for)[0][1]))
    for candidate in made.candidates[:4]:
        for pieces, shard, words in itertools.product((1, 4), (False, True), ((), ("activations",), HOSTED)):
            if pieces > candidate.examples or (shard and pieces == 1):
                continue
            asked = replace(
                made_for.techniques,
                recompute=recompute,
                micro_batches=pieces,
                gradient_accumulation_shard=shard,
                offload=words,
            )
            found = made.evaluated(candidate, asked).evaluation
            assert found is not None
            assert made.least_seconds(candidate, asked) <= (1 + 1e-9) * found.step_seconds, asked
            waits = made._waits_for_host(candidate, asked)
            assert waits == 0 if slower == 1 or not words else waits > 0 or recompute
            if not words:  # what is not in the bound is little but for communication
                busy = found.step_seconds - found.exposed_seconds
                assert made.least_seconds(candidate, asked) == pytest.approx(busy, rel=0.1), asked


@pytest.mark.parametrize("model", first(1, ["wide gpt", "wide gpt-oss"]))
def test_no_more_leaves_the_device_by_the_sums_than_in_the_program(model: str) -> None:
    """What an operator keeps itself, as a softmax does, stays: a link that seems busy hides plans that are quick."""
    made_for = planner(model, 1e9, cluster())
    made = front(Front(made_for), made_for.space(families_of(made_for)[0][1]))
    asked = replace(made_for.techniques, offload=("activations",))
    for candidate in made.candidates[:3]:
        found = made_for.under(asked).found(candidate.space, candidate.states, {}, timed=False)
        assert found.evaluation is not None
        # but for values of less than a KiB, which stay
        assert 0 < made._kept_on_host(candidate, asked) <= 1.005 * found.evaluation.host_bytes


def test_the_sums_of_an_update_are_those_of_its_simulation() -> None:
    """An optimizer that updates all parameters at once copies them."""
    made_for = planner("wide gpt", 1e9, cluster())
    made = front(Front(made_for), made_for.space(families_of(made_for)[0][1]))
    candidate, cuda = made.candidates[0], made_for.request.cluster
    graph, choice = made_for.folds.full, candidate.space.choice(candidate.states)
    assert made_for.evaluator is not None
    seen = peak_on(made_for.evaluator._lowered(graph, choice), cuda, 2)
    summed = fixed_bytes(candidate.space) + made.memory(candidate.space, made_for.techniques).totals(
        candidate.states
    )
    assert summed[1] == pytest.approx(dict(seen.timeline)["update"], rel=0.02)
    assert summed[1] <= dict(seen.timeline)["update"]


# Every fifth set of techniques, or all.
@pytest.mark.parametrize(("in_flight", "turn"), first(1, [(2.5, 5), (2.5, 1), (1.0, 1)]))
def test_the_sums_of_a_candidate_are_those_of_its_space_to_the_last_bit(in_flight: float, turn: int) -> None:
    made_for = planner("wide gpt", 1e9, cluster())
    made_for = made_for.with_request(replace(made_for.request, in_flight=in_flight))
    made = front(Front(made_for), made_for.space(families_of(made_for)[0][1]))
    for candidate in made.candidates:
        for point in list(points(dimensions(made_for), made_for.techniques))[::turn]:
            expected = made.memory(candidate.space, point.techniques).totals(candidate.states)
            assert made.chosen(candidate, point.techniques).totals().tolist() == expected.tolist(), point
