"""Bound, prune, eliminate: the exact answer where the tables stay small, an answer with its bound where they do not.

Sweeps give a lower bound of the price and of the price with each single state (its reduced cost); a choice that
follows them gives an upper bound. A state whose lower bound exceeds the upper one is in no optimum and is dropped.
What is left is eliminated exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from meshwright.search.budget import SOLVE
from meshwright.search.solve.eliminate import Estimate, eliminate_until, estimate
from meshwright.search.solve.problem import NoStates, Problem
from meshwright.search.solve.trws import Messages, Sweeps, consistent, round_cost
from meshwright.search.stop import never

Progress = Callable[[str, int, int, float, float], None]
"""Called with (stage, done, total, best price so far, lower bound)."""

NOT_ALLOWED = 1e30
TOLERANCE = 1e-10  # of the price: what a bound may lack by rounding


@dataclass(frozen=True, eq=False)
class Solution:
    """The best states found, their price, and a lower bound of every price; `exact` when the two are the same.

    `exact` is up to 1e-10 of the price. `least`, where sweeps were needed, holds a lower bound of the price with each
    single state, float64[K] per variable. `messages` may start the next solve of a problem with the same shape and
    the same forbidden entries. `stopped` says that the search was ended early.
    """

    states: tuple[int, ...]
    price: float
    bound: float
    exact: bool
    stopped: bool = False
    messages: Messages = field(default_factory=dict, repr=False)
    least: tuple[np.ndarray, ...] = field(default=(), repr=False)


def solve(
    problem: Problem,
    *,
    limit_work: float = SOLVE.work,
    progress: Progress | None = None,
    start: Messages | None = None,
    first: Sequence[int] | None = None,
    ended: Callable[[], bool] = never,
) -> Solution:
    """The cheapest states of a problem, exactly if no elimination of more than `limit_work` sums is needed.

    `first` are states that are known to be good: what cannot be better is left out from the beginning.

    Once `ended` says so, and some states are known, the best so far is returned. Raises NoStates when no choice has a
    finite price.
    """
    search = _Search(problem, limit_work, progress, ended)
    if first is not None and math.isfinite(price := problem.price(first)):
        search.states, search.price = tuple(first), price
    search.run(start)
    if search.states is None:
        why = f"none was found, and to prove it takes more than {limit_work:.1e} sums"
        raise NoStates(None, proven=False, why=why)
    bound = min(search.bound, search.price)
    exact = search.closed
    return Solution(
        search.states,
        search.price,
        search.price if exact else bound,
        exact,
        search.stopped,
        search.messages,
        tuple(search.least),
    )


@dataclass(frozen=True, eq=False)
class _Few:
    """The states (places per variable) whose lower bound is at most `level`; no plan when too many for the budget."""

    level: float
    places: list[np.ndarray]
    plan: Estimate | None


class _Search:
    """The state of one solve: what is left of each variable, the best states, the bound."""

    def __init__(
        self, problem: Problem, limit_work: float, progress: Progress | None, ended: Callable[[], bool]
    ) -> None:
        self.problem = problem
        self.ended, self.stopped = ended, False
        self.limit_work = limit_work
        self.progress = progress
        self.states: tuple[int, ...] | None = None
        self.price = math.inf
        self.bound = -math.inf
        self.messages: Messages = {}
        self.kept = consistent(problem)
        self.least: list[np.ndarray] = []

    @property
    def margin(self) -> float:
        return TOLERANCE * max(abs(self.price), abs(self.bound)) if self.states else math.inf

    @property
    def closed(self) -> bool:
        known = self.states is not None and math.isfinite(self.bound)  # `first` is there before any bound
        return known and self.price - self.bound <= self.margin

    def run(self, start: Messages | None) -> None:
        part = self.problem.only(self.kept)
        plan = estimate(part)
        if plan.work > self._easy(part, 4) or plan.size_bytes > SOLVE.table_bytes:
            part, plan = self._shrink(Sweeps(part, start), plan)
        small = plan.work <= self.limit_work and plan.size_bytes <= SOLVE.table_bytes
        if small and not self._is_done() and self._finish(part, plan, self.kept):
            self.bound = self.price

    def _is_done(self) -> bool:
        """True if nothing is left to find, or the search must end with the states that are known."""
        self.stopped = self.stopped or (self.states is not None and self.ended())
        return self.stopped or self.closed

    def _easy(self, part: Problem, rounds: int) -> float:
        """Work that takes no longer than some rounds; each variable costs a few calls whatever its states."""
        return rounds * round_cost(part) + SOLVE.call_work * len(self.kept)

    def _shrink(self, sweeps: Sweeps, plan: Estimate) -> tuple[Problem, Estimate]:
        """Reduce the problem by sweeps, and by eliminating parts of it; return the rest and the estimate of its
        work."""
        sweeps, plan = self._sweep(sweeps, plan)
        for share in (1 / 16, 1.0):  # a small part of the work often closes the gap
            budget = share * min(plan.work, self.limit_work)
            large = plan.work > max(budget, SOLVE.modest_work) or plan.size_bytes > SOLVE.table_bytes
            if large and not self._is_done():
                self._round(sweeps)
                sweeps = self._near(sweeps, plan, budget)
                plan = estimate(sweeps.problem)
        return sweeps.problem, plan

    def _sweep(self, sweeps: Sweeps, plan: Estimate) -> tuple[Sweeps, Estimate]:
        """Rounds until what is left is cheaper to eliminate than to sweep, or the bound stands still."""
        whole = True
        for done in range(SOLVE.rounds):
            before = self.bound
            self._round(sweeps)
            self._offer(self.kept, settle(sweeps.problem, sweeps.decode()))
            if done in SOLVE.few_after:
                self._of_few(sweeps, plan)
            if whole:
                self.messages = sweeps.messages()
            self._tell("bound", done + 1, SOLVE.rounds)
            if self._is_done():
                break
            near = done % SOLVE.rounds_between_tries == SOLVE.rounds_between_tries - 1
            slim = self._near(sweeps, plan, sweeps.cost) if near else self._pruned(sweeps)
            if self._is_done():
                break
            if slim is not sweeps:
                sweeps, whole = slim, False
                plan = estimate(sweeps.problem)
            if plan.work <= self._easy(sweeps.problem, 2):
                break
            if done >= 2 and self.bound - before < SOLVE.least_progress * (self.price - self.bound):
                break
        return sweeps, plan

    def _round(self, sweeps: Sweeps) -> None:
        self.bound = max(self.bound, sweeps.round())
        if not self.least:
            self.least = [np.full(len(row), math.inf) for row in self.problem.unary]
            for least, kept in zip(self.least, self.kept, strict=True):
                least[kept] = -math.inf
        for least, kept, new in zip(self.least, self.kept, sweeps.least, strict=True):
            least[kept] = np.maximum(least[kept], new)

    def _pruned(self, sweeps: Sweeps) -> Sweeps:
        """The sweeps without the states that no better choice can have, if that makes them a good deal cheaper."""
        few = sweeps.within(self.price + self.margin)
        left = 2.0 * sum(len(few[u]) * len(few[v]) for u, v in sweeps.problem.pairs)
        if left > 0.8 * sweeps.cost:
            return sweeps
        slim: Problem | None = sweeps.problem.only(few)
        again = consistent(slim)
        if any(len(a) < len(f) for a, f in zip(again, few, strict=True)):  # some lost their last partner
            few, slim = [f[a] for f, a in zip(few, again, strict=True)], None
        self.kept = [k[f] for k, f in zip(self.kept, few, strict=True)]
        return sweeps.only(few, slim)

    def _near(self, sweeps: Sweeps, plan: Estimate, budget: float) -> Sweeps:
        """Eliminate over the states whose lower bound is least, as many as `budget` allows (after a round).

        A choice with any other state costs more than the highest of these bounds, so that is a lower bound too.
        """
        few = self._affordable(sweeps, plan, budget)
        if few.plan:
            try:
                kept = [k[f] for k, f in zip(self.kept, few.places, strict=True)]
                # Where a variable has none of these states, every choice has another one.
                if all(map(len, kept)) and not self._finish(sweeps.problem.only(few.places), few.plan, kept):
                    return sweeps
            except NoStates:
                pass
            beyond = (least[least > few.level].min(initial=math.inf) for least in sweeps.least)
            self.bound = max(self.bound, min(self.price, *map(float, beyond)))
        return self._pruned(sweeps)

    def _of_few(self, sweeps: Sweeps, whole: Estimate) -> None:
        """The best choice among the states of each variable that look best: what it costs says what to leave out."""
        sizes = sweeps.problem.sizes
        for few in SOLVE.few:
            plan = whole.resized([min(few, size) for size in sizes])
            if plan.work <= max(sweeps.cost, self._easy(sweeps.problem, 0)):
                break
        else:
            return
        places = [np.sort(least.argsort(kind="stable")[:few]) for least in sweeps.least]
        try:
            kept = [k[p] for k, p in zip(self.kept, places, strict=True)]
            self._finish(sweeps.problem.only(places), plan, kept)
        except NoStates:
            pass

    def _affordable(self, sweeps: Sweeps, whole: Estimate, budget: float) -> _Few:
        """The states below a level between bound and price, which a bisection pushes up as far as `budget` allows."""
        low, high = self.bound, self.price
        best = _Few(low, [], None)
        if math.isinf(high):
            high = max(float(least.max()) for least in sweeps.least)
        level = high
        every = np.concatenate(sweeps.least)
        starts = np.cumsum([0, *map(len, sweeps.least[:-1])])
        for _ in range(SOLVE.bisections):
            plan = whole.resized(np.add.reduceat(every <= level, starts, dtype=np.int64).tolist())
            if plan.work <= budget and plan.size_bytes <= SOLVE.table_bytes:
                best, low = _Few(level, [], plan), level
                if level == high:
                    break
            else:
                high = level
            level = (low + high) / 2
        return replace(best, places=sweeps.within(best.level)) if best.plan else best

    def _finish(self, part: Problem, plan: Estimate, kept: Sequence[np.ndarray]) -> bool:
        """Offer the optimum of a part; whether the search was not ended before."""

        def ended(done: int, total: int) -> bool:
            self._tell("eliminate", done, total)
            return self._is_done() and self.stopped

        found = eliminate_until(part, plan, ended)
        if found is not None:
            self._offer(kept, found.states)
        return found is not None

    def _offer(self, kept: Sequence[np.ndarray], states: Sequence[int]) -> None:
        """Take states given as places in `kept` if they are better than what we have."""
        states = tuple(int(k[s]) for k, s in zip(kept, states, strict=True))
        price = self.problem.price(states)
        if price < self.price:
            self.states, self.price = states, price

    def _tell(self, stage: str, done: int, total: int) -> None:
        if self.progress:
            self.progress(stage, done, total, self.price, self.bound)


def completed(problem: Problem, known: Mapping[int, int]) -> tuple[int, ...]:
    """States of some variables, and for each other one the best beside these alone."""
    total: list[np.ndarray] = list(problem.unary)
    for (u, v), matrix in problem.pairs.items():
        if u in known:
            total[v] = total[v] + matrix[known[u]]
        elif v in known:
            total[u] = total[u] + matrix[:, known[v]]
    return tuple(known[v] if v in known else int(row.argmin()) for v, row in enumerate(total))


def settle(problem: Problem, states: Sequence[int]) -> tuple[int, ...]:
    """Change one variable at a time to its best state given the others, until none gains (iterated modes).

    A pair that is not allowed weighs more than any price, so that the fewest such pairs remain.
    """
    around: list[list[tuple[int, np.ndarray]]] = [[] for _ in states]
    for (u, v), matrix in problem.pairs.items():
        around[u].append((v, matrix.T))
        around[v].append((u, matrix))
    now = list(states)
    for _ in range(SOLVE.rounds):
        moved = False
        for v, row in enumerate(problem.unary):
            total = row.copy()
            for w, matrix in around[v]:
                total += np.minimum(matrix[now[w]], NOT_ALLOWED)
            best = int(total.argmin())
            if total[best] < total[now[v]]:
                now[v], moved = best, True
        if not moved:
            break
    return tuple(now)
