"""What is read off a graph, a space or a partition over and over, and found once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import ParamSpec, Protocol, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


class _Knowing(Protocol):
    """What keeps what is found out about it."""

    @property
    def known(self) -> dict[Hashable, object]: ...


def remembered(find: Callable[P, T]) -> Callable[P, T]:
    """A function of a graph, a space or a partition, its first argument, and of what can be hashed: its results live as
    long as that does (in its `known`). Nobody may change them."""
    name = f"{find.__module__}.{find.__qualname__}"

    @functools.wraps(find)
    def found(*args: P.args, **kwargs: P.kwargs) -> T:
        where, *rest = args
        known = cast("dict[Hashable, T]", cast("_Knowing", where).known)
        key = (name, tuple(rest), tuple(sorted(kwargs.items())))
        if key not in known:
            known[key] = find(*args, **kwargs)
        return known[key]

    return found


__all__ = ["remembered"]
