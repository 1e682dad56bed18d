"""Prices of messages that tests of this folder share."""

from __future__ import annotations

from meshwright.redistribute import Prices

RING = Prices.ring(1e-6, 1e9)
GLOO_LIKE = Prices.of({
    "all_reduce": {"*": (1e-4, 1e9)},
    "reduce_scatter": {"*": (4e-4, 2e8)},
    "all_gather": {"*": (1e-4, 1e9)},
    "all_to_all": {"*": (1e-4, 1e9)},
})  # fmt: skip
