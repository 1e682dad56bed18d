"""A refusal for want of memory, with the largest batch that was planned and fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshwright.capture.pytree import leaves, rebuild
from meshwright.core.graph import Graph
from meshwright.errors import DoesNotFit, MeshwrightError
from meshwright.search.budget import MEMORY


def with_batch_that_fits(
    error: DoesNotFit, graph: Graph, batch: Any, planned: Callable[[Any], object]
) -> DoesNotFit:
    """The error, whose hint begins with the largest of its batches that `planned` finds a plan for, if there is one.

    `graph` was captured with `batch`. Large models are captured once only, which takes seconds; of others the smallest
    batches are tried, as many as take no longer.
    """
    tries = MEMORY.batch_nodes // len(graph.nodes)
    for parts in error.parts[-tries:] if tries else ():
        fewer, rows = cut(graph, batch, parts)
        try:
            planned(fewer)
        except MeshwrightError:  # it does not fit after all, or the model has its batch's size written in it
            continue
        head, colon, changes = error.hint.partition(": ")
        change = f"a batch of 1/{parts} of this one, {rows} row{'s' * (rows != 1)}"
        return DoesNotFit(
            error.what, why=error.why, where=error.where, hint=f"{head}{colon}{change}; or {changes}"
        )
    return error


def cut(graph: Graph, batch: Any, parts: int) -> tuple[Any, int]:
    """The first of so many parts of a batch, and its rows."""
    dims = {i.target: i.batch_dim for i in graph.input_of("batch") if i.batch_dim is not None}
    rows = [i.type.shape[i.batch_dim] for i in graph.input_of("batch") if i.batch_dim is not None]
    tensors = []
    for path, tensor in leaves(batch):
        dim = dims.get(path)
        tensors.append(tensor if dim is None else tensor.narrow(dim, 0, tensor.shape[dim] // parts).clone())
    return rebuild(batch, tensors), min(rows, default=parts) // parts


__all__ = ["cut", "with_batch_that_fits"]
