"""Capture the program of a model's outputs, without a loss and gradients, for inference and evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshwright.capture.capture import Captured, simplify
from meshwright.capture.convert import convert
from meshwright.capture.dtypes import check_dtypes
from meshwright.capture.export_errors import AS_IT_IS, CALLED
from meshwright.capture.fold import fold
from meshwright.capture.nest import Shape, count, filled, shape_of
from meshwright.capture.trace import Loss, trace
from meshwright.errors import CaptureError

WANTED = "outputs=lambda model, batch: model(**batch).logits"
ASKED = f"say what is wanted: {WANTED}"


@dataclass(frozen=True)
class Forward:
    """A captured program and the structure of its results."""

    captured: Captured
    shape: Shape


def capture_forward(model: torch.nn.Module, batch: Any, outputs: Callable[[Any, Any], Any]) -> Forward:
    """Capture the program of `outputs(model, batch)`, in the training mode the model is in.

    It returns a tensor, or nested dicts, lists, tuples and dataclasses of them. Parameters are not touched and may be
    real, fake or meta; the batch is an example of shapes. Raises CaptureError, also for a model that changes its
    buffers (batch norm in training mode does).
    """
    found: list[Shape] = []

    class Results(Loss):
        """The outputs of a model as a flat tuple of tensors."""

        @property
        def labels(self) -> tuple[str, ...]:
            return tuple(f"out{number}" for number in range(count(found[-1])))

        def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            made: list[torch.Tensor] = []
            value = self.value(tensors)
            found.append(shape_of(value, made))
            if not made:
                raise CaptureError(
                    "the outputs have no tensor",
                    why=f"outputs(model, batch) returned {type(value).__name__}",
                    hint=WANTED,
                )
            for result in made:
                if any(result is given for given in tensors):
                    raise CaptureError(
                        "a result is an unchanged tensor of the batch",
                        why="there is nothing to compute",
                        hint="leave it out of what outputs= returns",
                    )
            return tuple(made)

    try:
        traced = trace(model, batch, outputs, Results)
    except CaptureError as error:
        if AS_IT_IS not in error.hint and CALLED not in error.hint:
            raise
        hint = error.hint.replace(AS_IT_IS, ASKED) if AS_IT_IS in error.hint else ASKED
        raise CaptureError(error.what, why=error.why, where=error.where, hint=hint) from None
    graph, constants = convert(traced, model)
    graph = replace(graph, inputs=tuple(replace(i, needs_grad=False) for i in graph.inputs))
    if graph.mutations:
        raise CaptureError(
            f"the model changes its buffer {graph.mutations[0][0]}",
            why="a forward pass must not change the model",
            hint="call model.eval() first",
        )
    graph = check_dtypes(simplify(graph, constants))
    kept = {i.target: constants[i.target] for i in graph.input_of("constant")}
    return Forward(Captured(graph, kept, fold(graph), traced.notes), found[-1])


__all__ = ["Forward", "capture_forward", "filled"]
