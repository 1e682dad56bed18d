"""Compute the hash of a frozen value once.

A mesh of 16,384 ranks, a layout of nested sub-dims and a price table are keys of most caches here. Without this, a
look-up costs more than it saves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def hashed_once(cls: type[T]) -> type[T]:
    """Cache the hash of a frozen dataclass. Pickling drops it, since string hashes differ between processes."""
    find: Callable[[T], int] = cls.__hash__

    def __hash__(self: Any) -> int:
        # An attribute, not an entry of `__dict__`: to make that dict while other threads do is not safe in Python 3.11.
        try:
            return self._hash
        except AttributeError:
            object.__setattr__(self, "_hash", found := find(self))
            return found

    def __getstate__(self: T) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    cls.__hash__ = __hash__
    cls.__getstate__ = __getstate__
    return cls
