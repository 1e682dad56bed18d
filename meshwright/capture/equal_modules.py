"""Compare modules: whether one forward pass serves for both, each with its own parameters and buffers.

Two modules are equal if they are of one class, with the same attributes, hooks and children, and with parameters and
buffers of the same types. Layers often differ in an attribute such as `layer_idx`, which their forward does not read.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch

from meshwright.capture.reads import codes, names
from meshwright.capture.value_records import FIXED, SCALARS, fixed
from meshwright.capture.values import BASE, HOOKS

Place = tuple[int, str]  # which module, in the order of modules(), and the name of an attribute
DEPTH = 6  # of nested containers and records whose contents are compared
OF_MODULE = BASE - {"training"}
# Code with these names may read attributes that no descriptor sees.
UNSEEN = {"vars", "__dict__", "attrgetter"}


@dataclass(frozen=True)
class Tree:
    """A module with those inside, by name. `types`: the types of all parameters and buffers."""

    modules: tuple[tuple[str, torch.nn.Module], ...]
    types: tuple[Any, ...]


def tree_of(module: torch.nn.Module) -> Tree:
    """Return a module with those inside, to be compared."""
    modules = tuple(module.named_modules(remove_duplicate=False))
    types = tuple(
        (store, name, _type_of(tensor))
        for _, m in modules
        for store in ("_parameters", "_buffers")
        for name, tensor in vars(m)[store].items()
    )
    return Tree(modules, types)


def differences(one: Tree, other: Tree) -> set[Place] | None:
    """Return the attributes in which two modules and their children differ; None if they are not of one kind."""
    if len(one.modules) != len(other.modules) or one.types != other.types:
        return None
    found: set[Place] = set()
    for number, ((name, a), (other_name, b)) in enumerate(zip(one.modules, other.modules, strict=True)):
        if name != other_name or not _of_one_kind(a, b):
            return None
        mine, others = vars(a), vars(b)
        found |= {(number, n) for n in mine if n not in OF_MODULE and not equal(mine[n], others[n])}
    return found


def _of_one_kind(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    a, b = vars(one), vars(other)
    return (
        type(one) is type(other)
        and a.keys() == b.keys()
        and a["_non_persistent_buffers_set"] == b["_non_persistent_buffers_set"]
        and all(same_objects(a[n].values(), b[n].values()) for n in HOOKS if n in a)
    )


def same_objects(one: Any, other: Any) -> bool:
    """Return whether two collections have the same objects in the same order, and dicts under the same keys."""
    if len(one) != len(other) or not all(map(is_, one, other)):
        return False
    return not isinstance(one, dict) or all(map(is_, one.values(), other.values()))


def _type_of(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    stride = tensor.stride() if tensor.layout is torch.strided else ()
    return tensor.shape, stride, tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad


def equal(one: Any, other: Any, depth: int = DEPTH) -> bool:
    """Return whether two values are the same object, or plain values with the same contents."""
    if one is other:
        return True
    if type(one) is not type(other) or depth == 0:
        return False
    inside = functools.partial(equal, depth=depth - 1)
    match one:
        case _ if isinstance(one, (*SCALARS, *FIXED)):
            return fixed(one) == fixed(other)
        case list() | tuple():
            return len(one) == len(other) and all(map(inside, one, other))
        case dict():
            return [*one] == [*other] and all(map(inside, one.values(), other.values()))
        case set() | frozenset():
            return all(isinstance(x, SCALARS) for x in one) and one == other
        case functools.partial():
            return all(inside(getattr(one, n), getattr(other, n)) for n in ("func", "args", "keywords"))
        case torch.Tensor() | torch.nn.Module() | types.FunctionType() | types.MethodType() | type():
            return False
    held = getattr(one, "__dict__", None)
    return held is not None and not callable(one) and inside(held, vars(other))


def watchable(kind: type, name: str) -> bool:
    """Return whether a descriptor on a class sees each read of an attribute of its instances."""
    return not hasattr(kind, name) and not _reads_unseen(kind)


@functools.lru_cache(1024)
def _reads_unseen(kind: type) -> bool:
    functions = (
        function
        for base in kind.__mro__
        if base not in (object, torch.nn.Module)
        for function in vars(base).values()
        if isinstance(function, types.FunctionType) and function.__name__ != "__init__"
    )
    return any(names(code) & UNSEEN for function in functions for code in codes(function.__code__))


__all__ = ["Place", "Tree", "differences", "equal", "same_objects", "tree_of", "watchable"]
