"""The batch as a pytree: its tensors with their paths, and the tree rebuilt around other tensors.

Dicts and other mappings, lists, tuples, named tuples and dataclasses nest freely; anything else that is not a tensor is
a literal. (torch's own pytree is not public, and needs registration for mappings of other libraries.)
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from meshwright.errors import BatchError, a_type


def leaves(tree: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor with its path (``input_ids``, ``0.image``), in the tree's order.

    Raises BatchError for a tree that contains itself.
    """
    with _ending(tree):
        yield from _leaves(tree, "")


@contextlib.contextmanager
def _ending(tree: Any) -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise BatchError(
            f"the batch is {a_type(tree)} that is nested without end",
            why="one of its lists or mappings contains itself, or hundreds are nested",
            hint="a tensor, or dicts, lists and tuples of tensors",
        ) from None


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield path, tree
        return
    for key, child in _children(tree):
        yield from _leaves(child, f"{path}.{key}" if path else str(key))


def literals(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield everything that is not a tensor with its path, in the tree's order."""
    with _ending(tree):
        yield from _literals(tree, "")


def _literals(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, torch.Tensor):
        return
    if not isinstance(tree, dict | list | tuple | Mapping) and not _is_record(tree):
        yield path, tree
        return
    for key, child in _children(tree):
        if not isinstance(child, torch.Tensor):
            yield from _literals(child, f"{path}.{key}" if path else str(key))


def _is_record(tree: Any) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)


def _children(tree: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(tree, Mapping):
        return tree.items()
    if isinstance(tree, list | tuple):
        return enumerate(tree)
    if _is_record(tree):
        return [(f.name, getattr(tree, f.name)) for f in dataclasses.fields(tree)]
    return ()


def map_leaves(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return the tree with each tensor replaced, in the order of `leaves`."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: map_leaves(child, change) for key, child in tree.items()}
    if isinstance(tree, Mapping):
        fresh: Any = copy.copy(tree)
        for key, child in tree.items():
            fresh[key] = map_leaves(child, change)
        return fresh
    if isinstance(tree, list | tuple):
        items = [map_leaves(child, change) for child in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if _is_record(tree):
        return dataclasses.replace(tree, **{key: map_leaves(child, change) for key, child in _children(tree)})
    return tree


def rebuild(tree: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """Return the tree around other tensors, in the order of `leaves`."""
    fresh = iter(tensors)
    return map_leaves(tree, lambda _: next(fresh))


def facts_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return all that Python code may read of a tensor, except its values and memory: a capture freezes these facts."""
    contiguous = tensor.layout is not torch.strided or tensor.is_contiguous()
    return tensor.shape, tensor.dtype, tensor.requires_grad, contiguous, tensor.layout


def without_aliases(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors, cloned where two of them share memory.

    ``labels = input_ids`` is common, and torch.export silently wires both names to one placeholder.
    """
    seen: set[int] = set()
    fresh = []
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise BatchError(
                f"a tensor of the batch is {str(tensor.layout).removeprefix('torch.')}, {list(tensor.shape)}",
                why="its elements are not stored side by side, so no rank could take its part of them",
                hint="x.to_dense(), or the indices and values as tensors of their own",
            )
        address = tensor.untyped_storage().data_ptr() if tensor.device.type != "meta" else 0
        marks = {id(tensor), address} if address else {id(tensor)}
        fresh.append(tensor.clone() if marks & seen or not address else tensor)
        seen |= marks
    return fresh
