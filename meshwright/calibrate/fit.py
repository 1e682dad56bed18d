"""Latencies, rates and curves from times. Pure: numpy and scipy alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from meshwright.calibrate.plan import Point
from meshwright.calibrate.step_rows import ISSUE, LAUNCH, STEP, Prediction
from meshwright.cost.cluster_data import Curve
from meshwright.redistribute.prices import rounds

GROWTHS = ("ring", "tree")
ROUNDS = 4  # of a fit whose shares change with its factors
# An operator of a step starts with cold caches, and with the views before it: 5 to 8 times what it takes in a loop over
# one. So its factor is known less by this much, in logarithms.
STARTED = 2.5
DIP = 0.75  # of a rate's neighbours: no machine is so much slower at one size alone
LEAST_SHARE = 0.1  # of a time that is left when launches are taken off: below, the launch is all there is


@dataclass(frozen=True)
class Link:
    """The price of a collective: ``rounds · latency_seconds + bytes / bytes_per_s``. `errors`: relative error of the
    fit at each point."""

    latency_seconds: float
    bytes_per_s: float
    errors: tuple[float, ...]

    @property
    def error(self) -> float:
        """The mean error."""
        return sum(map(abs, self.errors)) / len(self.errors)


def turns(kind: str, ranks: int, growth: str) -> int:
    """Messages one after another: those of `Prices`, and one for a send."""
    return 1 if kind == "send" else rounds(kind, ranks, growth)


def link(kind: str, points: Sequence[Point], growth: str = "ring") -> Link:
    """Latency and rate of a collective: least squares on logarithms, soft-L1 (a shared machine has outliers), over all
    sizes and groups together."""
    count = np.array([turns(kind, p.ranks, growth) for p in points], float)
    sent = np.array([p.work for p in points])
    seconds = np.log([p.seconds for p in points])

    def model(guess: np.ndarray) -> np.ndarray:
        return np.log(count * np.exp(guess[0]) + sent / np.exp(guess[1]))

    fastest = max(p.work / p.seconds for p in points)
    begin = np.log([min(p.seconds for p in points), fastest])
    # Where noise hides what a byte costs, a rate far above any that was seen says no more than one well above.
    low, high = np.log([1e-9, 1e-3 * fastest]), np.log([1.0, 20 * fastest])
    found = least_squares(lambda guess: model(guess) - seconds, begin, bounds=(low, high), loss="soft_l1").x
    errors = np.exp(model(found) - seconds) - 1
    return Link(float(np.exp(found[0])), float(np.exp(found[1])), tuple(map(float, errors)))


def links(rows: Mapping[str, Sequence[Point]]) -> tuple[str, dict[str, Link]]:
    """How rounds grow with the ranks, and the fit of each kind: the growth that fits all kinds best; a ring where
    groups of one size alone were measured."""
    several = len({p.ranks for points in rows.values() for p in points}) > 1
    best: tuple[float, str, dict[str, Link]] | None = None
    for growth in GROWTHS if several else GROWTHS[:1]:
        found = {kind: link(kind, points, growth) for kind, points in rows.items()}
        miss = sum(math.log1p(e) ** 2 for one in found.values() for e in one.errors)
        if best is None or miss < best[0]:
            best = miss, growth, found
    assert best is not None
    return best[1], best[2]


def curve(points: Iterable[Point], launch_seconds: float, launches: float = 1.0) -> Curve:
    """Work per second over the work of one pass: what launches cost is taken off, since prices add it."""
    found: dict[float, float] = {}
    for point in points:
        busy = max(point.seconds - launches * launch_seconds, LEAST_SHARE * point.seconds)
        found[_short(point.work)] = _short(point.work / busy)
    return without_dips(tuple(sorted(found.items())))


def without_dips(found: Curve) -> Curve:
    """A curve without the points whose rate is far below those of both its neighbours: something else ran then."""
    rates = [rate for _, rate in found]
    inner = range(1, len(found) - 1)
    dips = {n for n in inner if rates[n] < DIP * min(rates[n - 1], rates[n + 1])}
    return tuple(point for n, point in enumerate(found) if n not in dips)


def corrections(
    predicted: Sequence[Mapping[str, float]], measured: Sequence[float], doubt: float = 0.7
) -> dict[str, float]:
    """Fit a factor for each class to full steps, from the predicted seconds of each class and the measured seconds of
    each step.

    Least squares of the relative errors, with factors between 1/4 and 4 drawn towards 1: a rare class keeps its price
    (`doubt`: expected distance of a factor from 1, in logarithms). Launching an operator may take far longer in a step
    than in a loop over one operator (`STARTED`).
    """
    names = sorted({name for row in predicted for name in row})
    if not names or not measured:
        return {}
    table = (
        np.array([[row.get(name, 0.0) for name in names] for row in predicted]) / np.array(measured)[:, None]
    )

    doubts = doubt * np.array([_wide(name) for name in names])
    most = np.array([math.log(most_factor(name)) for name in names])

    def miss(logs: np.ndarray) -> np.ndarray:
        return np.concatenate([table @ np.exp(logs) - 1, 0.1 * logs / doubts])

    found = least_squares(miss, np.zeros(len(names)), bounds=(-most, most)).x
    return {name: _short(float(np.exp(log))) for name, log in zip(names, found, strict=True)}


def _wide(name: str) -> float:
    return STARTED if name in (LAUNCH, ISSUE, STEP) else 1.0


def most_factor(name: str) -> float:
    """The largest factor of a class; the smallest is one over it."""
    return 4 ** _wide(name)


def at_the_end(factors: Mapping[str, float]) -> tuple[str, ...]:
    """The classes whose factor is the largest or the smallest that may be: what they take is beyond it."""
    return tuple(
        n for n, f in sorted(factors.items()) if abs(math.log(f)) >= 0.995 * math.log(most_factor(n))
    )


def corrected(steps: Sequence[Prediction], measured: Sequence[float]) -> dict[str, float]:
    """Fit a factor for each class to full steps in which classes overlap: `corrections` on the exposed shares. These
    change with the factors, so the fit is repeated a few times."""
    factors: dict[str, float] = {}
    for _ in range(ROUNDS):
        rows = [
            {c: share / factors.get(c, 1.0) for c, share in step.shares(factors).items()} for step in steps
        ]
        factors = corrections(rows, measured)
    return factors


def _short(value: float) -> float:
    """Four digits: no clock knows more."""
    return float(f"{value:.4g}")
