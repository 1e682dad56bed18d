"""Problems of the solvers, written piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from meshwright.search.solve import Problem


@dataclass(eq=False)
class Builder:
    """Collects a problem piece by piece; what is added twice to one place adds up."""

    _unary: list[np.ndarray] = field(default_factory=list)
    _pairs: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def add_variable(self, unary: Sequence[float] | np.ndarray) -> int:
        """A new variable with the price float64[K] of each state; returns its index."""
        row = np.array(unary, dtype=np.float64)
        assert row.ndim == 1 and len(row) and not np.isnan(row).any()
        self._unary.append(row)
        return len(self._unary) - 1

    def add_unary(self, variable: int, unary: Sequence[float] | np.ndarray) -> None:
        """Add float64[K] to the price of a variable's states."""
        self._unary[variable] = self._unary[variable] + np.asarray(unary, dtype=np.float64)

    def add_pair(self, u: int, v: int, matrix: Sequence[Sequence[float]] | np.ndarray) -> None:
        """Add float64[K_u, K_v] to the pair, whichever way round; u == v adds the diagonal to the states of u."""
        block = np.array(matrix, dtype=np.float64)
        assert block.shape == (len(self._unary[u]), len(self._unary[v])) and not np.isnan(block).any()
        if u == v:
            self.add_unary(u, block.diagonal())
            return
        if u > v:
            u, v, block = v, u, np.ascontiguousarray(block.T)
        before = self._pairs.get((u, v))
        self._pairs[u, v] = block if before is None else before + block

    def problem(self) -> Problem:
        """Return the problem as added so far; later additions leave it unchanged."""
        return Problem(tuple(self._unary), dict(self._pairs))
