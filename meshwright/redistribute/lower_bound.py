"""A lower bound on the price of a redistribution, whatever it overlaps or shares a message with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.redistribute.price_matrix import Table, Value
from meshwright.redistribute.price_table import Floats
from meshwright.redistribute.prices import Prices


class LowerTable(Table):
    """Seconds of bytes alone: reshards that go together share a latency, so it is no one's own; and of the rates of
    collectives that are waited for (those of `table`) and of those beside computing (`hidden`) the faster one.

    The schedule of a pair is the cheapest by these prices, so no schedule has less.
    """

    def __init__(self, table: Table, hidden: Prices) -> None:
        vars(self).update(vars(table))
        other = Table(table.mesh, hidden)
        self._laws = {k: _least(law, other._laws[k]) for k, law in table._laws.items()}
        self._held_laws = {k: _least(law, other._held_laws[k]) for k, law in table._held_laws.items()}

    def _one_by_one(self, value: Value, src: NDArray[np.int8], dst: NDArray[np.int8]) -> Floats:
        """Nothing is known of the parts of these."""
        return np.zeros((len(src), len(dst)))


def _least(one: tuple[Floats, Floats], other: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
    impossible = np.where(np.isfinite(one[0]), 0.0, np.inf)  # a kind without a row
    return impossible, np.minimum(one[1], other[1])


__all__ = ["LowerTable"]
