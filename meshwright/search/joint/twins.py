"""Candidates between which simulations show no difference: under further techniques, one of them is simulated."""

from __future__ import annotations

import math
from collections import defaultdict

from meshwright.core.techniques import Techniques
from meshwright.search.budget import TECHNIQUES
from meshwright.search.memory_limit import step_of
from meshwright.search.planner import Planner, SearchResult


class Twins:
    """What was simulated of candidates, by their numbers. Two are twins if under some techniques both took as long and
    as many bytes, and under none they differed."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.seen: defaultdict[Techniques, dict[int, SearchResult]] = defaultdict(dict)
        self.alike: dict[frozenset[int], bool] = {}

    def add(self, number: int, techniques: Techniques, found: SearchResult) -> None:
        """Compare a simulation with those of other candidates under the same techniques."""
        for other, its in self.seen[techniques].items():
            pair = frozenset((number, other))
            alike = self._alike(found, its)
            if alike is not None:
                self.alike[pair] = alike and self.alike.get(pair, True)
        self.seen[techniques][number] = found

    def found(self, number: int, techniques: Techniques) -> SearchResult | None:
        """Return the simulation of a twin under the same techniques."""
        others = self.seen[techniques].items()
        return next((its for other, its in others if self.alike.get(frozenset((number, other)))), None)

    def _alike(self, one: SearchResult, other: SearchResult) -> bool | None:
        """Whether two simulations are equal; None if their bytes are and their seconds are not known."""
        if not math.isclose(*map(self.planner.peak_bytes, (one, other)), rel_tol=TECHNIQUES.alike):
            return False
        if math.isinf(step_of(one)) or math.isinf(step_of(other)):
            return None
        return math.isclose(step_of(one), step_of(other), rel_tol=TECHNIQUES.alike)


__all__ = ["Twins"]
