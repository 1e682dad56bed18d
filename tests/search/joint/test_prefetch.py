"""Weights that a step waits for are gathered further ahead where memory has room; their gradients are scattered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.core.techniques import Techniques
from meshwright.search.data_parallel import by_batch_rows
from meshwright.search.joint import _again
from meshwright.search.joint.prefetch import further_ahead
from meshwright.search.space.codes import Option
from meshwright.search.stop import Stop
from tests.search.test_memory_of_plans import planner_of

STEPS = {1: 1.0, 2: 0.8, 3: 0.7, 4: 0.6999}  # seconds, by groups of weights that are gathered ahead


def found(techniques: Techniques) -> Any:
    step = STEPS[techniques.prefetch]
    evaluation = SimpleNamespace(
        exposed_seconds=step - 0.6, in_full=False, timed_in_full=False, host_bytes=0.0
    )
    space = SimpleNamespace(least_gathers=lambda states: 0.3)
    return SimpleNamespace(
        techniques=techniques,
        claims={"step_seconds": step, "price_seconds": step},
        evaluation=evaluation,
        space=space,
        states=(),
    )


@pytest.mark.parametrize(
    ("given", "limit", "enough", "taken"),
    [
        ({}, 99.0, 2.0, 3),  # a fourth group saves nothing
        ({}, 12.5, 2.0, 2),  # there is no room for a third
        ({}, 99.0, 0.5, 1),  # it would be slower than the best if nothing were waited for
        ({}, 99.0, 0.65, 1),  # and if no weights were: their gathers take 0.3 s
        ({"given": frozenset({"prefetch"})}, 99.0, 2.0, 1),
    ],
)
def test_weights_are_gathered_further_ahead_while_that_saves_time_and_fits(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], limit: float, enough: float, taken: int
) -> None:
    monkeypatch.setattr("meshwright.search.joint.prefetch.replace", changed)
    fits = "meshwright.search.joint.prefetch.fits_in_both"
    monkeypatch.setattr(fits, lambda planner, one: 10 + one.techniques.prefetch <= limit)

    def under(techniques: Techniques) -> Any:
        return SimpleNamespace(found=lambda space, states, claims: found(techniques))

    planner: Any = SimpleNamespace(under=under, request=SimpleNamespace(stop=Stop()))
    assert further_ahead(planner, found(Techniques(**given)), enough).techniques.prefetch == taken


def test_what_saves_too_little_to_be_the_best_is_not_tried_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.search.joint.prefetch.replace", changed)
    monkeypatch.setattr("meshwright.search.joint.prefetch.fits_in_both", lambda planner, one: True)
    monkeypatch.setitem(STEPS, 2, 0.95)
    tried: list[int] = []

    def under(techniques: Techniques) -> Any:
        tried.append(techniques.prefetch)
        return SimpleNamespace(found=lambda space, states, claims: found(techniques))

    planner: Any = SimpleNamespace(under=under, request=SimpleNamespace(stop=Stop()))
    assert further_ahead(planner, found(Techniques()), 0.8).techniques.prefetch == 2
    assert tried == [2]  # three times as much as the first group saved would leave 0.85 s


def changed(one: Any, **how: Any) -> Any:
    """`dataclasses.replace`, of stand-ins too."""
    return type(one)(**{**vars(one), **how}) if isinstance(one, SimpleNamespace) else Techniques(**how)


def test_the_gradient_of_a_weight_passes_the_view_that_it_is_read_through() -> None:
    """Else it is all-reduced before the shard that is stored is cut out of it."""
    planner = planner_of("transposed", "2", "gpu")
    rows = by_batch_rows(planner.context, planner.codes)
    (view,) = (n.name for n in planner.context.graph.nodes if "permute" in n.op)
    assert rows is not None
    assert {planner.codes[view].options[o] for o in rows[view]} == {Option(grad=True)}


def test_what_is_searched_once_more_is_gathered_further_ahead_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself it is slower than the best, with its weights gathered ahead quicker."""
    room, offered = "meshwright.search.joint", list[float]()
    monkeypatch.setattr(f"{room}.replace", changed)
    monkeypatch.setattr(f"{room}.prefetch.replace", changed)
    monkeypatch.setattr(f"{room}.fits_in_both", lambda planner, one: True)
    monkeypatch.setattr(f"{room}.prefetch.fits_in_both", lambda planner, one: True)
    monkeypatch.setattr(f"{room}.offer", lambda planner, one: offered.append(one.claims["step_seconds"]))
    monkeypatch.setattr(f"{room}.limited", lambda *_, **__: SimpleNamespace(found=found(Techniques())))

    def under(techniques: Techniques) -> Any:
        made = {"found": lambda space, states, claims: found(techniques), "settled": lambda one: one}
        return SimpleNamespace(**made)

    planner: Any = SimpleNamespace(
        under=under,
        size=1,
        request=SimpleNamespace(stop=Stop(), memory_bytes=1.0),
        peak_bytes=lambda one: 0.5,
        tell=lambda *_: None,
    )
    best = found(Techniques())
    best.claims = {"step_seconds": 0.9, "price_seconds": 0.9, "chosen": "a recipe"}
    again = _again(planner, best)
    assert again.techniques.prefetch == 3 and again.claims["chosen"] == "a recipe"
    assert offered == [0.7]
