"""The cheapest choice under memory limits: a price per byte at each instant, found by dual ascent.

For multipliers λ >= 0, min over x of price(x) + λ·(bytes(x) - limits) is a lower bound of the price of everything that
fits (Everett 1963; Geoffrion 1974), as long as `bytes` does not over-estimate. Each evaluation is one unlimited solve,
started from the messages of the one before. The bytes only lead the way: a choice counts when the caller's own
simulation accepts it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.search.solve.bounds import Progress, solve
from meshwright.search.solve.master import multipliers
from meshwright.search.solve.problem import Memory, Problem
from meshwright.search.solve.repair import Moves, States, mixes
from meshwright.search.solve.sweeps import Messages

Accept = Callable[[States], "bool | np.ndarray | Sequence[float]"]
"""Whether states fit; or, better, by how many bytes they miss the limit at each instant (none above 0: they fit)."""

ACCEPTS = 300  # calls of `accept` that one search may make: a simulation takes milliseconds
TIGHTENINGS = 8
REPAIRED = 6  # choices that are made to fit, and rounds of mixing
STEP = 0.7  # of the way to where the cutting planes point
NO_LIMIT = 1e6  # stands for inf, in units of all bytes of the largest states
ROUNDING = 1e-12
TIGHTER = 0.02  # of the limits: the first step where `accept` says no without saying by how much


@dataclass(frozen=True, eq=False)
class LimitedSolution:
    """The cheapest accepted states, or None; a lower bound of the price of all that fits; λ per byte and instant.

    Without states, `least` holds the fewest bytes that any choice needs at each instant by itself, `nearest` the states
    whose worst instant comes closest to its limit, and a bound of inf is a proof that nothing fits.
    """

    states: States | None
    price: float
    bound: float
    multipliers: np.ndarray
    least: np.ndarray | None = None
    nearest: States | None = None
    solves: int = 0
    stopped: bool = False


@dataclass(frozen=True)
class _Options:
    progress: Progress | None
    enough: float
    most_solves: int
    limit_work: float


def solve_limited(
    problem: Problem,
    memory: Memory,
    limits: Sequence[float] | np.ndarray,
    accept: Accept = lambda states: True,
    progress: Progress | None = None,
    *,
    enough: float = 1e-3,
    most_solves: int = 40,
    limit_work: float = 4e9,
) -> LimitedSolution:
    """The cheapest accepted states whose bytes are within limits float64[T] (finite or inf).

    Ends when the gap between price and bound is at most `enough` of the price, when the multipliers can do no better,
    or after `most_solves`. Raises NoStates when the problem has no choice at all, limits or not. An interrupt returns
    the best so far.
    """
    limits = np.asarray(limits, dtype=np.float64)
    assert limits.shape == (memory.instants,)
    search = _Search(problem, memory, limits, accept, _Options(progress, enough, most_solves, limit_work))
    stopped = False
    try:
        search.run()
    except KeyboardInterrupt:
        if search.best is None:
            raise
        stopped = True
    return search.answer(stopped)


class _Search:
    """What is known: all choices met with their bytes, the best accepted one, the best bound and its multipliers.

    Bytes are counted in units of the limits, so that all instants weigh alike.
    """

    def __init__(
        self, problem: Problem, memory: Memory, limits: np.ndarray, accept: Accept, options: _Options
    ) -> None:
        most = sum(np.abs(a).max(axis=0) for a in memory.amounts) + 1e-300
        self.unit = np.where(np.isfinite(limits) & (limits > 0), limits, most)
        self.limits = np.where(np.isfinite(limits), limits / self.unit, NO_LIMIT)
        self.tight = self.limits  # what the bytes are held to after `accept` said no
        self.told = False  # by how much
        self.problem, self.memory = problem, memory.over(self.unit)
        self.accept, self.options = accept, options
        self.known: dict[States, tuple[float, np.ndarray]] = {}
        self.verdicts: dict[States, bool] = {}
        self.best: States | None = None
        self.price = math.inf
        self.bound = -math.inf
        self.multipliers = np.zeros(memory.instants)
        self.messages: Messages | None = None
        self.least: np.ndarray | None = None
        self.solves = 0

    def run(self) -> None:
        self.solve(np.zeros(self.memory.instants))
        if not self.over:
            self.climb()
            self.repair()
            self.tighten()
            self.gain()
        if self.best is None:
            self.find_least()

    @property
    def over(self) -> bool:
        return self.best is not None and self.price - self.bound <= self.options.enough * abs(self.price)

    def solve(self, prices: np.ndarray) -> tuple[float, States]:
        """One unlimited solve with a price per byte; returns a lower bound of price + prices·bytes, and the states."""
        weighed = self.memory.weighed(self.problem, prices) if prices.any() else self.problem
        found = solve(weighed, limit_work=self.options.limit_work, start=self.messages)
        self.messages = found.messages or self.messages
        self.solves += 1
        bound = found.bound - float(prices @ self.limits)
        if bound > self.bound:
            self.bound, self.multipliers = bound, prices
        self.meet(found.states)
        if self.options.progress:
            self.options.progress("memory", self.solves, self.options.most_solves, self.price, self.bound)
        if found.stopped:
            raise KeyboardInterrupt
        return found.bound, found.states

    def meet(self, states: States) -> bool:
        """Remember states, and take them if they are cheaper than the best and accepted."""
        if states not in self.known:
            self.known[states] = (self.problem.price(states), self.memory.totals(states))
        price = self.known[states][0]
        if price >= self.price or not self.accepted(states):
            return False
        self.best, self.price = states, price
        return True

    def accepted(self, states: States) -> bool:
        totals = self.known[states][1] if states in self.known else self.memory.totals(states)
        if (totals > self.limits * (1 + ROUNDING)).any():
            return False
        if states not in self.verdicts:
            if len(self.verdicts) >= ACCEPTS:
                return False
            verdict = self.accept(states)
            if not isinstance(verdict, bool | np.bool_):
                self.told = True
                miss = np.asarray(verdict, dtype=np.float64) / self.unit
                self.tight = np.where(miss > 0, np.minimum(self.tight, totals - miss), self.tight)
                verdict = not (miss > 0).any()
            self.verdicts[states] = bool(verdict)
        return self.verdicts[states]

    def climb(self) -> None:
        """Dual ascent against `tight`: cutting planes, each step taken part of the way from the best point so far."""
        goal, stretch = self.tight, 10.0
        low, centre = -math.inf, self.multipliers
        whole_way = False
        while self.solves < self.options.most_solves and not self.over:
            prices = np.array([p for p, _ in self.known.values()])
            amounts = np.array([a for _, a in self.known.values()])
            far = float(prices.max() + stretch * (np.ptp(prices) + 0.01 * np.abs(prices).max() + 1e-300))
            aim, high, short = multipliers(prices, amounts, goal, far)
            slack = 0.1 * self.options.enough * abs(high)
            if high - low <= slack:
                if not short or stretch > 1e5:
                    return
                stretch *= (
                    30  # the mix still leans on the made-up choice: dearer, so that real ones are found
                )
                continue
            point = aim if whole_way else centre + STEP * (aim - centre)
            seen = len(self.known)
            bound, _ = self.solve(point)
            value = bound - float(point @ goal)
            if value > low:
                low, centre = value, point
            elif whole_way and len(self.known) == seen:
                return  # the inner solves are not exact enough to go on
            whole_way = not whole_way and len(self.known) == seen

    def repair(self) -> None:
        """Make what nearly fits fit, mix it with what is cheaper, and change single variables while that gains."""
        ranked = sorted(self.known, key=lambda s: (self.worth(s), s))
        for states in ranked[:REPAIRED]:
            moves = Moves(self.problem, self.memory, states)
            if moves.to_fit(self.tight):
                self.meet(tuple(moves.states))
        for _ in range(REPAIRED):
            before = self.price
            if self.best is None or self.over:
                return
            for cheap in ranked:
                if self.known[cheap][0] < self.price:
                    mixed = mixes(self.problem, self.memory, self.best, cheap, self.tight)
                    any(self.meet(states) for states in mixed)
            moves = Moves(self.problem, self.memory, self.best)
            moves.to_gain(self.tight, self.accepted)
            self.meet(tuple(moves.states))
            if self.price >= before:
                return

    def worth(self, states: States) -> float:
        """Price with the bytes at the best multipliers, plus what the excess over the limits would cost at them."""
        price, totals = self.known[states]
        excess = np.maximum(totals - self.tight, 0.0)
        return price + float(self.multipliers @ totals) + float(self.multipliers @ excess)

    def tighten(self) -> None:
        """While `accept` refuses what fits by the bytes, hold the bytes to less: by the miss, or by trial."""
        refused, fits, step = 0.0, 1.0, TIGHTER
        for _ in range(TIGHTENINGS):
            if self.over or self.solves >= self.options.most_solves or all(self.verdicts.values()):
                return
            if not self.told:
                self.tight = np.where(self.limits < NO_LIMIT, self.limits * (1 - step), self.limits)
            before = self.tight
            self.climb()
            self.repair()
            if self.told:
                if (self.tight == before).all():  # nothing new was refused
                    return
            elif self.best is None:
                refused, step = step, min(2 * step, (step + fits) / 2)
            else:
                fits, step = step, (refused + step) / 2

    def gain(self) -> None:
        """Single changes up to the limits themselves, where the bytes were held to less."""
        if self.best is not None and not self.over:
            moves = Moves(self.problem, self.memory, self.best)
            moves.to_gain(self.limits, self.accepted)
            self.meet(tuple(moves.states))

    def find_least(self) -> None:
        """The fewest bytes at each instant by itself; more than a limit proves that nothing fits."""
        instants = range(self.memory.instants)
        found = [
            solve(self.memory.alone(self.problem, t), limit_work=self.options.limit_work) for t in instants
        ]
        self.least = np.array([f.bound for f in found])
        for f in found:
            self.meet(f.states)
        if (self.least > self.limits * (1 + ROUNDING)).any():
            self.bound = math.inf

    def answer(self, stopped: bool) -> LimitedSolution:
        nearest = None
        if self.best is None:
            nearest = min(self.known, key=lambda s: (float((self.known[s][1] - self.limits).max()), s))
        least = None if self.least is None else self.least * self.unit
        bound, prices = min(self.bound, self.price), self.multipliers / self.unit
        return LimitedSolution(self.best, self.price, bound, prices, least, nearest, self.solves, stopped)
