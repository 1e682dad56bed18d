"""The program of what a model gives, without a loss and without gradients: what runs for inference and evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshwright.capture.capture import Captured, simplify
from meshwright.capture.convert import convert
from meshwright.capture.dtypes import check_dtypes
from meshwright.capture.fold import fold
from meshwright.capture.trace import AS_IT_IS, Loss, trace
from meshwright.errors import CaptureError

Shape = Any  # a nest of dicts and lists, JSON: numbers of tensors as {"tensor": 3}, tuples as {"tuple": […]}


WANTED = "outputs=lambda model, batch: model(**batch).logits"


@dataclass(frozen=True)
class Forward:
    """A captured program and the nest of its results."""

    captured: Captured
    shape: Shape


def capture_forward(model: torch.nn.Module, batch: Any, outputs: Callable[[Any, Any], Any]) -> Forward:
    """The program of `outputs(model, batch)`, which gives a tensor, or a nest of dicts, lists, tuples and dataclasses
    of them; in the training mode the model is in.

    Parameters are not touched and may be real, fake or meta; the batch is an example of shapes. Raises CaptureError,
    also for a model that changes its buffers (batch norm in training mode does).
    """
    found: list[Shape] = []

    class Results(Loss):
        """What the model gives, as a flat tuple of tensors."""

        @property
        def labels(self) -> tuple[str, ...]:
            return tuple(f"out{number}" for number in range(count(found[-1])))

        def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            made: list[torch.Tensor] = []
            value = self.value(tensors)
            found.append(_shape(value, made))
            if not made:
                raise CaptureError(
                    "the model gives no tensor",
                    why=f"outputs(model, batch) returned {type(value).__name__}",
                    hint=WANTED,
                )
            for result in made:
                if any(result is given for given in tensors):
                    raise CaptureError(
                        "a result is a tensor of the batch as it came",
                        why="there is nothing to compute",
                        hint="leave it out of what outputs= returns",
                    )
            return tuple(made)

    try:
        traced = trace(model, batch, outputs, Results)
    except CaptureError as error:
        if AS_IT_IS not in error.hint:
            raise
        hint = error.hint.replace(AS_IT_IS, f"say what is wanted: {WANTED}")
        raise CaptureError(error.what, why=error.why, where=error.where, hint=hint) from None
    graph, constants = convert(traced, model)
    graph = replace(graph, inputs=tuple(replace(i, needs_grad=False) for i in graph.inputs))
    if graph.mutations:
        raise CaptureError(
            f"the model changes its buffer {graph.mutations[0][0]}",
            why="what runs without training leaves a model as it is",
            hint="model.eval() before it",
        )
    graph = check_dtypes(simplify(graph, constants))
    kept = {i.target: constants[i.target] for i in graph.input_of("constant")}
    return Forward(Captured(graph, kept, fold(graph), traced.notes), found[-1])


def filled(shape: Shape, tensors: Iterable[Any]) -> Any:
    """The nest of results around tensors, in their order."""
    return _filled(shape, list(tensors))


def _filled(shape: Shape, tensors: list[Any]) -> Any:
    match shape:
        case {"tensor": int(number)}:
            return tensors[number]
        case {"tuple": list(items)}:
            return tuple(_filled(item, tensors) for item in items)
        case {"list": list(items)}:
            return [_filled(item, tensors) for item in items]
        case {"dict": list(items)}:
            return {key: _filled(item, tensors) for key, item in items}
        case {"plain": value}:
            return value
    raise AssertionError(shape)


def _shape(value: Any, made: list[torch.Tensor]) -> Shape:
    """The nest of a value, whose tensors are added to `made`. Words and numbers stay what they are. Any other object
    without tensors (a cache) is left out of a dict, and None in a list, so that all else keeps its place."""
    if isinstance(value, torch.Tensor):
        made.append(value)
        return {"tensor": len(made) - 1}
    if value is None or isinstance(value, str | int | float):
        return {"plain": value}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_shape(v, made) if _holds(v) else {"plain": None} for v in value]}
    return {"dict": [[str(key), _shape(v, made)] for key, v in _items(value) if _holds(v)]}


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))


def _holds(value: Any) -> bool:
    """Whether there is something to give: a tensor, a word or a number."""
    if isinstance(value, torch.Tensor | str | int | float):
        return True
    if isinstance(value, tuple | list):
        return any(map(_holds, value))
    return any(_holds(v) for _, v in _items(value))


def count(shape: Shape) -> int:
    """The tensors of a nest of results."""
    match shape:
        case {"tensor": int()}:
            return 1
        case {"tuple": list(items)} | {"list": list(items)}:
            return sum(map(count, items))
        case {"dict": list(items)}:
            return sum(count(item) for _, item in items)
        case {"plain": _}:
            return 0
    raise AssertionError(shape)


__all__ = ["Forward", "capture_forward", "count", "filled"]
