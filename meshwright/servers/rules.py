"""Updates on a server are those of `torch.optim`: a class by its name, and options that are numbers.

Tables get sparse gradients where that is exact: if the user asked for it (``nn.Embedding(sparse=True)``), or if the
rule leaves a row without a gradient as it is. Otherwise the gradient is dense, as on one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from msgspec import structs

from meshwright.errors import ServerError, did_you_mean
from meshwright.servers.shards import Option, Options, Parameter

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    name: getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "SparseAdam")
}
LAZY = ("SGD", "Adagrad", "SparseAdam")  # take sparse gradients
ONLY_SPARSE = "SparseAdam"


def optimizer_of(parameter: Parameter, tensor: torch.nn.Parameter) -> torch.optim.Optimizer:
    """The optimizer of one tensor on a server. Raises ServerError for one that no server has."""
    known = OPTIMIZERS.get(parameter.optimizer)
    if known is None:
        raise ServerError(
            f"no server updates by {parameter.optimizer!r}",
            why=f"{parameter.name} asks for it; optimizers are found by name, code is not sent",
            hint=did_you_mean(parameter.optimizer, OPTIMIZERS),
        )
    try:
        made = known([tensor], **parameter.options)
    except (TypeError, ValueError) as error:
        raise ServerError(
            f"{parameter.name}: torch.optim.{parameter.optimizer} refuses its options", why=str(error)
        ) from None
    check_sparse(parameter)
    return made


def check_change(parameter: Parameter, before: Options, after: Options) -> None:
    """Raise ServerError where an optimizer cannot go on with other options than those that it began with."""
    changed = {name for name, value in after.items() if value != before.get(name)}
    later = structs.replace(parameter, options={**before, **after})
    if not changed:
        return
    for option in sorted(changed):
        value = after[option]
        if not all(map(math.isfinite, value if isinstance(value, tuple) else (value or 0,))):
            raise ServerError(f"{parameter.name}: {option} of torch.optim.{parameter.optimizer} is {value}")
    optimizer_of(later, _small(parameter))
    if changed == {"lr"}:
        return
    tensor = _small(parameter)
    made = optimizer_of(structs.replace(parameter, options=before), tensor)
    try:
        for options in (before, after):
            made.param_groups[0].update(options)
            gradient = torch.ones_like(tensor)
            tensor.grad = gradient.to_sparse(1) if row_wise(parameter, later.options) else gradient
            made.step()
    except (KeyError, RuntimeError, ValueError) as error:
        raise ServerError(
            f"{parameter.name}: torch.optim.{parameter.optimizer} cannot change {', '.join(sorted(changed))}",
            why=f"{type(error).__name__}: {error}",
            hint="the option from the beginning, even if it is small",
        ) from None


def _small(parameter: Parameter) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(1, 1, dtype=getattr(torch, parameter.dtype)))


def check_sparse(parameter: Parameter) -> None:
    """Raise ServerError if sparse gradients were asked for and the optimizer does not take them."""
    name = parameter.optimizer
    if parameter.sparse and (name not in LAZY or not _keeps_rest(parameter, parameter.options)):
        raise ServerError(
            f"torch.optim.{name} does not update {parameter.name} by sparse gradients",
            why="sparse=True says that rows without a gradient stay as they are; its momentum or decay moves them",
            hint="torch.optim.SparseAdam, Adagrad, or SGD without momentum and weight decay",
        )
    if name == ONLY_SPARSE and not parameter.sparse:
        raise ServerError(
            f"torch.optim.SparseAdam updates {parameter.name}, which has dense gradients",
            hint="nn.Embedding(…, sparse=True), or torch.optim.Adam",
        )


def row_wise(parameter: Parameter, options: Mapping[str, Option]) -> bool:
    """Whether updates touch only rows with a gradient; with others, the result is the same as of a dense gradient."""
    if not parameter.table:
        return False
    return parameter.sparse or (parameter.optimizer in LAZY and _keeps_rest(parameter, options))


def _keeps_rest(parameter: Parameter, options: Mapping[str, Option]) -> bool:
    """Whether a gradient of zero changes nothing."""
    if options.get("weight_decay"):
        return False
    match parameter.optimizer:
        case "SGD":
            return not options.get("momentum")
        case "Adagrad":
            return bool(options.get("eps", 1e-10))
    return parameter.optimizer == ONLY_SPARSE


__all__ = ["OPTIMIZERS", "check_change", "check_sparse", "optimizer_of", "row_wise"]
