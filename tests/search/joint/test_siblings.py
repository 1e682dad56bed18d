"""What a candidate is expected to take where one that nearly is it was simulated."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.core.techniques import Techniques
from meshwright.search.budget import TECHNIQUES
from meshwright.search.joint.siblings import sibling_seconds

LIMIT, STEP, EXPOSED = 80.0, 4.0, 1.0
AGAIN = {"": 0.0, "selective": 0.25, "full": 0.75}
SURE = 1 - TECHNIQUES.sibling_doubt


@dataclass(frozen=True)
class Stand:
    """What is asked of a candidate."""

    name: str = "front"
    floor: float = 2.0
    gathers: float = 1.0


def choice(*args: Any, **how: Any) -> Any:
    return Stand(*args, **how)


def simulated(techniques: Techniques, peak: float) -> Any:
    evaluation = SimpleNamespace(exposed_seconds=EXPOSED, timed=True, host_bytes=0.0, peak_bytes=peak)
    space = SimpleNamespace(least_gathers=lambda states: 1.0)
    claims = {"step_seconds": STEP, "price_seconds": STEP}
    return SimpleNamespace(
        techniques=techniques, claims=claims, evaluation=evaluation, space=space, states=()
    )


def expected(
    one: Any,
    asked: Techniques,
    sibling: Any,
    its: Techniques,
    *,
    peak: float = 40.0,
    ahead: int = 2,
) -> float:
    """What one takes under the asked techniques, where a sibling was simulated under its own."""
    cluster = SimpleNamespace(host_memory_bytes=None)
    planner: Any = SimpleNamespace(
        request=SimpleNamespace(memory_bytes=LIMIT, cluster=cluster),
        peak_bytes=lambda found: found.evaluation.peak_bytes,
    )
    found = simulated(Techniques(recompute=its.recompute, offload=its.offload, prefetch=ahead), peak)
    return sibling_seconds(
        planner, {(sibling, its): found}, lambda c, t: (c.floor, AGAIN[t.recompute]), one, asked
    )


PLAIN, FULL, HOSTED = Techniques(), Techniques(recompute="full"), Techniques(offload=("activations",))


def test_one_that_is_it_but_for_a_few_operators_takes_as_long() -> None:
    assert expected(choice(), PLAIN, choice(), PLAIN) == pytest.approx(SURE * STEP)
    assert expected(choice(), PLAIN, choice(floor=2.5), PLAIN) == pytest.approx(SURE * (STEP - 0.5))
    assert expected(choice(floor=2.5), PLAIN, choice(), PLAIN) == pytest.approx(SURE * STEP)


def test_what_is_not_computed_again_is_all_that_another_policy_saves() -> None:
    one = choice()
    assert expected(one, PLAIN, one, FULL) == pytest.approx(SURE * (STEP - 0.75))
    assert expected(one, FULL, one, PLAIN) == pytest.approx(SURE * STEP)


def test_more_on_the_host_is_no_quicker_and_less_may_be() -> None:
    one = choice()
    assert expected(one, HOSTED, one, PLAIN) == pytest.approx(SURE * STEP)
    assert expected(one, PLAIN, one, HOSTED) == 0.0


@pytest.mark.parametrize("other", [choice("data parallel"), choice(gathers=1.1)])
def test_others_say_nothing(other: Any) -> None:
    assert expected(choice(), PLAIN, other, PLAIN) == 0.0


def test_one_that_could_not_gather_further_ahead_says_nothing() -> None:
    one = choice()
    assert expected(one, FULL, one, PLAIN, ahead=1) == 0.0
    assert expected(one, FULL, one, PLAIN, peak=90.0) == 0.0


def test_other_micro_batches_say_nothing() -> None:
    one = choice()
    assert expected(one, Techniques(micro_batches=2), one, PLAIN) == 0.0
