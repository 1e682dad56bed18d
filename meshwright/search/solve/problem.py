"""The problem that exact searches minimise: one state per variable, a price per state and per pair of states.

Independent of graphs, layouts and seconds: a price is a float64 in any unit, and `inf` forbids a state or a pair of
states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from meshwright.errors import MeshwrightError


class NoStates(MeshwrightError):
    """No choice of states has a finite price. `variable` is the index of one that has no state left, or None;
    not `proven` when the search gave up before it had looked at every choice."""

    def __init__(self, variable: int | None, *, proven: bool = True, why: str = "") -> None:
        self.variable, self.proven = variable, proven
        what = "no choice of states is allowed"
        if variable is not None:
            what = f"variable {variable} has no state that its neighbours allow"
        super().__init__(what, why=why)


@contextmanager
def skipping_unproven() -> Iterator[None]:
    """Within, a search ends where it finds no choice and cannot prove that there is none: others go on without it."""
    try:
        yield
    except NoStates as error:
        if error.proven:
            raise


@dataclass(frozen=True, eq=False)
class Problem:
    """min over x of Σ unary[v][x_v] + Σ pairs[u, v][x_u, x_v].

    `unary[v]` is float64[K_v]; `pairs[u, v]`, u < v, is float64[K_u, K_v]. Entries are finite or +inf.
    The arrays are shared, never written to.
    """

    unary: tuple[np.ndarray, ...]
    pairs: Mapping[tuple[int, int], np.ndarray]

    def __post_init__(self) -> None:
        assert all(row.ndim == 1 for row in self.unary)
        for (u, v), matrix in self.pairs.items():
            assert 0 <= u < v < len(self.unary), (u, v)
            assert matrix.shape == (len(self.unary[u]), len(self.unary[v])), (u, v, matrix.shape)

    @property
    def sizes(self) -> tuple[int, ...]:
        """K_v of each variable."""
        return tuple(len(row) for row in self.unary)

    def price(self, states: Sequence[int]) -> float:
        """The price of one state per variable; inf when it is not allowed."""
        assert len(states) == len(self.unary)
        total = sum(float(row[s]) for row, s in zip(self.unary, states, strict=True))
        return total + sum(float(m[states[u], states[v]]) for (u, v), m in self.pairs.items())

    def only(self, kept: Sequence[np.ndarray]) -> Problem:
        """The problem over the states `kept[v]` (indices, ascending) of each variable, in that order."""
        whole = [len(k) == len(row) for k, row in zip(kept, self.unary, strict=True)]
        unary = tuple(row if w else row[k] for row, k, w in zip(self.unary, kept, whole, strict=True))
        pairs = {}
        for (u, v), matrix in self.pairs.items():
            rows = matrix if whole[u] else matrix[kept[u]]
            pairs[u, v] = rows if whole[v] else rows[:, kept[v]]
        return Problem(unary, pairs)


@dataclass(frozen=True, eq=False)
class Memory:
    """Bytes that the states need at each of T instants, at least (an additive under-estimate).

    `amounts[v]` is float64[K_v, T]; `pairs[u, v]`, u < v, is float64[T, K_u, K_v] and may be absent. All finite.
    """

    amounts: tuple[np.ndarray, ...]
    pairs: Mapping[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.amounts and all(a.ndim == 2 and a.shape[1] == self.instants for a in self.amounts)
        for (u, v), block in self.pairs.items():
            shape = (self.instants, len(self.amounts[u]), len(self.amounts[v]))
            assert u < v and block.shape == shape, (u, v, block.shape)

    @property
    def instants(self) -> int:
        """T."""
        return self.amounts[0].shape[1]

    def totals(self, states: Sequence[int]) -> np.ndarray:
        """The bytes float64[T] of one state per variable."""
        total = np.zeros(self.instants)
        for rows, s in zip(self.amounts, states, strict=True):
            total += rows[s]
        for (u, v), block in self.pairs.items():
            total += block[:, states[u], states[v]]
        return total

    def only(self, kept: Sequence[np.ndarray]) -> Memory:
        """The bytes of the states `kept[v]` (indices) of each variable."""
        pairs = {(u, v): block[:, kept[u]][:, :, kept[v]] for (u, v), block in self.pairs.items()}
        return Memory(tuple(a[k] for a, k in zip(self.amounts, kept, strict=True)), pairs)

    def weighed(self, problem: Problem, multipliers: np.ndarray) -> Problem:
        """`problem` with every byte at instant t priced at `multipliers[t]`."""
        unary = tuple(row + a @ multipliers for row, a in zip(problem.unary, self.amounts, strict=True))
        pairs = dict(problem.pairs)
        for key, block in self.pairs.items():
            extra = np.tensordot(multipliers, block, 1)
            pairs[key] = pairs[key] + extra if key in pairs else extra
        return Problem(unary, pairs)

    def alone(self, problem: Problem, instant: int) -> Problem:
        """The bytes of one instant as the price, over the choices that `problem` allows."""
        unary = tuple(
            np.where(np.isfinite(row), a[:, instant], np.inf)
            for row, a in zip(problem.unary, self.amounts, strict=True)
        )
        pairs = {key: np.where(np.isfinite(m), 0.0, np.inf) for key, m in problem.pairs.items()}
        for key, block in self.pairs.items():
            pairs[key] = pairs[key] + block[instant] if key in pairs else block[instant]
        return Problem(unary, pairs)

    def over(self, scale: np.ndarray) -> Memory:
        """The amounts in units of `scale[t]`."""
        pairs = {key: block / scale[:, None, None] for key, block in self.pairs.items()}
        return Memory(tuple(a / scale for a in self.amounts), pairs)
