"""Contexts of torch around a call of a step. Its program is what was captured; none may change it in silence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from meshwright.errors import RunError


class Ambient:
    """The autocast in which a step was built: its program has the casts already."""

    def __init__(self) -> None:
        self._kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        self.autocast = self._now()

    def _now(self) -> dict[str, torch.dtype]:
        return {k: torch.get_autocast_dtype(k) for k in self._kinds if torch.is_autocast_enabled(k)}

    @contextlib.contextmanager
    def as_built(self) -> Iterator[None]:
        """Run a program as it was captured. Raises RunError under an autocast that it was not captured in.

        A cast more would give a rank's kernels types that the plan does not know, and torch keeps casts of weights for
        as long as the context lasts, also where a step has changed the weights.
        """
        now = self._now()
        if not now:
            yield
            return
        for kind, dtype in now.items():
            if self.autocast.get(kind) != dtype:
                short = str(dtype).removeprefix("torch.")
                raise RunError(
                    f"a step is called under torch.autocast({kind!r}) of {short}, and was built without it",
                    why="the step runs the captured program, which has no such casts",
                    hint=f"with torch.autocast({kind!r}, dtype={dtype}): in the loss, or around what builds the step",
                )
        with contextlib.ExitStack() as stack:
            for kind in now:
                stack.enter_context(torch.autocast(kind, enabled=False))
            yield


def check_gradients() -> None:
    """Raise RunError where torch records nothing for backward: all gradients would be zero."""
    if not torch.is_grad_enabled():
        where = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise RunError(
            f"a training step is called under torch.{where}()",
            why="no gradients are computed there, so there is nothing to update with",
            hint=f"call it outside of torch.{where}(); step.forward_step(model, batch) evaluates without gradients",
        )
