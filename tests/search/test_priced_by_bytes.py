"""The least price per byte at which something fits is found with few searches, and that nothing fits with fewer."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from meshwright.search import memory_limit
from meshwright.search.stop import Stop


@dataclass(frozen=True)
class Choice:
    """What a search finds at a price per byte: the dearer bytes are, the fewer it takes and the more it costs."""

    per_byte: float
    claims: dict[str, Any] = field(default_factory=dict)


def searched(
    fitting: float, monkeypatch: pytest.MonkeyPatch
) -> tuple[Choice | None, Choice | None, list[float]]:
    """What is found where choices fit from that price on, and the prices of all searches."""
    prices: list[float] = []

    def run(multipliers: np.ndarray | None) -> Any:
        prices.append(0.0 if multipliers is None else float(multipliers[0]))
        return Choice(prices[-1], {"price_seconds": 8.0 + prices[-1]})

    monkeypatch.setattr(memory_limit, "fits", lambda planner, found: found.per_byte >= fitting)
    monkeypatch.setattr(memory_limit, "offer", lambda planner, found: None)
    monkeypatch.setattr(
        memory_limit, "nearer", lambda planner, one, other: max(one, other, key=lambda c: c.per_byte)
    )
    planner: Any = SimpleNamespace(request=SimpleNamespace(stop=Stop(), memory_bytes=1.0), instants=3)
    found, nearest = memory_limit.priced_by_bytes(planner, run)  # the first price is 1
    return found, nearest, prices


@pytest.mark.parametrize("doublings", range(12))
def test_the_least_doubling_is_halved_back(doublings: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fitting = 0.9 * 2**doublings
    found, _, prices = searched(fitting, monkeypatch)
    assert found is not None and fitting <= found.per_byte <= fitting + 2**doublings / 16
    assert found.claims["memory_decided"]
    assert len(prices) <= 12


def test_that_nothing_fits_takes_four_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    found, nearest, prices = searched(np.inf, monkeypatch)
    assert found is None and nearest is not None and nearest.per_byte == 2**11
    assert prices == [0, 1, 2, 2**11]


def test_what_fits_without_a_price_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    found, nearest, prices = searched(0.0, monkeypatch)
    assert (found and found.per_byte, nearest, prices) == (0.0, None, [0.0])
