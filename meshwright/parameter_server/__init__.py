"""`mw.parameter_server`: a step of an eager model of which some or all parameters live on parameter servers.

`server_step.py` is the step, `server_weights.py` are its parameters as a worker sees them, `server_optimizers.py` what
the servers store. `spent_gradients.py` guards gradients that a step has used. The servers themselves are in `servers/`.
"""

from __future__ import annotations

import torch

from meshwright.checks.model_checks import check_factory, check_function, check_model, check_unwrapped
from meshwright.core.type_guards import is_whole
from meshwright.errors import ServerError
from meshwright.loss.example_count import Weight, examples
from meshwright.loss.loss_value import Loss, default_loss
from meshwright.parameter_server.server_step import ServerStep
from meshwright.servers.marks import Factory


def parameter_server(
    model: torch.nn.Module,
    optimizer: Factory,
    *,
    loss: Loss = default_loss,
    staleness: int | None = 0,
    weight: Weight = examples,
    clip_norm: float | None = None,
) -> ServerStep:
    """Build a step with parameters on servers, for a model that runs eagerly. Every worker calls it.

    Parameters that `mw.on_server` marks live on servers, or all if none is marked; the others are all-reduced among the
    workers. A marked embedding keeps no table in the worker: a lookup pulls the rows of its ids.

    Args:
        model: Any module. The values of worker 0 count.
        optimizer: A function that takes the parameters and returns an optimizer of `torch.optim`; servers run it.
        loss: ``loss(model, batch)`` returns a scalar, or a scalar and outputs. By default ``model(**batch).loss``.
        staleness: How many steps a worker may be ahead of the slowest one when it reads: 0 keeps all in step and makes
            one update of their gradients; otherwise each push is an update of its own. None: any number.
        weight: The number of examples in a batch; by default the size of the first dim of its first tensor.

        clip_norm: Clip gradients to this 2-norm of all of them together (`ServerStep.grad_norm`): those of an update,
            which are one worker's own where it may be ahead of others.

    Raises ServerError for what servers cannot hold: an optimizer of the user's own, a table that forward changes.
    """
    check_arguments(model, optimizer, loss, staleness, weight)
    return ServerStep(model, optimizer, loss, staleness, weight, clip_norm=clip_norm)


def check_arguments(
    model: torch.nn.Module, optimizer: object, loss: object, staleness: object, weight: object
) -> None:
    """Raise CaptureError for what is no module or one that torch has wrapped, RunError for what makes no optimizer,
    ServerError for a staleness that is no number of steps, or a weight that cannot be called."""
    check_model(model)
    check_unwrapped(model, ("OptimizedModule",))
    check_factory(optimizer)
    check_function("loss", loss, "lambda model, batch: model(batch).mean()")
    if not callable(weight):
        raise ServerError(
            f"weight={weight!r} is not a function",
            why="the examples of each batch are counted",
            hint="weight=lambda batch: len(batch[0])",
        )
    if staleness is not None and not (is_whole(staleness) and staleness >= 0):
        raise ServerError(
            f"staleness={staleness!r}",
            why="it counts steps: 0, 1, …, or None for no bound",
            hint="staleness=0",
        )
