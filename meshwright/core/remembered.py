"""Cache functions of a graph, a search space or a partition on that object."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import ParamSpec, Protocol, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


class _HasCache(Protocol):
    """An object with a cache of its own."""

    @property
    def known(self) -> dict[Hashable, object]: ...


def cached_on_first(find: Callable[P, T]) -> Callable[P, T]:
    """Cache a function on its first argument: a graph, a space or a partition.

    The other arguments must be hashable. Results live as long as the first, in its `known`. Do not mutate them.
    """
    name = f"{find.__module__}.{find.__qualname__}"

    @functools.wraps(find)
    def found(*args: P.args, **kwargs: P.kwargs) -> T:
        where, *rest = args
        known = cast("dict[Hashable, T]", cast("_HasCache", where).known)
        key = (name, tuple(rest), tuple(sorted(kwargs.items())))
        if key not in known:
            known[key] = find(*args, **kwargs)
        return known[key]

    return found


__all__ = ["cached_on_first"]
