"""Refuse hooks that a captured program does not run: those on gradients. Forward hooks are traced with the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from operator import attrgetter

import torch

from meshwright.capture.reads import of_library_hook
from meshwright.errors import CaptureError, RunError

BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
OF_WEIGHTS = ("_backward_hooks", "_post_accumulate_grad_hooks")
HOOKS, ACCUMULATED = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")
INSTEAD = (
    "clip_norm= for clipping, groups of the optimizer for other learning rates; to look at gradients: "
    "step.gradients(batch), then step.parameters[name].grad"
)


def check_backward_hooks(model: torch.nn.Module) -> None:
    """Raise CaptureError for a module with a backward hook."""
    for name, module in model.named_modules():
        if any(vars(module).get(kind) for kind in BACKWARD):
            raise CaptureError(
                f"{name or 'the model'} has a backward hook",
                why="a captured program has only the forward pass: what the hook does to gradients would be lost",
                hint=INSTEAD + "; or remove the hook before the step is built",
            )


def check_weight_hooks(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise RunError for a weight with a hook on its gradient."""
    for name, parameter in parameters:
        if "held_as" in vars(parameter):  # a step trains it, and it takes no hooks
            continue
        hooks = [h for kind in OF_WEIGHTS for h in (getattr(parameter, kind, None) or {}).values()]
        if not all(map(of_library_hook, hooks)):  # a step that trains the weight already has one of its own
            raise _of_a_weight(name)


class ShardHooks:
    """The hooks on a program's shards of weights. None may be added after a step was built."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> None:
        """`weights`: includes those that are not parameters of the optimizer."""
        self.named = {id(x): (name, x) for name, x in (*weights.items(), *parameters.items())}
        self.tensors = [x for _, x in self.named.values()]
        self._known: list[int] = []

    def check(self) -> None:
        """Raise RunError for a hook on a gradient. It is fast, since every step calls it."""
        if any(map(HOOKS, self.tensors)):
            raise _of_a_weight(next(name for name, x in self.named.values() if HOOKS(x)))
        numbers = list(chain.from_iterable(filter(None, map(ACCUMULATED, self.tensors))))
        if numbers != self._known:  # reductions have hooks of their own, which come and go with programs
            for name, x in self.named.values():
                if not all(map(of_library_hook, (ACCUMULATED(x) or {}).values())):
                    raise _of_a_weight(name)
            self._known = numbers


def _of_a_weight(name: str) -> RunError:
    return RunError(
        f"{name} has a hook on its gradient",
        why="a rank has only a shard or a summand of the gradient, so the hook would see other values under another "
        "plan",
        hint=INSTEAD,
    )


__all__ = ["ShardHooks", "check_backward_hooks", "check_weight_hooks"]
