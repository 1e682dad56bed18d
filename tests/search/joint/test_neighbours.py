"""A choice is left for what is quicker, or as quick and plainer: techniques that win nothing are not kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.core.techniques import Techniques
from meshwright.search.joint.dimensions import Dimension
from meshwright.search.joint.neighbours import SHARDINGS, quicker

OVER = (
    Dimension("recompute", ("", "selective", "full")),
    Dimension("micro_batches", (1, 2, 4)),
    Dimension("offload", ((), ("optimizer",), ("activations",), ("optimizer", "activations"))),
)
HERE: dict[str, Any] = {"recompute": "selective", "micro_batches": 2, "offload": ("activations",)}


def found(seconds: float, techniques: dict[str, Any]) -> Any:
    return SimpleNamespace(
        techniques=Techniques(**techniques), claims={"step_seconds": seconds}, evaluation=None, space=None
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
        ("offload", ("optimizer",), 0.9995, True),
        (SHARDINGS, None, 0.9995, True),
        (SHARDINGS, None, 0.99995, False),
        (SHARDINGS, None, 0.99, True),
    ],
)
def test_the_plainer_of_what_is_as_quick_is_taken(name: str, value: Any, seconds: float, taken: bool) -> None:
    request = SimpleNamespace(memory_bytes=None, cluster=SimpleNamespace(host_memory_bytes=0))
    planner = SimpleNamespace(request=request, under=lambda asked: SimpleNamespace(settled=lambda one: one))
    other = found(seconds, {**HERE, **({name: value} if name != SHARDINGS else {})})
    made: Any = SimpleNamespace(planner=planner)
    chosen = quicker(made, OVER, {name: other}, found(1.0, HERE))
    assert chosen is (other if taken else None)
