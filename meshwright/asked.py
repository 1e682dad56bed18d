"""What a step cannot be asked for, refused before anything is captured or a process group is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from meshwright.errors import PlanError, RunError
from meshwright.graph import Graph


def check_beside(plan: object, given: Mapping[str, Any]) -> None:
    """Raise PlanError for what a plan has already and is given beside one."""
    names = [name for name, value in given.items() if value is not None]
    if plan is not None and names:
        raise PlanError(
            f"{names[0]}= is given beside a plan",
            why="a plan has its mesh, mode, pins and limit already, and would win without a word",
            hint=f"give {names[0]}= to mw.plan(...), or leave out plan=",
        )


def check_numbers(clip_norm: Any, seed: Any) -> None:
    """Raise RunError for a norm that cannot be clipped to, and for a seed that is none."""
    number = isinstance(clip_norm, int | float) and not isinstance(clip_norm, bool)
    if clip_norm is not None and not (number and math.isfinite(clip_norm) and clip_norm > 0):
        raise RunError(
            f"clip_norm={clip_norm!r}",
            why="gradients are scaled down to that norm: a number above 0 is expected",
            hint="clip_norm=1.0, or leave it out",
        )
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise RunError(f"seed={seed!r}", why="a whole number is expected", hint="seed=0")


def check_trains(graph: Graph) -> None:
    """Raise PlanError where no gradient of the loss goes to a parameter: nothing would be trained."""
    _, loss = graph.outputs[0]
    if loss not in graph.needs_grad:
        raise PlanError(
            "the loss has no gradient",
            why="it depends on no parameter that is trained, or was cut off from them by detach() or no_grad()",
            hint="return the loss as it is computed; requires_grad of the parameters that are to learn",
        )
