"""The cheapest choice under memory limits: a price per byte at each instant, found by dual ascent.

For multipliers λ >= 0, min over x of price(x) + λ·(bytes(x) - limits) is a lower bound of the price of everything that
fits (Everett 1963; Geoffrion 1974), as long as `bytes` does not over-estimate. Each evaluation is one unlimited solve,
started from the messages of the one before. The bytes only lead the way: a choice counts when the caller's own
simulation accepts it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from meshwright.search.budget import SOLVE
from meshwright.search.solve.bounds import TOLERANCE, Progress, solve
from meshwright.search.solve.branch_and_bound import Part, split_of
from meshwright.search.solve.multipliers import multipliers
from meshwright.search.solve.problem import Memory, NoStates, Problem
from meshwright.search.solve.repair import Moves, States, mixes
from meshwright.search.solve.trws import consistent
from meshwright.search.stop import never

Accept = Callable[[States], "bool | np.ndarray | Sequence[float]"]
"""Returns whether states fit or, better, the bytes above the limit at each instant (none above 0: they fit)."""

NO_LIMIT = 1e6  # stands for inf, in units of all bytes of the largest states
ROUNDING = 1e-12


@dataclass(frozen=True, eq=False)
class LimitedSolution:
    """The cheapest accepted states, or None; a lower bound of the price of all that fits; λ per byte and instant.

    Without states, `least` holds the fewest bytes that any choice needs at each instant by itself, `nearest` the states
    whose worst instant comes closest to its limit, and a bound of inf is a proof that nothing fits. `others`: further
    states within the limits that the search came by, the cheapest first.
    """

    states: States | None
    price: float
    bound: float
    multipliers: np.ndarray
    least: np.ndarray | None = None
    nearest: States | None = None
    solves: int = 0
    stopped: bool = False
    others: tuple[States, ...] = ()


@dataclass(frozen=True)
class _Options:
    progress: Progress | None
    enough: float
    most_solves: int
    limit_work: float
    ended: Callable[[], bool]


def solve_limited(
    problem: Problem,
    memory: Memory,
    limits: Sequence[float] | np.ndarray,
    accept: Accept = lambda states: True,
    progress: Progress | None = None,
    *,
    enough: float = SOLVE.enough,
    most_solves: int = SOLVE.limited_solves,
    limit_work: float = SOLVE.work,
    ended: Callable[[], bool] = never,
) -> LimitedSolution:
    """The cheapest accepted states whose bytes are within limits float64[T] (finite or inf).

    Ends when the gap between price and bound is at most `enough` of the price, when the multipliers can do no better,
    or after `most_solves` (three times as many while nothing was accepted). Raises NoStates when the problem has no
    choice at all, limits or not. Once `ended` says so the best so far is returned, accepted states or none.
    """
    limits = np.asarray(limits, dtype=np.float64)
    assert limits.shape == (memory.instants,)
    options = _Options(progress, enough, most_solves, limit_work, ended)
    search = _Search(problem, memory, limits, accept, options)
    search.run()
    return search.answer()


class _Search:
    """Results so far: all choices seen with their bytes, the best accepted one, the best bound and its multipliers.

    Bytes are counted in units of the limits, so that all instants have equal weight.
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
        self.evaluations: dict[States, bool] = {}
        self.tried: set[tuple[States, bytes]] = set()
        self.best: States | None = None
        self.price = math.inf
        kept = consistent(problem)
        self.root = Part(kept, problem.only(kept), self.memory.only(kept), np.zeros(memory.instants))
        self.open = [self.root]
        tables = [*problem.unary, *problem.pairs.values()]
        highest = [float(np.max(t, where=np.isfinite(t), initial=-math.inf)) for t in tables]
        self.ceiling = sum(highest) + 1e-6 * sum(map(abs, highest))
        self.least: np.ndarray | None = None
        self.solves = 0
        self.stopped = False

    def run(self) -> None:
        self.solve(self.root, self.root.multipliers)
        if self.over or self.ended:
            return
        self.fit()
        self.climb(self.root, self.tight)
        self.repair()
        if self.best is None and not self.ended:
            self.find_least()
        if not self.open:
            return
        self.tighten()
        self.gain()
        self.branch()
        if self.best is None and self.least is None and not self.ended:
            self.find_least()

    @property
    def ended(self) -> bool:
        """True if the search must end."""
        self.stopped = self.stopped or self.options.ended()
        return self.stopped

    @property
    def bound(self) -> float:
        return min([self.price, *(part.bound for part in self.open)])

    @property
    def over(self) -> bool:
        return self.best is not None and self.price - self.bound <= self.options.enough * abs(self.price)

    @property
    def spent(self) -> bool:
        most = self.options.most_solves * (1 if self.best is not None else SOLVE.patience)
        return self.solves >= most or len(self.evaluations) >= SOLVE.accepted_calls or self.ended

    def solve(self, part: Part, prices: np.ndarray) -> float:
        """One unlimited solve with a price per byte; returns a lower bound of price + prices·bytes in the part."""
        weighed = part.memory.weighed(part.problem, prices) if prices.any() else part.problem
        try:
            found = solve(
                weighed,
                limit_work=self.options.limit_work,
                start=part.messages,
                ended=self.options.ended,
            )
        except NoStates as none:
            if not self.known:
                raise
            self.solves += 1
            part.bound = math.inf if none.proven else part.bound
            return part.bound
        part.messages = found.messages or part.messages
        self.solves += 1
        # A solve is exact up to a part of its own price, and bytes at a high price make that large.
        bound = found.bound - (TOLERANCE * abs(found.bound) if prices.any() else 0.0)
        bound -= float(prices @ self.limits)
        if bound > self.ceiling:  # dearer than any choice: none fits
            bound = math.inf
        if bound > part.bound:
            part.bound, part.multipliers = bound, prices
        self.meet(tuple(int(k[s]) for k, s in zip(part.kept, found.states, strict=True)))
        if self.options.progress:
            self.options.progress("memory", self.solves, self.options.most_solves, self.price, self.bound)
        if found.least and self.best is not None:
            # Nothing cheaper than the best has these states, whichever way the bytes are priced later.
            most = self.price + float(prices @ self.limits)
            part.narrow(found.least, most + ROUNDING * abs(most))
        return found.bound

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
        if states not in self.evaluations:
            if len(self.evaluations) >= SOLVE.accepted_calls:
                return False
            evaluation = self.accept(states)
            if not isinstance(evaluation, bool | np.bool_):
                self.told = True
                miss = np.asarray(evaluation, dtype=np.float64) / self.unit
                self.tight = np.where(miss > 0, np.minimum(self.tight, totals - miss), self.tight)
                evaluation = not (miss > 0).any()
            self.evaluations[states] = bool(evaluation)
        return self.evaluations[states]

    def climb(self, part: Part, goal: np.ndarray, most: int = 1000) -> None:
        """Maximise the dual in a part by Kelley's planes, each step taken part of the way from the best point so
        far."""
        part.held = -math.inf
        stretch, low, centre = 10.0, -math.inf, part.multipliers
        whole_way = False
        end = self.solves + most
        while self.solves < end and not (
            self.spent or self.over or part.bound >= self.price or math.isinf(part.bound)
        ):
            chosen = [s for s in self.known if part.has(s)]
            if not chosen:
                self.solve(part, centre)
                continue
            prices = np.array([self.known[s][0] for s in chosen])
            amounts = np.array([self.known[s][1] for s in chosen])
            far = float(prices.max() + stretch * (np.ptp(prices) + 0.01 * np.abs(prices).max() + 1e-300))
            aim, high, weights = multipliers(prices, amounts, goal, far)
            part.split = split_of(
                [(w, chosen[i]) for i, w in weights.items() if i < len(chosen)], self.memory, aim
            )
            if high - low <= 0.25 * self.options.enough * abs(high):
                if len(chosen) not in weights or stretch > 1e5:
                    return
                stretch *= 30  # the mix leans on the made-up choice: dearer, so that real ones are found
                continue
            point = aim if whole_way else centre + SOLVE.step * (aim - centre)
            seen = len(self.known)
            value = self.solve(part, point) - float(point @ goal)
            if value > low:
                part.held = low = value
                centre = point
            elif whole_way and len(self.known) == seen:
                return  # the inner solves are not exact enough to go on
            whole_way = not whole_way and len(self.known) == seen

    def branch(self) -> None:
        """Split the part with the lowest bound in two, while solves are left (branch and bound).

        Where `accept` refused, it ends when nothing cheaper is left under what it seems to allow: the rest of the gap
        is what the bytes under-estimate.
        """
        while self.open and not (self.spent or self.over):
            part = min(self.open, key=lambda p: (p.held, p.bound))
            if part.held >= self.price - self.options.enough * abs(self.price):
                return
            halves = []
            if max(part.problem.sizes) > 1:
                halves = part.halves()
            else:
                self.meet(tuple(int(k[0]) for k in part.kept))
            # In one step: where the search is ended no part may be missing, or the bound would be too high.
            self.open = [p for p in self.open if p is not part] + halves
            for half in halves:
                if self.ended:
                    return
                self.solve(half, half.multipliers)
                self.climb(half, self.tight, SOLVE.part_solves)
            self.repair()
            self.open = [p for p in self.open if p.bound < self.price]

    def fit(self) -> None:
        """Change single variables of the choice nearest to fitting until it fits: a first answer."""
        moves = Moves(self.problem, self.memory, min(self.known, key=lambda s: (self.worth(s), s)))
        if moves.to_fit(self.tight):
            self.meet(tuple(moves.states))

    def repair(self) -> None:
        """Make what nearly fits fit, mix it with what is cheaper, and change single variables while that gains."""
        ranked = sorted(self.known, key=lambda s: (self.worth(s), s))
        for states in [s for s in ranked[: SOLVE.repairs] if (s, self.tight.tobytes()) not in self.tried]:
            self.tried.add((states, self.tight.tobytes()))
            moves = Moves(self.problem, self.memory, states)
            if moves.to_fit(self.tight):
                self.meet(tuple(moves.states))
        for _ in range(SOLVE.repairs):
            before = self.price
            if self.best is None or self.over or self.ended:
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
        return price + float(self.root.multipliers @ (totals + excess))

    def tighten(self) -> None:
        """While `accept` refuses what fits by the bytes, hold the bytes to less: by the miss, or by trial."""
        refused, fits, step = 0.0, 1.0, SOLVE.first_tightening
        for _ in range(SOLVE.tightenings):
            if self.over or self.spent or all(self.evaluations.values()):
                return
            if not self.told:
                self.tight = np.where(self.limits < NO_LIMIT, self.limits * (1 - step), self.limits)
            before = self.tight
            self.climb(self.root, self.tight)
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
        if self.best is not None and not self.over and not self.ended:
            moves = Moves(self.problem, self.memory, self.best)
            moves.to_gain(self.limits, self.accepted)
            self.meet(tuple(moves.states))

    def find_least(self) -> None:
        """The fewest bytes at each instant by itself; more than a limit proves that nothing fits."""
        self.least = np.full(self.memory.instants, -math.inf)
        for t in range(self.memory.instants):
            with suppress(NoStates):  # too much work to find any: nothing is known
                found = solve(self.memory.alone(self.problem, t), limit_work=self.options.limit_work)
                self.least[t] = found.bound
                self.meet(found.states)
        if (self.least > self.limits * (1 + ROUNDING)).any():
            self.open = []

    def answer(self) -> LimitedSolution:
        nearest = None
        if self.best is None:
            nearest = min(self.known, key=lambda s: (float((self.known[s][1] - self.limits).max()), s))
        least = None if self.least is None else self.least * self.unit
        prices = self.root.multipliers / self.unit
        within = (s for s, (_, totals) in self.known.items() if (totals <= self.limits).all())
        others = tuple(sorted((s for s in within if s != self.best), key=lambda s: (self.known[s][0], s)))
        return LimitedSolution(
            self.best, self.price, self.bound, prices, least, nearest, self.solves, self.stopped, others
        )
