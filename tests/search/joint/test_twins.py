"""Candidates that simulations do not tell apart are simulated once under each of the techniques."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from meshwright.core.techniques import Techniques
from meshwright.search.joint.twins import Twins

SELECTIVE, FULL = Techniques(recompute="selective"), Techniques(recompute="full")


@dataclass(frozen=True)
class Simulated:
    step_seconds: float
    peak_bytes: float

    @property
    def claims(self):
        return {"step_seconds": self.step_seconds, "peak_bytes": self.peak_bytes}


class Bytes:
    def peak_bytes(self, found):
        return found.peak_bytes


@pytest.fixture
def twins(monkeypatch):
    monkeypatch.setattr("meshwright.search.joint.twins.step_of", lambda found: found.step_seconds)
    return Twins(Bytes())


def test_what_was_equal_once_is_known_under_other_techniques(twins):
    twins.add(0, SELECTIVE, Simulated(1.0, 8e9))
    twins.add(1, SELECTIVE, Simulated(1.0004, 8.001e9))
    twins.add(0, FULL, found := Simulated(1.2, 4e9))
    assert twins.found(1, FULL) is found
    assert twins.found(2, FULL) is None


@pytest.mark.parametrize("other", [Simulated(1.01, 8e9), Simulated(1.0, 8.1e9)], ids=["seconds", "bytes"])
def test_what_differed_once_is_simulated(twins, other):
    twins.add(0, SELECTIVE, Simulated(1.0, 8e9))
    twins.add(1, SELECTIVE, other)
    twins.add(0, FULL, Simulated(1.2, 4e9))
    assert twins.found(1, FULL) is None
    twins.add(1, FULL, Simulated(1.2, 4e9))  # equal here, but not there
    twins.add(0, Techniques(), Simulated(0.9, 9e9))
    assert twins.found(1, Techniques()) is None


def test_equal_bytes_alone_make_no_twins(twins):
    for number in range(2):
        twins.add(number, SELECTIVE, Simulated(math.inf, 9e10))
    twins.add(0, FULL, Simulated(1.2, 4e9))
    assert twins.found(1, FULL) is None
