"""Whether an optimizer may work on parts of parameters: it is tried on a small one, whole and cut.

An optimizer that treats every element by itself (SGD, Adam and its kin, Adagrad, RMSprop) steps on a part as on the
whole. One that looks at a whole tensor (Muon's orthogonal steps, Adafactor's row and column sums, LARS' and LAMB's
norms) does not: on a part it would compute something else, and nobody would notice. So it is refused where anything is
cut, and works where every parameter is whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshwright.errors import RunError

ROWS, COLUMNS, STEPS = 8, 6, 2
Factory = Callable[[Sequence[torch.nn.Parameter]], Any]


def check_optimizer(factory: Factory, cut: str) -> None:
    """Raise RunError for an optimizer that cannot step on parts, or wants to call the model itself. `cut`: the name of
    a parameter of which a rank updates a part, empty if there is none."""
    made = _made(factory, [torch.zeros(ROWS, COLUMNS)])
    if made is None:
        return  # it wants the model's own parameters: what it makes of them is seen when it is built
    closure = inspect.signature(type(made).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise RunError(
            f"{type(made).__name__} calls the model again within a step",
            why="its step needs a closure; forward and backward of many ranks are one program, run once a step",
            hint="torch.optim.AdamW or another optimizer whose step needs no closure",
        )
    if cut and not _elementwise(factory):
        raise RunError(
            f"{type(made).__name__} looks at whole tensors, and a rank updates a part of {cut} alone",
            why="a step on two halves of a matrix differs from the halves of a step",
            hint="an optimizer that treats every element by itself (AdamW, SGD, …), or a plan that keeps parameters "
            'whole: mode="data_parallel" without optimizer_parallel',
        )


def _made(factory: Factory, values: Sequence[torch.Tensor]) -> torch.optim.Optimizer | None:
    try:
        made = factory([torch.nn.Parameter(v.clone()) for v in values])
    except Exception:  # whatever a user's function does with parameters that are not the model's
        return None
    return made if isinstance(made, torch.optim.Optimizer) else None


def _elementwise(factory: Factory) -> bool:
    """Whether steps on cuts are cuts of steps; along rows, then along columns."""
    spread = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)
    start, gradient = torch.sin(spread), torch.cos(3 * spread) * (1 + spread)
    whole = _stepped(factory, [start], [gradient])[0]
    for dim in (0, 1):
        parts = _stepped(factory, start.chunk(2, dim), gradient.chunk(2, dim))
        if not torch.allclose(torch.cat(parts, dim), whole, rtol=1e-4, atol=1e-6):
            return False
    return True


def _stepped(
    factory: Factory, values: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    made = _made(factory, [v.contiguous() for v in values])
    assert made is not None
    parameters = [p for group in made.param_groups for p in group["params"]]
    for _ in range(STEPS):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        made.step()
    return [p.detach() for p in parameters]
