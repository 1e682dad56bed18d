"""Questions about the type of what a user gave. A type checker knows the answers, too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number. True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is an int or a float. True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_list(value: object) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Return whether a value is a list or a tuple."""
    return isinstance(value, list | tuple)


def is_set(value: object) -> TypeGuard[set[Any] | frozenset[Any]]:
    """Return whether a value is a set."""
    return isinstance(value, set | frozenset)


def is_iterable(value: object) -> TypeGuard[Iterable[Any]]:
    """Return whether a value can be iterated over."""
    return isinstance(value, Iterable)


def is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    """Return whether a value is a mapping."""
    return isinstance(value, Mapping)


__all__ = ["is_iterable", "is_list", "is_mapping", "is_number", "is_set", "is_whole"]
