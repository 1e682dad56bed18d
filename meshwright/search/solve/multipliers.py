"""The small linear program behind the multipliers: which mix of known choices fits on average, and at what price.

With choices i of price p_i and amounts g_i at each instant: min Σ μ_i p_i over mixes (μ >= 0, Σ μ = 1) with
Σ μ_i g_i <= limit. The dual values of the limits are the multipliers; the optimum is an upper bound of what any
multipliers can reach, and it comes down as choices are added (column generation; Kelley 1960; seen from the mixes,
Dantzig and Wolfe 1960).
"""

from __future__ import annotations

import numpy as np

from meshwright.search.budget import SOLVE

EPSILON = 1e-11


def multipliers(
    prices: np.ndarray, amounts: np.ndarray, limits: np.ndarray, far: float
) -> tuple[np.ndarray, float, dict[int, float]]:
    """The multipliers float64[T] >= 0 for choices with prices float64[N] and amounts float64[N, T], and the optimum.

    A made-up choice of price `far` (above all others) that fits with room keeps the program feasible; it has
    index N in the mix, which is given by its weights above zero.
    """
    count, instants = amounts.shape
    excess = np.vstack([amounts - limits, np.full((1, instants), -1.0)])
    columns = np.zeros((instants + 1, count + 1 + instants))
    columns[:instants, : count + 1] = excess.T
    columns[:instants, count + 1 :] = np.eye(instants)  # what stays unused
    columns[instants, : count + 1] = 1.0
    cost = np.concatenate([prices, [far], np.zeros(instants)])
    right = np.zeros(instants + 1)
    right[-1] = 1.0
    basis = [count + 1 + t for t in range(instants)] + [count]
    dual = np.zeros(instants + 1)
    for pivot in range(SOLVE.pivots):
        inverse = np.linalg.inv(columns[:, basis])
        dual = cost[basis] @ inverse
        reduced = cost - dual @ columns
        reduced[basis] = 0.0
        worth = np.flatnonzero(reduced < -EPSILON * max(1.0, abs(far)))
        if not len(worth):
            break
        # The steepest column first; the first one (Bland) once that may be going in circles.
        enter = int(worth[0] if pivot > SOLVE.pivots // 2 else worth[np.argmin(reduced[worth])])
        level = inverse @ right
        step = inverse @ columns[:, enter]
        rows = np.flatnonzero(step > EPSILON)
        if not len(rows):
            break
        ratios = np.maximum(level[rows], 0.0) / step[rows]
        ties = rows[ratios <= ratios.min() + EPSILON]
        basis[min(ties, key=lambda r: basis[r])] = enter
    mix = {}
    for column, weight in zip(basis, np.linalg.solve(columns[:, basis], right), strict=True):
        if column <= count and weight > 1e-9:
            mix[column] = float(weight)
    return np.maximum(-dual[:instants], 0.0), float(dual[-1]), mix
