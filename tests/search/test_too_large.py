"""A refusal claims nothing that planning with it would not bear out; no limit is refused that a smaller one was not."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import pytest

import meshwright as mw
from meshwright.capture import Captured
from meshwright.compile import captured_of, plan_captured
from meshwright.core.techniques import techniques_from
from meshwright.errors import DoesNotFit, PlanError
from meshwright.examples import gpt
from meshwright.plan.plan import Plan
from meshwright.planning.search_request import request_for
from meshwright.redistribute.steps import enough_bytes, show_bytes
from tests.breadth import quick
from tests.search.planned import SEARCHES, cluster, tower

UNITS = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}


CASES = [
    *[pytest.param(("tower", mode), id=f"tower-{mode}") for mode in SEARCHES[:2]],
    pytest.param(("tower", "auto"), id="tower-auto", marks=pytest.mark.slow),
    *[pytest.param(("gpt", mode), id=f"gpt-{mode}", marks=pytest.mark.slow) for mode in SEARCHES],
]


@functools.cache
def captured(model: str) -> Captured:
    if model == "tower":
        return captured_of(*tower(64, 3, rows=512))
    return captured_of(*gpt.build(gpt.GPTConfig(96, 32, 2, 4, 32), batch=16))


def planned(case: tuple[str, str], limit: float, states: int = 2, **techniques: Any) -> Plan:
    model, mode = case
    request = request_for(cluster("gpu", "2x2"), limit, states)
    return plan_captured(captured(model), None, mode, None, request, techniques_from(techniques))


@functools.cache
def peak_without_limit(case: tuple[str, str]) -> float:
    return planned(case, 1e12).claims["peak_bytes"]


def bytes_in(text: str) -> float:
    found = re.search(r"([\d.]+) (B|kB|MB|GB) per rank", text)
    assert found, text
    return float(found[1]) * UNITS[found[2]]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("share", [0.08, 0.4, pytest.param(0.6, marks=pytest.mark.slow)])
@quick(lambda share, case: share < 0.1)
def test_every_change_that_a_refusal_names_fits_when_it_is_planned_with(
    case: tuple[str, str], share: float
) -> None:
    limit = share * peak_without_limit(case)
    try:
        planned(case, limit)
        return
    except PlanError as error:
        hint = error.hint
    head, _, changes = hint.partition(": ")
    assert head == "the smallest single changes that fit"
    assert changes.endswith("per rank")
    for change in changes.split("; or "):
        if change.endswith("per rank"):
            named = bytes_in(change)
            found = planned(case, named)
            assert found.claims["peak_bytes"] <= named
            continue
        if "optimizer_states" in change:
            fewer = int(change.partition("optimizer_states=")[2].rstrip(")"))
            found = planned(case, limit, fewer)
        else:
            found = planned(case, limit, **eval(f"dict({change})"))  # as a user would write it
        assert found.claims["peak_bytes"] <= limit, change


@pytest.mark.parametrize("case", CASES)
@quick(lambda case: case[1] == SEARCHES[0])
def test_no_limit_is_refused_above_the_least_peak_that_was_found(case: tuple[str, str]) -> None:
    most = peak_without_limit(case)
    with pytest.raises(PlanError) as caught:
        planned(case, 0.02 * most)
    least = bytes_in(caught.value.hint)
    peaks = [planned(case, least + share * (most - least)).claims["peak_bytes"] for share in (0, 0.2, 0.6)]
    for peak in peaks:  # the peak of each is a limit, too
        assert planned(case, peak).claims["peak_bytes"] <= peak


def test_a_batch_is_named_after_it_was_planned() -> None:
    model, batch, loss = tower(64, 3, rows=512)
    machine = cluster("gpu", "2")
    whole = mw.plan(model, batch, loss=loss, cluster=machine, mode="recursive_programming")
    limit = 0.45 * whole.claims["peak_bytes"]
    with pytest.raises(DoesNotFit, match="no plan fits") as caught:
        mw.plan(model, batch, loss=loss, cluster=machine, mode="recursive_programming", memory=limit)
    rows = int(re.search(r"a batch of 1/\d+ of this one, (\d+) rows", caught.value.hint)[1])
    found = mw.plan(
        model,
        {"x": batch["x"][:rows]},
        loss=loss,
        cluster=machine,
        mode="recursive_programming",
        memory=limit,
    )
    assert found.claims["peak_bytes"] <= limit


@pytest.mark.parametrize("mode", ["data_parallel", "sharding_propagation"])
def test_a_limit_of_the_user_is_kept_by_modes_that_search_nothing_and_that_of_the_device_is_told(
    mode: str,
) -> None:
    model, batch, loss = tower(64, 3, rows=512)
    machine = cluster("gpu", "2x2")
    peak = mw.plan(model, batch, loss=loss, cluster=machine, mode=mode).claims["peak_bytes"]
    assert (
        mw.plan(model, batch, loss=loss, cluster=machine, mode=mode, memory=peak).claims["peak_bytes"] == peak
    )
    with pytest.raises(DoesNotFit, match="the plan does not fit into") as caught:
        mw.plan(model, batch, loss=loss, cluster=machine, mode=mode, memory=0.9 * peak)
    named = bytes_in(caught.value.hint)
    assert mw.plan(model, batch, loss=loss, cluster=machine, mode=mode, memory=named)
    small = replace(machine, device=replace(machine.device, memory_bytes=int(0.9 * peak)))
    told = mw.plan(model, batch, loss=loss, cluster=small, mode=mode)
    assert any("does not fit" in note for note in told.notes)


def test_bytes_to_write_as_a_limit_are_never_rounded_down() -> None:
    for count in (*range(1, 999, 7), 1002, 99_549, 99_551, 999_499, 999_501, 12_345_678, 5_437_000, 2e9 + 1):
        value, unit = enough_bytes(count).split()
        assert count <= float(value) * UNITS[unit] <= 1.11 * count, count
    assert enough_bytes(1e6) == show_bytes(1e6) == "1.0 MB"


def test_a_time_limit_ends_a_search_with_its_first_answer_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for wait in ("TO_END", "TO_FIND"):  # on a busy machine the search may take longer to end by itself
        monkeypatch.setattr(f"meshwright.search.deadline.{wait}", 60.0)
    model, batch, loss = tower(64, 3, rows=512)
    machine = cluster("gpu", "2x2")
    limit = 0.9 * peak_without_limit(("tower", "recursive_programming"))
    found = mw.plan(model, batch, loss=loss, cluster=machine, memory=limit, time_limit=1e-3)
    assert found.claims["peak_bytes"] <= limit
    assert any("ended after 0.001 s" in note for note in found.notes)
    assert found.claims["bound_seconds"] > 0 and "joint" in found.claims["gaps"]
    with pytest.raises(PlanError, match="time_limit=0"):
        mw.plan(model, batch, loss=loss, cluster=machine, time_limit=0)
    with pytest.raises(PlanError, match=r"time_limit=3 without a cluster"):
        mw.plan(model, batch, loss=loss, mesh=2, time_limit=3)


def test_a_calibration_without_a_quiet_row_is_warned_of() -> None:
    machine = cluster("cpu", "2")
    measured = replace(machine.measured, rates={"memory": ((1e6, 1e9),)})
    void = replace(machine, measured=replace(measured, void=("all_reduce", "memory")))
    some = replace(machine, measured=replace(measured, void=("all_reduce",)))
    model, batch, loss = tower(64, 3, rows=512)
    notes = mw.plan(model, batch, loss=loss, cluster=void, mode="data_parallel").notes
    assert any("seconds are worth nothing" in note for note in notes)
    notes = mw.plan(model, batch, loss=loss, cluster=some, mode="data_parallel").notes
    assert any("seconds are rough" in note for note in notes)
