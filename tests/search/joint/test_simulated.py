"""Which choices are simulated, by what is known of them before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.core.techniques import Techniques
from meshwright.search.joint import simulated
from meshwright.search.joint.front import Front
from meshwright.search.joint.simulated import partly, spared_seconds
from meshwright.search.stop import Stop

CHOICE: Any = object()
PLANNER: Any = object()


def front_of(limit: float | None, peaks: dict[str, float]) -> Any:
    """A front of one choice, whose recompute takes a second, and a tenth what is cheap. `peaks`: policy → bytes."""
    request = SimpleNamespace(memory_bytes=limit, stop=Stop())
    return SimpleNamespace(
        planner=SimpleNamespace(request=request, nodes=100),
        peak_bytes=lambda candidate, asked: peaks[asked.recompute],
        again_seconds=lambda candidate, asked: {"": 0.0, "selective": 0.1, "full": 1.0}[asked.recompute],
        partly=[],
    )


@pytest.mark.parametrize(
    ("limit", "asked", "spared"),
    [
        (80.0, {"recompute": "full"}, 0.75),  # of four layers three keep what they have
        (80.0, {"recompute": ""}, 0.0),
        (110.0, {"recompute": "full"}, 0.0),  # nothing must be computed again
        (10.0, {"recompute": "full"}, 0.0),  # all must be, and more
        (80.0, {"recompute": "full", "offload": ("activations",)}, 0.0),  # what is kept takes the link
        (80.0, {"recompute": "full", "given": frozenset({"recompute"})}, 0.0),  # as the user says
        (None, {"recompute": "full"}, 0.0),
    ],
)
def test_recompute_is_expected_in_no_more_layers_than_must_be(
    monkeypatch: pytest.MonkeyPatch, limit: float | None, asked: dict[str, Any], spared: float
) -> None:
    monkeypatch.setattr(simulated, "lighter_policies", lambda planner, policy: ("",))
    made = front_of(limit, {"": 100.0, "full": 20.0})
    assert spared_seconds(made, CHOICE, Techniques(**asked)) == pytest.approx(spared)


@pytest.mark.parametrize(
    ("cheap", "spared"), [(99.0, 0.75), (90.0, 0.9 * 60 / 70), (84.0, 0.9 * 60 / 64), (44.0, 0.75)]
)
def test_others_keep_all_or_compute_again_what_is_cheap(
    monkeypatch: pytest.MonkeyPatch, cheap: float, spared: float
) -> None:
    monkeypatch.setattr(simulated, "lighter_policies", lambda planner, policy: ("", "selective"))
    made = front_of(80.0, {"": 100.0, "selective": cheap, "full": 20.0})
    assert spared_seconds(made, CHOICE, Techniques(recompute="full")) == pytest.approx(spared)


@pytest.mark.parametrize(
    ("expected", "step", "taken"), [(0.9, 0.93, True), (0.9, 1.02, False), (0.995, 0.93, False)]
)
def test_what_may_be_quickest_with_fewer_layers_is_tried_with_them(
    monkeypatch: pytest.MonkeyPatch, expected: float, step: float, taken: bool
) -> None:
    def choice(seconds: float) -> Any:
        return SimpleNamespace(claims={"step_seconds": seconds, "price_seconds": seconds})

    monkeypatch.setattr(simulated, "fewer_layers", lambda planner, found: few)
    monkeypatch.setattr(simulated, "offer", lambda planner, found: None)
    made, best, full, few = front_of(80.0, {}), choice(1.0), choice(1.1), choice(step)
    made.partly.append((expected, full))
    assert partly(made, best, best) == ((full, few) if taken else (best, best))


def test_how_late_a_step_was_says_nothing_of_one_with_less_on_the_host() -> None:
    made = Front(PLANNER)
    plain, hosted = Techniques(offload=("optimizer",)), Techniques(offload=("optimizer", "activations"))
    made.late[CHOICE, ""] = {hosted: 0.5}
    assert made._own_late(CHOICE, plain) is None
    made.late[CHOICE, ""][plain] = 0.2
    assert made._own_late(CHOICE, hosted) == made._own_late(CHOICE, plain) == 0.2


def test_one_late_step_does_not_decide_the_order() -> None:
    made, asked = Front(PLANNER), Techniques(micro_batches=4)
    made.soonest[Techniques()] = [0.5]
    assert made.least_late(asked) == 0.0
    made.soonest[Techniques()].append(0.3)
    assert made.least_late(asked) == 0.3
