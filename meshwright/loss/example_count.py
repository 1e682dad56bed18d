"""How many examples a batch has, for the mean over workers with uneven batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from meshwright.errors import BatchError, a_type

Weight = Callable[[Any], float]
Share = Callable[[Any, int, int], Any]  # a batch, a worker's number, how many there are → its examples
NESTED = 4  # levels of a batch in which a first tensor is looked for without importing the capture


def examples(batch: Any) -> float:
    """The size of the first dim of a batch's first tensor. Raises BatchError without one."""
    first = batch
    for _ in range(NESTED):
        if isinstance(first, Mapping | list | tuple) and first:
            first = next(iter(first.values() if isinstance(first, Mapping) else first))
    if isinstance(first, torch.Tensor) and first.dim():
        return float(first.shape[0])
    from meshwright.capture.pytree import leaves

    for _, tensor in leaves(batch):
        if tensor.dim():
            return float(tensor.shape[0])
    raise BatchError(
        "how many examples are in this batch?",
        why="it has no tensor with a dim",
        hint="mw.parameter_server(…, weight=lambda batch: …)",
    )


def examples_of_each(batch: Any) -> float:
    """The same, where it says how much a worker's gradient counts. Raises BatchError where tensors have different first
    dims, so that the first need not be the examples."""
    sizes = dict(_first_dims(batch, ""))
    first = next(iter(sizes), "")
    odd = next((path for path, size in sizes.items() if size != sizes[first]), None)
    if odd is not None:
        raise BatchError(
            f"how many examples? The first dim of {first} is {sizes[first]}, that of {odd} {sizes[odd]}",
            why="the gradients of workers are averaged by their examples",
            hint="mw.parameter_server(…, weight=lambda batch: …)",
        )
    return examples(batch)


def weight_of(weight: Weight, batch: Any) -> float:
    """What a script's function says of a batch. Raises BatchError for what counts no examples."""
    found: Any = weight(batch)
    try:
        count = float(found)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise BatchError(
            f"weight(batch) returns {a_type(found)}, which is no number",
            why="it says how many examples are in the batch",
            hint='weight=lambda batch: len(batch["ids"])',
        ) from None
    if not (math.isfinite(count) and count >= 0):
        raise BatchError(f"the batch counts as {count:g} examples", hint="weight=lambda batch: …")
    return count


def _first_dims(batch: Any, path: str, depth: int = 0) -> Iterator[tuple[str, int]]:
    if isinstance(batch, torch.Tensor):
        if batch.dim():
            yield path, batch.shape[0]
    elif isinstance(batch, Mapping | list | tuple) and depth < NESTED:
        for key, inner in batch.items() if isinstance(batch, Mapping) else enumerate(batch):
            yield from _first_dims(inner, f"{path}.{key}" if path else str(key), depth + 1)


__all__ = ["Share", "Weight", "examples", "examples_of_each", "weight_of"]
