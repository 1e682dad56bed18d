"""Nested results of dicts, lists, tuples and dataclasses: their structure as JSON, and the results rebuilt around
tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

Shape = Any  # a nest of dicts and lists, JSON: numbers of tensors as {"tensor": 3}, tuples as {"tuple": […]}


def filled(shape: Shape, tensors: Iterable[Any]) -> Any:
    """Return nested results around tensors, in order."""
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


def shape_of(value: Any, made: list[torch.Tensor]) -> Shape:
    """Return the structure of a value, whose tensors are appended to `made`.

    Words and numbers are kept. Any other object without tensors (a cache) is left out of a dict, and is None in a list,
    so that all else keeps its place.
    """
    if isinstance(value, torch.Tensor):
        made.append(value)
        return {"tensor": len(made) - 1}
    if value is None or isinstance(value, str | int | float):
        return {"plain": value}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [shape_of(v, made) if _holds(v) else {"plain": None} for v in value]}
    return {"dict": [[str(key), shape_of(v, made)] for key, v in _items(value) if _holds(v)]}


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))


def _holds(value: Any) -> bool:
    """Return whether a value has a tensor, a word or a number."""
    if isinstance(value, torch.Tensor | str | int | float):
        return True
    if isinstance(value, tuple | list):
        return any(map(_holds, value))
    return any(_holds(v) for _, v in _items(value))


def count(shape: Shape) -> int:
    """Return the number of tensors of nested results."""
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


__all__ = ["Shape", "count", "filled", "shape_of"]
