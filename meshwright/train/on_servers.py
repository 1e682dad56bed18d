"""`mw.train_step(…, mode="parameter_server")`: the script of any other mode, with parameters on servers.

The model runs eagerly, there is no plan. Every worker passes the global batch, as in other modes, and trains its share
of the examples.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from inspect import Signature
from typing import Any

import torch

from meshwright.capture.pytree import leaves, literals, map_leaves
from meshwright.errors import BatchError, PlanError
from meshwright.loss.example_count import examples
from meshwright.parameter_server import check_arguments
from meshwright.parameter_server.server_step import ServerStep
from meshwright.runtime.agreement import describe_batch
from meshwright.runtime.rendezvous import launched_world
from meshwright.runtime.trained import options_of

MODE = "parameter_server"
OPTIONS = ("model", "optimizer", "batch", "loss", "staleness", "weight", "clip_norm", "mode")
HINTS = {
    "mesh": "leave it out: workers share the examples of each batch",
    "seed": "torch.manual_seed(…) in the script: the model runs eagerly",
    "init": "mw.on_server(table, normal=(0.0, 0.01), seed=0): servers fill a table on the meta device",
    "broadcast": "leave it out: the values of worker 0 count",
    "device": "model.to(device)",
}


def share(batch: Any, worker: int, workers: int) -> Any:
    """A worker's examples of a global batch: rows of the first dim of all tensors; numbers are kept.

    Raises BatchError where tensors have different numbers of examples, or there are fewer examples than workers.
    """
    sizes = {path: tensor.shape[0] for path, tensor in leaves(batch) if tensor.dim()}
    count = next(iter(sizes.values()), 0)
    odd = next((path for path, size in sizes.items() if size != count), None)
    if odd is not None:
        first = next(iter(sizes))
        raise BatchError(
            f"the first dim of {first or 'the batch'} is {count}, that of {odd} {sizes[odd]}",
            why="each worker trains its examples of the batch, which are rows of all tensors",
            hint="what has no examples belongs to the model, or mw.parameter_server with batches of each worker's own",
        )
    if full := _not_shared(batch, count):
        raise BatchError(
            f"{full} of the batch is no tensor",
            why="each worker would have it in full, beside its own rows of the tensors",
            hint="torch.as_tensor(…) of it",
        )
    if count < workers:
        raise BatchError(
            f"the batch has {count} examples for {workers} workers",
            why="each worker trains at least one",
            hint="DataLoader(…, drop_last=True) drops a smaller last batch; mw.parameter_server(…) takes empty batches",
        )
    rows = slice(count * worker // workers, count * (worker + 1) // workers)
    return map_leaves(batch, lambda tensor: tensor[rows] if tensor.dim() else tensor)


def _not_shared(batch: Any, count: int) -> str:
    """The path of numbers that belong to examples as rows of tensors do: an array, or a list as long; empty if none."""
    of_list: dict[str, int] = {}
    for path, value in literals(batch):
        if getattr(value, "ndim", 0):
            return path or "what is passed"
        if isinstance(value, int | float):
            above, _, key = path.rpartition(".")
            of_list[above] = of_list.get(above, 0) + key.isdecimal()
    return next((path for path, numbers in of_list.items() if numbers == count > 1), "")


def describe(batch: Any, optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """What must be the same on all workers: examples and checksums of a global batch, and the options of optimizers;
    name → value in JSON."""
    tensors = dict(leaves(batch))
    sizes = [len(tensor) for tensor in tensors.values() if tensor.dim()]
    groups = [group for optimizer in optimizers for group in options_of(optimizer.param_groups)]
    options = {
        f"{k} of group {n} of the optimizer": v for n, each in enumerate(groups) for k, v in each.items()
    }
    return json.dumps(
        {"the number of examples": str(sizes[0] if sizes else 0), **describe_batch(tensors), **options}
    )


def step_on_servers(given: Mapping[str, Any], signature: Signature) -> ServerStep:
    """Build the step. `given`: the arguments of `mw.train_step`, which has this signature.

    Raises PlanError for one that does not apply, BatchError for a batch that has no shares, ServerError for what
    servers cannot hold.
    """
    others = {
        **{name: given[name] for name in signature.parameters if name not in OPTIONS},
        **given["techniques"],
    }
    for name, value in others.items():
        default = signature.parameters[name].default if name in signature.parameters else None
        if name != "techniques" and value is not default and value != default:
            raise PlanError(
                f'{name}= is given together with mode="{MODE}"',
                why="servers update parameters by the optimizer, and a model that runs eagerly has no plan",
                hint=HINTS.get(name, f"leave out {name}="),
            )
    model, optimizer, batch, loss, staleness, weight, clip_norm = (given[name] for name in OPTIONS[:-1])
    check_arguments(model, optimizer, loss, staleness, weight)
    share(batch, 0, launched_world())
    return ServerStep(model, optimizer, loss, staleness, weight, share, describe, clip_norm)


def check_other_mode(mode: str | None, staleness: object, weight: object) -> None:
    """Raise PlanError for what other modes do not have."""
    if staleness != 0:
        raise PlanError(
            f"staleness={staleness!r} with mode={mode!r}",
            why="all ranks of a plan are in step",
            hint=f'mode="{MODE}"',
        )
    if weight is not examples:
        raise PlanError(
            f"weight= is given with mode={mode!r}",
            why="a plan has the gradient of the loss of all rows, whatever the loss does with them",
            hint=f'leave out weight=, or mode="{MODE}"',
        )


__all__ = ["MODE", "check_other_mode", "describe", "share", "step_on_servers"]
