"""Operators under a second name: the same arguments, the same values, the same graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright.capture.normalize import TABLE
from meshwright.ops.aliases import ALIASES
from meshwright.ops.table import has_rule
from tests.capture.test_normalize import check, ops
from tests.ops.prove import plain, type_of
from tests.ops.samples import SAMPLES


def schema(op: str) -> Any:
    """The schema of an operator by its full name."""
    function: Any = torch.ops
    for part in op.split("."):
        function = getattr(function, part)
    return function._schema


@pytest.mark.parametrize("second", ALIASES)
def test_a_second_name_takes_the_same_arguments(second: str) -> None:
    """By position, type and default; those that are given by name are known by it to the first name too."""
    mine, theirs = schema(second), schema(ALIASES[second])
    at = [a for a in mine.arguments if not a.kwarg_only]
    assert len(mine.arguments) == len(theirs.arguments)
    for a, other in zip(at, theirs.arguments, strict=False):
        assert (str(a.real_type), a.default_value) == (str(other.real_type), other.default_value)
        assert not other.kwarg_only
    named = {a.name: a for a in theirs.arguments}
    for a in mine.arguments[len(at) :]:
        other = named[a.name]
        assert (str(a.real_type), a.default_value) == (str(other.real_type), other.default_value)
    assert [str(r.real_type) for r in mine.returns] == [str(r.real_type) for r in theirs.returns]


@pytest.mark.parametrize("second", [op for op in ALIASES if ALIASES[op] in SAMPLES])
def test_a_second_name_has_the_same_values(second: str) -> None:
    for build in SAMPLES[ALIASES[second]]:
        case = build()
        node = replace(case.node, op=second)
        found = plain(
            node, {u: type_of(t) for u, t in zip(node.uses, case.tensors, strict=True)}, case.tensors
        )
        for mine, theirs in zip(found, case.results, strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())


def test_a_first_name_is_no_second_one_and_has_a_form_or_a_rule() -> None:
    firsts = set(ALIASES.values())
    assert firsts.isdisjoint(ALIASES)
    assert [op for op in firsts if op not in TABLE and not has_rule(op)] == []
    assert [op for op in ALIASES if op in TABLE or has_rule(op)] == []


def test_what_is_captured_is_the_first_name() -> None:
    found = check(lambda w, x, i: torch.concatenate([torch.absolute(w), x.clip(min=0)], -1).multiply(w.sum()))
    assert {"cat", "abs", "clamp", "mul"} <= ops(found)
    assert ops(found).isdisjoint({"concatenate", "absolute", "clip", "multiply"})
