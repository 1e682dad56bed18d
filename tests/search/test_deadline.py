"""A search with a time limit returns in time, with the best plan that it knew."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

import meshwright as mw
from meshwright.errors import PlanError
from meshwright.examples import gpt
from meshwright.search.deadline import within_time
from meshwright.search.stop import Stop
from tests.breadth import quick
from tests.search.planned import cluster


def begun(seconds: float) -> Stop:
    stop = Stop(seconds)
    stop.begin()
    return stop


def searching() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "meshwright search" and t.is_alive()]


def endless(stop: Stop, *offers: tuple[float, str]) -> Any:
    for seconds, found in offers:
        stop.offer(seconds, found)
    while True:
        time.sleep(0.001)


def test_a_search_that_never_ends_answers_with_its_quickest_offer() -> None:
    stop = begun(0.05)
    assert (
        within_time(stop, lambda: endless(stop, (2.0, "slow"), (1.0, "quick"), (3.0, "slowest"))) == "quick"
    )
    assert stop.over
    for thread in threading.enumerate():
        if thread.name == "meshwright search":
            thread.join(10)
    assert not searching()


def test_what_is_offered_goes_through_the_answers_of_its_place() -> None:
    stop = begun(0.05)

    def search() -> str:
        with stop.answered_by(lambda found: found + ", in stages"):
            with stop.answered_by(lambda found: found + ", unfolded"):
                stop.offer(1.0, "choice")
            with stop.of_a_part():
                stop.offer(0.5, "a part is no answer")
        return endless(stop)

    assert within_time(stop, search) == "choice, unfolded, in stages"


def test_without_an_offer_the_error_says_how_far_the_search_came() -> None:
    stop = begun(0.05)
    stop.stage = "recursion"
    with pytest.raises(
        PlanError, match=r"no plan was found within 0.05 s[\s\S]*recursion[\s\S]*longer time_limit"
    ) as error:
        within_time(stop, lambda: endless(stop))
    assert "_programming" not in error.value.hint  # it may be the mode of this search, or not fit
    assert "data_parallel" not in error.value.hint


def test_what_another_search_found_is_no_answer() -> None:
    stop = begun(0.05)

    def search() -> str:
        stop.offer(1.0, "of one stage, which does not fit after all")
        stop.disarm()
        return endless(stop)

    with pytest.raises(PlanError, match="no plan was found"):
        within_time(stop, search)


def test_results_and_errors_pass_through() -> None:
    def fail() -> str:
        raise PlanError("nothing fits")

    assert within_time(begun(60.0), lambda: "made") == "made"
    with pytest.raises(PlanError, match="nothing fits"):
        within_time(begun(60.0), fail)
    assert within_time(begun(float("inf")), lambda: "made") == "made"


def test_who_asks_for_the_end_gets_what_is_known_by_then() -> None:
    """Also from work that does not look at whether it should end, and without a time limit."""
    stop = begun(float("inf"))

    def search() -> str:
        stop.interrupt()
        time.sleep(0.1)  # nothing is known yet: the search goes on
        return endless(stop, (1.0, "known"))

    assert within_time(stop, search) == "known"
    assert stop.over


@pytest.mark.parametrize(
    ("mode", "techniques"),
    [
        ("auto", {}),
        ("recursive_programming", {"micro_batches": 2, "recompute": "full"}),
        ("dynamic_programming", {"pipeline": 2, "micro_batches": 4}),
    ],
)
@quick(lambda mode, techniques: mode != "recursive_programming")
def test_a_plan_that_was_taken_at_the_limit_is_proved(
    mode: str, techniques: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No loop looks at the time here, and the search hangs once it has offered something."""
    model, batch, loss = gpt.build(
        gpt.GPTConfig(vocabulary=64, width=16, layers=4, heads=4, sequence=16), batch=8
    )
    monkeypatch.setattr(Stop, "now", lambda stop, known=False: False)
    offer = Stop.offer

    def last_offer(stop: Stop, seconds: float, found: object) -> None:
        offer(stop, seconds, found)
        endless(stop)

    monkeypatch.setattr(Stop, "offer", last_offer)
    # Not so long that a first offer could come too late on a busy machine: the wait goes on until there is one.
    monkeypatch.setattr("meshwright.search.deadline.TO_FIND", 60.0)
    plan = mw.plan(
        model, batch, loss=loss, cluster=cluster("gpu", "2x2"), mode=mode, time_limit=0.05, **techniques
    )
    assert any("ended after 0.05 s" in note for note in plan.notes), plan.notes
    assert plan.mode == mode and plan.claims["step_seconds"] > 0
    if mode == "auto":  # computing alone takes this long
        step, bound = plan.claims["step_seconds"], plan.claims["bound_seconds"]
        assert 0 < bound <= step and plan.claims["gaps"]["joint"] == pytest.approx(step / bound - 1)
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()
