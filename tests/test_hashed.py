"""Frozen values that are keys of caches: hashed once, compared in full once."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from meshwright.core.hashed import hashed_once


class Counted:
    """A field that counts its comparisons."""

    def __init__(self, value: int) -> None:
        self.value, self.compared = value, 0

    def __eq__(self, other: object) -> bool:
        self.compared += 1
        return isinstance(other, Counted) and self.value == other.value

    def __hash__(self) -> int:
        return self.value % 2  # of many values, the same


@hashed_once
@dataclass(frozen=True)
class Key:
    field: Counted


@hashed_once
@dataclass(frozen=True)
class Other:
    field: Counted


def test_equal_values_are_compared_in_full_once():
    one, two, three = Key(Counted(1)), Key(Counted(1)), Key(Counted(1))
    assert one == two and two == three and one == three
    seen = [key.field.compared for key in (one, two, three)]
    assert one == two and two == three and three == one
    assert {one: 1}[three] == 1
    assert [key.field.compared for key in (one, two, three)] == seen


def test_values_of_one_hash_are_told_apart():
    one, two, three = Key(Counted(1)), Key(Counted(3)), Key(Counted(1))
    assert hash(one) == hash(two) and one != two
    assert one == three and three != two and two != one
    assert len({one, two, three}) == 2


def test_values_of_two_classes_are_not_equal():
    assert Key(Counted(1)) != Other(Counted(1))


def test_a_copy_has_neither_hash_nor_equal():
    one, two = Mark("a"), Mark("a")
    assert one == two and hash(one) == hash(two)
    for copied in map(copy.copy, (one, two)):  # as a pickle would make it
        assert vars(copied) == {"name": "a"} and copied == one


@hashed_once
@dataclass(frozen=True)
class Mark:
    name: str
