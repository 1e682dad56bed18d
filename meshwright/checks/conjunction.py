"""Many small conditions on objects as one function: a step looks at hundreds of them, and a call of Python for each
would be felt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Conjunction:
    """Conditions that are written as Python's expressions over objects. An object stands in them by the name that
    `named` gives it."""

    def __init__(self) -> None:
        self._terms: list[str] = []
        self._names: dict[int, str] = {}
        self._objects: dict[str, Any] = {}

    def named(self, value: object) -> str:
        """Name an object in a condition. Only such names, and literals of str and int, go into the text."""
        if type(value) in (str, int):
            return repr(value)
        name = self._names.setdefault(id(value), f"x{len(self._names)}")
        self._objects[name] = value
        return name

    def identical(self, place: str, value: object) -> None:
        """An expression gives this very object."""
        if value is None or isinstance(value, bool):
            self._terms.append(f"{place} is {value}")
            return
        name = f"v{len(self._terms)}"  # no literal: another object may be equal
        self._objects[name] = value
        self._terms.append(f"{place} is {name}")

    def add(self, condition: str) -> None:
        """A condition as an expression."""
        self._terms.append(condition)

    def compiled(self) -> Callable[[], bool]:
        """Return whether all of them hold, in the order in which they were added."""
        return eval(f"lambda: {' and '.join(self._terms) or True}", self._objects)


__all__ = ["Conjunction"]
