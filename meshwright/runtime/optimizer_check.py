"""Checks whether an optimizer may update shards of parameters, by trying it on a small one, full and split.

An elementwise optimizer (SGD, Adam and its kin, Adagrad, RMSprop) updates a shard as it updates the full tensor. One
that looks at full tensors (Muon's orthogonal steps, Adafactor's row and column sums, LARS' and LAMB's norms), or at all
parameters together (a bound on the norm of gradients in a hook, D-Adaptation), would silently compute something else on
a shard. It is refused if any update is sharded, and works if all parameters are replicated. Ranks of a pipeline update
only the parameters of their stages: there an optimizer that looks at all parameters is refused.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from meshwright.errors import RunError
from meshwright.runtime.trained import OptimizerFactory, Trained

ROWS, COLUMNS, STEPS = 8, 6, 2
Tried = tuple[torch.optim.Optimizer, list[torch.nn.Parameter]]  # an optimizer and what it was made from
Make = Callable[[Mapping[str, torch.Tensor]], Tried | None]


def check_optimizer(factory: OptimizerFactory, sharded: str, apart: str = "") -> None:
    """Raise RunError for an optimizer that cannot update shards, or needs to call the model itself. `sharded`: the name
    of a parameter of which a rank updates a shard; `apart`: of one that not every rank updates; empty if there is none.
    """
    name = sharded or apart or "weight"
    made = _made(factory, {name: torch.zeros(ROWS, COLUMNS)})
    # else it wants the model's own parameters: what it makes of them is seen when it is built
    if made is not None:
        _check_kind(made[0], lambda values: _made(factory, values), sharded, apart, name)


def check_made(made: torch.optim.Optimizer, sharded: str, apart: str = "") -> None:
    """The same of an optimizer that is there, by another one of its kind and with its options."""

    def another(values: Mapping[str, torch.Tensor]) -> Tried | None:
        options = {k: v for k, v in made.defaults.items() if k in inspect.signature(type(made)).parameters}
        return _made(lambda parameters: type(made)(parameters, **options), values)

    name = sharded or apart
    if another({name: torch.zeros(ROWS, COLUMNS)}) is not None:
        _check_kind(made, another, sharded, apart, name)


def watch_hooks(made: torch.optim.Optimizer, sharded: str, apart: str = "") -> None:
    """Check each hook that is later registered with an optimizer: its ``register_step_pre_hook`` and
    ``register_step_post_hook`` then try the hook on a small parameter. They raise RunError for a hook that looks at
    full tensors if a rank updates a shard of `sharded`, or at all parameters together if a rank updates those of its
    stages alone."""
    if not (sharded or apart):
        return
    for register in ("register_step_pre_hook", "register_step_post_hook"):
        setattr(made, register, functools.partial(_register, made, register, sharded, apart))


def _register(
    made: torch.optim.Optimizer, register: str, sharded: str, apart: str, hook: Callable[..., Any]
) -> Any:
    name = sharded or apart

    def make(values: Mapping[str, torch.Tensor]) -> Tried | None:
        tried = _made(lambda parameters: torch.optim.SGD(parameters, lr=0.1), values)
        if tried is not None:
            getattr(tried[0], register)(hook)
        return tried

    kind = getattr(hook, "__qualname__", type(hook).__name__)
    problem = _cannot_be_tried(make, name)
    odd = problem or (sharded and not _elementwise(make, name)) or (apart and not _each_alone(make, name))
    if odd:
        raise RunError(
            f"the optimizer hook {kind} looks at full tensors, or at all parameters together",
            why=f"tried on a small parameter it raises {problem}"
            if problem
            else f"a rank updates only a shard of {sharded}"
            if sharded
            else "a rank updates only the parameters of its stages",
            hint="clip_norm= for a bound on the norm of gradients, step.grad_norm to read it; a hook that treats every "
            'element by itself; or a plan that replicates parameters: mode="data_parallel" without optimizer_parallel',
        )
    return getattr(type(made), register)(made, hook)


def _check_kind(made: torch.optim.Optimizer, make: Make, sharded: str, apart: str, name: str) -> None:
    kind = type(made).__name__
    closure = inspect.signature(type(made).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise RunError(
            f"{kind} calls the model again within a step",
            why="its step needs a closure; forward and backward of many ranks are one program, run once a step",
            hint="torch.optim.AdamW or another optimizer whose step needs no closure",
        )
    if isinstance(made, torch.optim.SparseAdam):
        raise RunError(
            f"{kind} takes only sparse gradients",
            why="gradients are dense tensors here, those of tables with sparse=True too: ranks add them up",
            hint="torch.optim.Adagrad, which leaves rows without a gradient as they are, or torch.optim.AdamW",
        )
    problem = _cannot_be_tried(make, name) if sharded or apart else ""
    if problem:
        alone = f"a shard of {sharded}" if sharded else "the parameters of its stages"
        raise RunError(
            f"a step of {kind} on a small parameter fails, so whether it can update shards is not known",
            why=f"a rank updates only {alone}; {problem}",
            hint="an optimizer that steps on any parameter with a gradient (AdamW, SGD, …)",
        )
    if sharded and not _elementwise(make, name):
        raise RunError(
            f"{kind} looks at full tensors, and a rank updates only a shard of {sharded}",
            why="a step on two halves of a matrix differs from the halves of a step",
            hint="an optimizer that treats every element by itself (AdamW, SGD, …), clip_norm= for a bound on the norm "
            'of gradients, or a plan that replicates parameters: mode="data_parallel" without optimizer_parallel',
        )
    if apart and not _each_alone(make, name):
        raise RunError(
            f"{kind} looks at all parameters together, and a rank updates only those of its stages, without {apart}",
            why="a step on two matrices differs from a step on each",
            hint="an optimizer that treats every parameter by itself, clip_norm= for a bound on the norm of gradients, "
            "or no pipeline=",
        )


def _made(factory: Callable[[Trained], Any], values: Mapping[str, torch.Tensor]) -> Tried | None:
    """The optimizer of some values; None where the factory does not take them, or takes others."""
    given = {name: torch.nn.Parameter(v.contiguous().clone()) for name, v in values.items()}
    try:
        made = factory(Trained(given))
    except Exception:  # whatever a user's function does with parameters that are not the model's
        return None
    if not isinstance(made, torch.optim.Optimizer):
        return None
    taken = {id(p) for group in made.param_groups for p in group["params"]}
    return (made, list(given.values())) if taken == {id(p) for p in given.values()} else None


def _example() -> tuple[torch.Tensor, torch.Tensor]:
    """A small value and its gradient."""
    spread = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)
    return torch.sin(spread), torch.cos(3 * spread) * (1 + spread)


def _cannot_be_tried(make: Make, name: str) -> str:
    """Why a small parameter cannot be stepped on; empty if it can."""
    try:
        _stepped(make, {name: _example()})
    except Exception as error:  # whatever a user's optimizer says
        return f"{type(error).__name__}: {error}"
    return ""


def _elementwise(make: Make, name: str) -> bool:
    """True if steps on shards, each with its own optimizer, equal shards of steps; split along rows, then along
    columns."""
    start, gradient = _example()
    (whole,) = _stepped(make, {name: (start, gradient)})
    for dim in (0, 1):
        halves = zip(start.chunk(2, dim), gradient.chunk(2, dim), strict=True)
        parts = [_stepped(make, {name: half})[0] for half in halves]
        if not _close(torch.cat(parts, dim), whole):
            return False
    return True


def _each_alone(make: Make, name: str) -> bool:
    """True if a step on two values equals separate steps on each."""
    start, gradient = _example()
    values = {name: (start, gradient), f"{name}_": (start.flip(0), 3 * gradient.flip(1))}
    if make({n: v for n, (v, _) in values.items()}) is None:
        return True
    together = _stepped(make, values)
    return all(  # under its own name, which may give it options of its own
        make({n: value[0]}) is None or _close(_stepped(make, {n: value})[0], found)
        for (n, value), found in zip(values.items(), together, strict=True)
    )


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def _stepped(make: Make, values: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Step an optimizer on values, given with their gradients; return the new values."""
    tried = make({name: value for name, (value, _) in values.items()})
    assert tried is not None
    made, parameters = tried
    for _ in range(STEPS):
        for parameter, (_, gradient) in zip(parameters, values.values(), strict=True):
            parameter.grad = gradient.clone()
        made.step()
    return [p.detach() for p in parameters]
