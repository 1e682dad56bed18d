"""An independent truth for the solvers: enumeration, and an integer program given to HiGHS.

Nothing here is shared with the code under test, except that a problem is read from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy.optimize import LinearConstraint, milp
from scipy.sparse import coo_matrix

Pairs = Mapping[tuple[int, int], np.ndarray]


def brute_force(
    unary: Sequence[np.ndarray], pairs: Pairs, accept: Callable[[tuple[int, ...]], bool] | None = None
) -> float:
    """The least price over every choice of states that `accept` takes; inf when there is none."""
    best = np.inf
    for states in itertools.product(*(range(len(row)) for row in unary)):
        price = 0.0
        for v, s in enumerate(states):
            price += unary[v][s]
        for (u, v), matrix in pairs.items():
            price += matrix[states[u]][states[v]]
        if price < best and (accept is None or accept(states)):
            best = price
    return float(best)


def integer_program(unary: Sequence[np.ndarray], pairs: Pairs) -> float:
    """The least price as an integer program: x[v, s] binary, y[u, v, s, t] continuous with x as its marginals."""
    cost: list[float] = []
    upper: list[float] = []

    def columns(prices: np.ndarray) -> np.ndarray:
        flat = prices.ravel()
        allowed = np.isfinite(flat)
        start = len(cost)
        cost.extend(np.where(allowed, flat, 0.0))
        upper.extend(allowed.astype(float))
        return np.arange(start, start + flat.size).reshape(prices.shape)

    nodes = [columns(row) for row in unary]
    binary = len(cost)
    rows: list[tuple[list[int], list[float], float]] = [([*map(int, x)], [1.0] * len(x), 1.0) for x in nodes]
    for (u, v), matrix in pairs.items():
        y = columns(matrix)
        for s, x in enumerate(nodes[u]):
            rows.append(([*map(int, y[s]), int(x)], [1.0] * len(y[s]) + [-1.0], 0.0))
        for t, x in enumerate(nodes[v]):
            rows.append(([*map(int, y[:, t]), int(x)], [1.0] * len(y) + [-1.0], 0.0))
    where = [
        (i, c, w) for i, (cols, weights, _) in enumerate(rows) for c, w in zip(cols, weights, strict=True)
    ]
    i, c, w = zip(*where, strict=True)
    matrix = coo_matrix((w, (i, c)), shape=(len(rows), len(cost))).tocsr()
    right = np.array([r for *_, r in rows])
    kinds = np.zeros(len(cost))
    kinds[:binary] = 1
    found = milp(
        np.array(cost),
        integrality=kinds,
        bounds=(np.zeros(len(cost)), np.array(upper)),  # type: ignore[arg-type]
        constraints=LinearConstraint(matrix, right, right),
        options={"mip_rel_gap": 0.0},
    )
    if found.status == 2:
        return float("inf")
    assert found.status == 0, found.message
    chosen = [int(np.argmax(found.x[x])) for x in nodes]  # HiGHS is exact to 1e-6 only: price its choice anew
    price = sum(float(row[s]) for row, s in zip(unary, chosen, strict=True))
    return price + sum(float(m[chosen[a], chosen[b]]) for (a, b), m in pairs.items())
