"""A choice is left for what is quicker, or as quick and plainer: techniques that win nothing are not kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.core.techniques import Techniques
from meshwright.search.joint.dimensions import Dimension, Point, with_values
from meshwright.search.joint.neighbours import SHARDINGS, Neighbour, neighbours, quicker

OVER = (
    Dimension("recompute", ("", "selective", "full")),
    Dimension("micro_batches", (1, 2, 4)),
    Dimension("offload", ((), ("optimizer",), ("activations",), ("optimizer", "activations"))),
)
HERE: dict[str, Any] = {"recompute": "selective", "micro_batches": 2, "offload": ("activations",)}


def found(seconds: float, techniques: dict[str, Any]) -> Any:
    return SimpleNamespace(
        techniques=Techniques(**techniques),
        claims={"step_seconds": seconds, "price_seconds": seconds},
        evaluation=None,
        space=None,
    )


@pytest.mark.parametrize(
    ("name", "value", "seconds", "taken"),
    [
        ("recompute", "", 1.0008, True),  # as quick, and nothing is computed again
        ("recompute", "", 1.002, False),
        ("recompute", "full", 0.9995, False),  # less plain, and no quicker
        ("micro_batches", 4, 0.99, True),
        ("offload", (), 1.0008, True),
        ("offload", ("optimizer",), 1.0008, False),  # another word, not one less
        ("offload", ("optimizer",), 0.998, True),
        ("offload", ("optimizer",), 0.9995, False),  # no quicker than a step that is known
        (SHARDINGS, None, 0.998, True),
        (SHARDINGS, None, 0.9995, False),
        (SHARDINGS, None, 0.99, True),
    ],
)
def test_the_plainer_of_what_is_as_quick_is_taken(name: str, value: Any, seconds: float, taken: bool) -> None:
    request = SimpleNamespace(memory_bytes=None, cluster=SimpleNamespace(host_memory_bytes=0))
    planner = SimpleNamespace(request=request, peak_bytes=lambda one: 0.0)
    other = found(seconds, {**HERE, **({name: value} if name != SHARDINGS else {})})
    made: Any = SimpleNamespace(planner=planner)
    near = {name: Neighbour(other.techniques, seconds, other)}
    chosen = quicker(made, OVER, near, found(1.0, HERE))
    assert chosen is (other if taken else None)


def front_of(**given: Any) -> Any:
    """A front of one choice, of which all that is given is said; nothing is over a limit."""
    request = SimpleNamespace(memory_bytes=None, cluster=SimpleNamespace(host_memory_bytes=0))
    return SimpleNamespace(
        planner=SimpleNamespace(request=request),
        peak_bytes=lambda candidate, asked: 0.0,
        saves=lambda candidate, asked: True,
        spent=False,
        **given,
    )


def test_a_neighbour_that_is_expected_to_be_slower_is_estimated_and_not_simulated() -> None:
    expected = {1: 0.9, 2: 1.0, 4: 1.3}  # micro-batches → seconds
    simulated: list[int] = []

    def evaluated(candidate: Any, asked: Techniques, enough: float) -> Any:
        simulated.append(asked.micro_batches)
        return found(1.5, {**HERE, "micro_batches": asked.micro_batches})

    made = front_of(
        candidates=[SimpleNamespace(space=None, states=(), examples=4)],
        overfills_host=lambda candidate, asked: asked.recompute == "full",
        likely_seconds=lambda candidate, asked: (
            expected[asked.micro_batches] + 0.1 * (asked.offload != HERE["offload"])
        ),
        plainer_seconds=lambda candidate, asked: 0.0,
        evaluated=evaluated,
    )
    best = found(1.0, HERE)
    best.states = ()
    near = neighbours(made, OVER, best)
    # Nothing computed again is as quick by estimate, and plainer; one micro-batch is quicker.
    assert simulated == [2, 1]
    assert near["micro_batches"].seconds == 1.5 and near["micro_batches"].found is not None
    assert near["offload"].seconds == 1.1 and near["offload"].found is None
    assert near["recompute"].techniques.recompute == ""  # the other is too much for the host
    made.spent = True  # of a large model as many as may be were simulated
    assert neighbours(made, OVER, best)["micro_batches"].found is None and simulated == [2, 1]


def test_one_micro_batch_keeps_sums_in_shards_only_where_a_user_said_so() -> None:
    shards = {"gradient_accumulation_shard": True}
    chosen = Techniques(micro_batches=2, **shards)
    asked = Techniques(micro_batches=2, given=frozenset(shards), **shards)
    assert with_values(chosen, {"micro_batches": 1}) == Techniques()
    assert with_values(chosen, {"micro_batches": 4}).gradient_accumulation_shard
    assert with_values(asked, {"micro_batches": 1}).gradient_accumulation_shard
    assert with_values(Techniques(), shards) == Techniques()  # no neighbour of its own


@pytest.mark.parametrize(("words", "kept"), [(("optimizer",), True), (("parameters",), False)])
def test_gradients_of_parameters_on_the_host_are_sharded_anyway(words: tuple[str, ...], kept: bool) -> None:
    chosen = Techniques(micro_batches=2, gradient_accumulation_shard=True)
    assert with_values(chosen, {"offload": words}).gradient_accumulation_shard == kept


def test_a_neighbour_that_saves_no_memory_is_left_out() -> None:
    """As slices where no rank repeats anything."""
    made = front_of(
        candidates=[SimpleNamespace(space=None, states=(), examples=4)],
        overfills_host=lambda candidate, asked: False,
        likely_seconds=lambda candidate, asked: 1.2,
        plainer_seconds=lambda candidate, asked: 0.0,
    )
    made.saves = lambda candidate, asked: asked.offload == HERE["offload"]
    best = found(1.0, HERE)
    best.states = ()
    near = neighbours(made, OVER, best)
    assert {"micro_batches", "recompute"} <= set(near) and "offload" not in near


def test_what_a_plainer_neighbour_already_takes_is_not_simulated_again() -> None:
    """With the same techniques another choice is quicker: what is richer must be quicker than that one."""
    here, candidate = {**HERE, "offload": ()}, SimpleNamespace(space=None, states=(1,), examples=4)
    simulated: list[tuple[str, ...]] = []

    def evaluated(candidate: Any, asked: Techniques, enough: float) -> Any:
        simulated.append(asked.offload)
        return found(0.95, {**here, "offload": asked.offload})

    made = front_of(
        candidates=[candidate],
        overfills_host=lambda candidate, asked: False,
        likely_seconds=lambda candidate, asked: 0.94,
        plainer_seconds=lambda candidate, asked: 0.95 if asked.offload and simulated else 0.0,
        evaluated=evaluated,
    )
    best = found(1.0, here)
    best.states = ()
    near = neighbours(made, OVER[2:], best)
    assert simulated == [()]
    assert near[SHARDINGS].found is not None and near["offload"].found is None


@pytest.mark.parametrize(
    ("words", "others", "beyond"),
    [
        (("optimizer",), (), True),
        (("optimizer", "parameters"), (), True),
        (("optimizer", "parameters"), ("optimizer",), False),
        (("optimizer", "parameters"), ("parameters",), False),
        (("optimizer", "activations", "parameters"), ("optimizer", "parameters"), True),
        (("activations",), ("optimizer",), False),
    ],
)
def test_parameters_and_optimizer_on_the_host_may_be_quicker_than_one_of_them(
    words: tuple[str, ...], others: tuple[str, ...], beyond: bool
) -> None:
    """Kimi-K2 on 128 ranks: 8.67 s a step, and 8.93 with the optimizer alone."""
    assert Point((0,), Techniques(offload=words)).beyond(Point((0,), Techniques(offload=others))) == beyond
