"""The choices that take least of a rank, whatever the limit is.

A mode answers with one of these where what it searched under the limit does not fit, so that no limit is refused which
a smaller one was not; a refusal speaks of nothing that one of them was not simulated for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np

from meshwright.search.budget import MEMORY
from meshwright.search.exact_spaces import families_of
from meshwright.search.memory_limit import fits_in_both, nearer, offer
from meshwright.search.planner import Planner, SearchResult
from meshwright.search.solve import NoStates, Problem, solve
from meshwright.search.space.memory import fixed_bytes

States = tuple[int, ...]


class LeastMemory:
    """Choices of a planner's first space, from small to quick; each is simulated when it is asked for."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.space = planner.space(families_of(planner)[0][1])
        self.memory = planner.memory(self.space)
        self._found: dict[States, SearchResult] = {}
        self._states: list[States] = []
        self._rest = self._made()
        self._lower: list[SearchResult] | None = None

    def __iter__(self) -> Iterator[States]:
        yield from self._states
        for states in self._rest:
            self._states.append(states)
            yield states

    def sums(self, states: States) -> float:
        """Bytes that a simulation will not see less of."""
        return fixed_bytes(self.space) + float(self.memory.totals(states).max())

    def evaluated(self, states: States) -> SearchResult:
        """The choice with its simulated bytes; its step is not simulated."""
        if states not in self._found:
            claims = {"memory_decided": True}
            self._found[states] = self.planner.found(self.space, states, claims, timed=False)
            self.planner.tell("the least memory")
        return self._found[states]

    @property
    def lowest_peak(self) -> float:
        """Bytes of the lowest peak that was simulated so far."""
        return min(map(self.planner.peak_bytes, self._found.values()), default=math.inf)

    def may_be(self, most: float) -> bool:
        """False if every choice takes more than so many bytes by its sums, whatever its price: one solve says so
        where as many as there are prices would."""
        problem = self.planner.problem(self.space)
        over = most - fixed_bytes(self.space)
        return all(
            solve(self.memory.alone(problem, instant)).bound <= over
            for instant in range(self.memory.instants)
        )

    def below(self, most: float) -> Iterator[SearchResult]:
        """Those simulated whose sums do not say already that they take more."""
        if not self._states and not self.may_be(most):
            return
        for states in self:
            if self.sums(states) <= most:
                yield self.evaluated(states)

    def lower(self) -> list[SearchResult]:
        """The choices that follow from the one with the lowest peak when the operator at its peak, or the maker of its
        inputs, is sharded in other ways, from low to lowest: temporary buffers are in no sum."""
        if self._lower is None:
            self._lower = []
            first, seen = [self.evaluated(states) for states in self], set(self)
            best, left = min(first, key=self.planner.peak_bytes), self._moves
            for _ in range(MEMORY.moves if left else 0):
                most = self.planner.peak_bytes(best)
                rows = sorted((self.sums(s), s) for s in self._moved(best) if s not in seen)[:left]
                seen |= {states for _, states in rows}
                left -= len(rows)
                found = [self.evaluated(states) for sums, states in rows if sums < most]
                low = min(found, key=self.planner.peak_bytes, default=best)
                if self.planner.peak_bytes(low) >= most:
                    break
                best = low
                self._lower.append(low)
                if not left:
                    break
        return self._lower

    @property
    def _moves(self) -> int:
        """Programs that may be simulated for moves: of a folded model, one takes a few copies of its layers twice."""
        copies = 1 if self.planner.folds.is_whole else MEMORY.copies
        count = MEMORY.moved_nodes // (copies * len(self.planner.codes))
        return count if count >= MEMORY.least_moved else 0

    def _moved(self, found: SearchResult) -> set[States]:
        """The choices of least bytes in which one of those operators is sharded in each other way."""
        problem = self.planner.problem(self.space)
        quick = solve(problem)
        each = quick.price / (self.sums(quick.states) or 1.0)
        problem = self.memory.weighed(problem, np.full(self.memory.instants, MEMORY.byte_prices[0] * each))
        moved = set[States]()
        for variable in self._at_peak(found):
            prices = problem.unary[variable]
            ways = [s for s in np.argsort(prices) if np.isfinite(prices[s]) and s != found.states[variable]]
            for state in ways[: MEMORY.ways]:
                only = np.where(np.arange(len(prices)) == state, prices, np.inf)
                unary = (*problem.unary[:variable], only, *problem.unary[variable + 1 :])
                with suppress(NoStates):
                    solution = solve(Problem(unary, problem.pairs))
                    moved.add(tuple(solution.states))
        return moved

    def _at_peak(self, found: SearchResult) -> list[int]:
        """The operator that the peak is named after, and those whose results it reads."""
        assert found.evaluation is not None
        named, nodes = found.evaluation.instant.partition(",")[0], {n.name: n for n in self.space.graph.nodes}
        at = max((name for name in nodes if named.startswith(name)), key=len, default="")
        names = [at, *(use.partition(".")[0] for use in nodes[at].uses)] if at else []
        owners = [self.space.variable.get(("node", name)) for name in dict.fromkeys(names)]
        return [variable for variable in owners if variable is not None]

    def _made(self) -> Iterator[States]:
        problem, memory = self.planner.problem(self.space), self.memory
        quick = solve(problem)
        each = quick.price / (self.sums(quick.states) or 1.0)
        seen = set[States]()
        for share in MEMORY.byte_prices:
            prices = np.full(memory.instants, share * each)
            for _ in range(2):
                states = tuple(solve(memory.weighed(problem, prices)).states)
                if states not in seen:
                    seen.add(states)
                    yield states
                if share < MEMORY.byte_prices[0]:
                    break
                # Once more with the worst instant before all others: the peak is there, and not the sum of all.
                worst = int(np.argmax(memory.totals(states)))
                prices = np.where(np.arange(memory.instants) == worst, prices, 1e-3 * prices)


def least_memory(planner: Planner) -> LeastMemory:
    """Those of a planner under its techniques, found once."""
    return planner.kept.once(("least memory", planner.techniques), lambda: LeastMemory(planner))


def least_bytes_of(planner: Planner) -> SearchResult | None:
    """The one with the lowest peak, evaluated in full; None without a simulation."""
    if planner.evaluator is None:
        return None
    choices, best = least_memory(planner), None
    for states in choices:
        if best is None or choices.sums(states) < planner.peak_bytes(best):
            best = nearer(planner, best, choices.evaluated(states))
    for found in choices.lower():
        best = nearer(planner, best, found)
    return None if best is None else planner.settled(best, timed=False)


def saved(planner: Planner, *, moved: bool = True) -> SearchResult | None:
    """The cheapest of them that fits, evaluated in full; None where none does. `moved`: where none does, also what the
    lowest becomes when an operator of it is sharded otherwise, which takes as long as all before."""
    fitting = [found for found in _below(planner) if fits_in_both(planner, found)]
    if not fitting and moved and planner.evaluator is not None:
        fitting = [found for found in least_memory(planner).lower() if fits_in_both(planner, found)]
    for found in sorted(fitting, key=lambda one: one.claims["price_seconds"]):
        if fits_in_both(planner, sure := planner.settled(found)):
            offer(planner, sure)
            return replace(sure, claims={**sure.claims, "chosen": "the least-memory plan"})
    return None


def lowest_peak(planner: Planner) -> float:
    """Bytes of the lowest peak of those that were simulated so far."""
    return least_memory(planner).lowest_peak


def any_fits(planner: Planner) -> bool:
    """Return whether one of them fits. It stops at the first that does."""
    return any(
        fits_in_both(planner, found) and fits_in_both(planner, planner.settled(found, timed=False))
        for found in _below(planner)
    )


def _below(planner: Planner) -> Iterator[SearchResult]:
    if planner.evaluator is not None:
        yield from least_memory(planner).below(planner.request.memory_bytes or math.inf)


__all__ = [
    "LeastMemory",
    "any_fits",
    "least_memory",
    "least_bytes_of",
    "lowest_peak",
    "saved",
]
