"""What a script does with an optimizer of which servers make the steps: errors for what would silently do nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch

from meshwright.errors import ServerError


class StateHere:
    """In the place of an optimizer's `state`: that of parameters on no server is read and changed as ever; whatever
    else raises ServerError, as servers have the rest."""

    def __init__(self, optimizer: torch.optim.Optimizer, here: Iterable[torch.Tensor]) -> None:
        """`here`: its parameters that are on no server."""
        self._kept, self._kind = optimizer.state, type(optimizer).__name__
        self._here = {id(p): p for p in here}

    def _of(self, parameter: Any) -> dict[Any, Any]:
        if id(parameter) not in self._here:
            raise of_state(self._kind)
        return self._kept

    def __getitem__(self, parameter: Any) -> Any:
        return self._of(parameter)[parameter]

    def __setitem__(self, parameter: Any, state: Any) -> None:
        self._of(parameter)[parameter] = state

    def __delitem__(self, parameter: Any) -> None:
        del self._of(parameter)[parameter]

    def __contains__(self, parameter: Any) -> bool:
        return parameter in self._of(parameter)

    def get(self, parameter: Any, default: Any = None) -> Any:
        return self._of(parameter).get(parameter, default)

    def pop(self, parameter: Any, *default: Any) -> Any:
        return self._of(parameter).pop(parameter, *default)

    def __iter__(self) -> Iterator[Any]:
        raise of_state(self._kind)

    def __len__(self) -> int:
        raise of_state(self._kind)

    def __getattr__(self, _: str) -> NoReturn:
        """Such as `clear` and `items`."""
        raise of_state(self._kind)


def of_state(kind: str) -> ServerError:
    """The error for who reads or replaces what servers keep of an optimizer."""
    return ServerError(
        f"the state of {kind} is read or replaced", why="servers have it", hint="step.save, step.load"
    )


def check_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise ServerError where another function is in the place of `step`. torch wraps its own: schedules
    count calls, and SparseAdam is not compiled."""
    found = vars(optimizer).get("step")
    while found is not None:
        function = getattr(found, "__func__", found)
        if not getattr(function, "__globals__", {}).get("__name__", "").startswith("torch."):
            raise ServerError(
                f"another function is in the place of step() of {type(optimizer).__name__}",
                why="servers make the steps, by torch.optim's own",
                hint="leave it out; clip_norm= clips gradients, and a schedule changes step.optimizer.param_groups",
            )
        found = getattr(function, "__wrapped__", None)


__all__ = ["StateHere", "check_step", "of_state"]
