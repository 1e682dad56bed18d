"""Watch reads and writes of one attribute of all instances of a class, for as long as a capture runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any


class WatchedAttribute:
    """A data descriptor for a value in the instance's own dict, which says when it is read and when it is written."""

    def __init__(
        self, name: str, read: Callable[[Any, str], None], write: Callable[[Any, str], None]
    ) -> None:
        self.name, self.read, self.write = name, read, write

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            raise AttributeError(self.name)
        self.read(instance, self.name)
        try:
            return vars(instance)[self.name]
        except KeyError:
            raise AttributeError(self.name) from None

    def __set__(self, instance: Any, value: Any) -> None:
        self.write(instance, self.name)
        vars(instance)[self.name] = value

    def __delete__(self, instance: Any) -> None:
        try:
            del vars(instance)[self.name]
        except KeyError:
            raise AttributeError(self.name) from None


@contextlib.contextmanager
def watched(
    attributes: Iterable[tuple[type, str]],
    read: Callable[[Any, str], None],
    write: Callable[[Any, str], None] = lambda instance, name: None,
) -> Iterator[None]:
    """Call `read` and `write` with the instance and the name of each attribute that is read or written.

    The classes must not have these attributes themselves.
    """
    made = list(attributes)
    for kind, name in made:
        setattr(kind, name, WatchedAttribute(name, read, write))
    try:
        yield
    finally:
        for kind, name in made:
            delattr(kind, name)
