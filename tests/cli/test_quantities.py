"""Quantities for readers: short, with a unit, and no false digits."""

from __future__ import annotations

import math

import pytest

from meshwright.report.units import show_change, show_seconds, show_share


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ns"), (8.4e-7, "840 ns"), (3.82e-6, "3.82 µs"), (0.0382, "38.2 ms"), (0.99951, "1 s"),
        (2.4, "2.4 s"), (99.6, "1 min 40 s"), (200, "3 min 20 s"), (18_480, "5 h 8 min"),
        (356_323, "4.1 days"), (1e8, "1,157 days"), (math.inf, "no end"),
    ],
)  # fmt: skip
def test_seconds(seconds, text):
    assert show_seconds(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0 %"), (0.0034, "0.34 %"), (0.0584, "5.8 %"), (0.996, "100 %"), (2.9, "290 %")]
)
def test_shares(share, text):
    assert show_share(share) == text


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (1, 1, "same"), (1, 1.0001, "same"), (100, 112, "+12 %"), (100, 96.6, "−3.4 %"), (2, 5, "2.5 ×"),
        (1, 1.9991, "2 ×"), (4, 1, "0.25 ×"), (0, 3, "new"), (3, 0, "gone"),
    ],
)  # fmt: skip
def test_changes(before, after, text):
    assert show_change(before, after) == text
