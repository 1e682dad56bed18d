"""Parameters whose gradients a step has used: between steps, reading `grad` raises an error instead of giving None.

What clips or measures gradients skips those that are None, so it would do nothing and say nothing.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from meshwright.errors import ServerError

NAME = "spent_as"  # an attribute of such a parameter
HINT = "mw.parameter_server(…, clip_norm=1.0) clips, and step.grad_norm has the norm; step(batch) clears gradients"


class Spent:
    """Mixed into the class of a parameter, which stays a parameter and has values."""

    @property
    def grad(self) -> torch.Tensor | None:
        """Raises ServerError."""
        raise ServerError(
            f"{vars(self)[NAME]} has no gradient between steps",
            why="step(batch) has used it for the update; what clips or changes gradients now comes too late",
            hint=HINT,
        )

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        torch.Tensor.grad.__set__(self, value)  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy is an ordinary parameter."""
        return self._ordinary(lambda: copy.deepcopy(self, memo))

    def __repr__(self) -> str:
        """That of an ordinary parameter, without the name of this class."""
        return self._ordinary(lambda: repr(self))

    def _ordinary(self, call: Callable[[], Any]) -> Any:
        unspent([self])
        try:
            return call()
        finally:
            spent([(vars(self)[NAME], self)])


def spent(named: Iterable[tuple[str, Any]]) -> None:
    """Refuse to read the gradients of these parameters, by name."""
    for name, parameter in named:
        vars(parameter)[NAME] = name
        if not isinstance(parameter, Spent):
            parameter.__class__ = _spent(type(parameter))


def unspent(parameters: Iterable[Any]) -> None:
    """Make them what they were before `spent`."""
    for parameter in parameters:
        if isinstance(parameter, Spent):
            parameter.__class__ = type(parameter).__mro__[2]


@functools.cache
def _spent(kind: type) -> type:
    return type(kind)(kind.__name__, (Spent, kind), {"__module__": kind.__module__})


__all__ = ["Spent", "spent", "unspent"]
