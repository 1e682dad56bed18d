"""Python values at one time, as a capture compares them: plain ones by content, others by identity."""

from __future__ import annotations

import contextvars
import enum
import types
from collections import deque
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

SCALARS = (bool, int, float, complex, str, bytes, type(None))
FIXED = (torch.dtype, torch.device, torch.layout, enum.Enum, slice, range)
MANY = 1000  # elements of a container, above which its length alone is compared
RETURNED = {"get_last_lr": "_last_lr"}  # a method of a scheduler of learning rates, and what it returns
SMALL_BYTES = 4096  # of an array whose content is compared


@dataclass(frozen=True)
class Item:
    """A value at one time.

    `value` is hashable, `text` is for a reader; `library`: it belongs to an object whose class is not the user's.
    """

    value: Hashable
    text: str
    library: bool = False


@dataclass
class Owner:
    """A dict with values under names. `sized`: it has no others; `lacking`: names that it does not have."""

    mapping: Mapping[str, Any]
    names: dict[str, None] = field(default_factory=dict)
    sized: bool = False
    lacking: tuple[str, ...] = ()


@dataclass
class ReadValues:
    """The values that a capture may read: `items` by label, and the objects that contain them.

    `names` are those in the user's code, `functions` the user's.
    """

    items: dict[str, Item] = field(default_factory=dict)
    owners: dict[int, Owner] = field(default_factory=dict)
    lists: list[list[Any] | deque[Any]] = field(default_factory=list)
    dicts: list[dict[Any, Any]] = field(default_factory=list)
    sets: list[set[Any]] = field(default_factory=list)
    arrays: list[np.ndarray[Any, Any]] = field(default_factory=list)
    cells: list[types.CellType] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)  # of the tensors
    hooks: list[Mapping[int, Any]] = field(default_factory=list)
    functions: list[types.FunctionType] = field(default_factory=list)
    generators: list[Any] = field(default_factory=list)  # of random numbers
    forwards: list[type[torch.nn.Module]] = field(default_factory=list)  # classes whose forward runs
    iterators: dict[str, Iterator[Any]] = field(default_factory=dict)  # by label
    contexts: list[contextvars.ContextVar[Any]] = field(default_factory=list)
    variables: dict[str, str | None] = field(default_factory=dict)  # of the environment
    names: set[str] = field(default_factory=set)
    pieces: set[str] = field(default_factory=set)


def shown(value: Any) -> str:
    """Return a value as short text."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
        return value.__qualname__
    plain = isinstance(value, (*SCALARS, *FIXED, list, tuple, dict, set)) and is_plain(value)
    text = repr(value) if plain else type(value).__name__  # a tensor among others may have no memory to show
    return text if len(text) <= 60 else text[:57] + "…"


def fixed(value: Any) -> Hashable:
    """Return a plain value as a hashable one, in which 1, 1.0 and True differ and nan equals itself."""
    if isinstance(value, tuple | frozenset):
        return (type(value).__name__, *(fixed(v) for v in value))
    return type(value).__name__, repr(value) if isinstance(value, (float, complex, *FIXED)) else value


def is_plain(value: Any, depth: int = 4) -> bool:
    """Return whether a value contains only numbers, texts and types, at most so deep."""
    if isinstance(value, (*SCALARS, *FIXED)):
        return True
    if depth == 0:
        return False
    if isinstance(value, list | tuple | set | frozenset):
        return all(is_plain(v, depth - 1) for v in value)
    if isinstance(value, dict):
        return all(is_plain(v, depth - 1) for v in value.values())
    if isinstance(value, type | types.ModuleType) or callable(value) or not hasattr(value, "__dict__"):
        return False
    return all(is_plain(v, depth - 1) for v in vars(value).values())


def read_of_library(value: Any, known: Collection[str]) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Yield what code with some `known` names reads of a library's object that has more than plain values: how it is
    called there, and the mapping and the key under which it is. An object may say so itself in ``__guarded__``.
    """
    held = vars(value)
    for name, x in held.items():
        if name in known and isinstance(x, SCALARS):
            yield name, held, name
    for method, name in RETURNED.items():
        if method in known and name in held:
            yield f"{method}()", held, name
    for name, inside, key in getattr(type(value), "__guarded__", _nothing)(value):
        if name in known:
            yield name, inside, key


def _nothing(_: Any) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    return iter(())


def differs(was: dict[str, Item], now: dict[str, Item], library: bool = True) -> str:
    """Return the first difference of two sets of values, in words.

    Additions to objects of libraries do not count; without `library` nothing of theirs does.
    """
    for label, old in was.items():
        new = now.get(label)
        if new is not None and new.value == old.value:
            continue
        if old.library and not library:
            continue
        if new is None:
            return f"{label}: {old.text} → not there"
        if isinstance(old.value, tuple) and old.value[:1] == ("tensor",):
            return f"{label}: {_tensor_change(old.value, new.value)}"
        if new.text == old.text:
            return f"{label}: another {old.text}"
        return f"{label}: {old.text} → {new.text}"
    for label, new in now.items():
        if label not in was and not new.library:
            return f"{label}: not there → {new.text}"
    return ""


def _tensor_change(old: Any, new: Any) -> str:
    if old[:2] != new[:2]:
        return "another tensor"
    return "values were changed in place" if old[2] != new[2] else f"requires_grad {old[3]} → {new[3]}"


def is_filled(cell: types.CellType) -> bool:
    """Return whether a closure's cell has a value."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place, as far as it counts that."""
    return -1 if tensor.is_inference() else tensor._version


def address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's values, which ``x.data = y`` changes; 0 if it has none."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a fake tensor, which a capture left behind
        return 0
