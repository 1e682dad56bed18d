"""Which cases of a test `make test` runs: enough to show what the test shows. `make test-all` runs them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def first(count: int, cases: Iterable[Any]) -> list[Any]:
    """The cases for `parametrize`, those after the first `count` marked as `full`."""
    found = list(cases)
    return [*found[:count], *(pytest.param(*_values(case), marks=pytest.mark.full) for case in found[count:])]


def quick(wanted: Callable[..., bool]) -> pytest.MarkDecorator:
    """Mark a test of several parameters: the cases of which `wanted`, called by name, is false are `full`."""
    return pytest.mark.quick.with_args(wanted)


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)


__all__ = ["first", "quick"]
