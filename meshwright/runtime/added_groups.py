"""Groups of parameters that a script adds to the optimizer of a step.

A script for one device adds parameters of the model that it has unfrozen. A step has tensors of its own for them, and
only once it trains them: what a script finds before is nothing, or the module's own tensors, which get no gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from meshwright.errors import RunError

UNFREEZE = (
    "requires_grad_(True), and optimizer(parameters) puts them into a group: it is called again for what begins to "
    "train; or step(batch) first, then step.parameters has them"
)


def watch_groups(
    optimizer: torch.optim.Optimizer, trained: Mapping[str, torch.nn.Parameter], stages: bool
) -> None:
    """Check each group that is later added to the optimizer: its ``add_param_group`` then raises RunError for one of
    nothing, or of tensors that are not among the `trained`. With `stages`, a rank has those of its own alone, which
    may be none."""
    vars(optimizer)["add_param_group"] = functools.partial(_add, optimizer, trained, stages)


def _add(
    optimizer: torch.optim.Optimizer,
    trained: Mapping[str, torch.nn.Parameter],
    stages: bool,
    param_group: dict[str, Any],
) -> None:
    given = param_group.get("params", ())
    members = [given] if isinstance(given, torch.Tensor) else list(given)
    tensors = [x[1] if isinstance(x, tuple) else x for x in members]
    known = {id(p) for p in trained.values()}
    odd = next((x for x in tensors if id(x) not in known), None)
    if odd is not None:
        name = vars(odd).get("held_as", "") if isinstance(odd, torch.Tensor) else ""
        raise RunError(
            f"a group is added with {name or 'a tensor'}, which the optimizer of a step cannot update",
            why="a step trains tensors of its own, in step.parameters; the model's own get no gradient"
            if name
            else "it is none of step.parameters, so it would get no gradient",
            hint=f"[p for name, p in step.parameters.items() if …]; for parameters that were frozen: {UNFREEZE}",
        )
    if not tensors and not stages:
        raise RunError(
            "a group without parameters is added to the optimizer of a step",
            why="step.parameters has what the step trains: parameters that were frozen in its last call are not there",
            hint=UNFREEZE,
        )
    type(optimizer).add_param_group(optimizer, {**param_group, "params": members})


__all__ = ["watch_groups"]
