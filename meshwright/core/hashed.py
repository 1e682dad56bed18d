"""Compute the hash of a frozen value once, and compare it in full once.

A mesh of 16,384 ranks, a layout of nested sub-dims and a price table are keys of most caches here. Without this, a
look-up costs more than it saves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
CACHED = ("_hash", "_equal")  # attributes that a value gets


def hashed_once(cls: type[T]) -> type[T]:
    """Cache the hash of a frozen dataclass, and an equal value that it was compared with.

    Pickling drops both: string hashes differ between processes.
    """
    find: Callable[[T], int] = cls.__hash__
    compare: Callable[[T, object], bool] = cls.__eq__

    def __hash__(self: Any) -> int:
        # An attribute, not an entry of `__dict__`: to make that dict while other threads do is not safe in Python 3.11.
        try:
            return self._hash
        except AttributeError:
            object.__setattr__(self, "_hash", found := find(self))
            return found

    def __eq__(self: Any, other: object) -> bool:
        if self is other:
            return True
        if other.__class__ is not self.__class__:
            return NotImplemented
        mine, its = getattr(self, "_equal", self), getattr(other, "_equal", other)
        if mine is its:
            return True
        if hash(mine) != hash(its) or not compare(self, other):
            return False
        object.__setattr__(other, "_equal", mine)
        return True

    def __getstate__(self: T) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in CACHED}

    cls.__hash__, cls.__eq__ = __hash__, __eq__
    cls.__getstate__ = __getstate__
    return cls
