"""Lower bounds of every plan in stages, over all configurations: number of stages, levels, schedule and micro-batches,
whatever the shardings within a stage.

Only the configuration with the least bound is refined:

1. the least computation of a rank (`search/compute_bound.py`), averaged over all ranks;
2. the same through the chains of its schedule (`pipeline/critical_path.py`), idle time included;
3. the same with the exposed communication and replicated computation of shardings within a stage: the least over two
runs of the stage's mesh that leave a rank an example of each micro-batch (`search/pipeline/chain_bound.py`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.cost.cluster import Cluster
from meshwright.errors import PlanError
from meshwright.pipeline.critical_path import ACTIONS, Counts, counts, shares_of
from meshwright.search.budget import STAGES
from meshwright.search.compute_bound import Least
from meshwright.search.pipeline.chain_bound import chain_seconds
from meshwright.search.pipeline.configurations import Outer, outers
from meshwright.search.planner import Planner


@dataclass(frozen=True)
class Bound:
    """`seconds`: what no configuration is quicker than. `configurations`: how many there are."""

    seconds: float
    configurations: int


class Bounds:
    """Bounds of the configurations of a cluster. `pieces`: the numbers of micro-batches that may be."""

    def __init__(
        self,
        cluster: Cluster,
        layers: int,
        pieces: Sequence[int],
        least: Least,
        planner_of: Callable[[Cluster], Planner],
    ) -> None:
        self.cluster, self.least, self.planner_of = cluster, least, planner_of
        self.every = [
            (outer, count)
            for outer in outers(cluster, layers)
            for count in pieces
            if outer.schedule.chunks == 1 or count >= outer.ranks
        ]
        self._sent: dict[tuple[tuple[int, ...], int], float] = {}

    def mean(self, outer: Outer, micro_batches: int) -> float:
        """Return the mean busy seconds of the ranks of a pipeline, or those of the rank with most of one kind of
        operator if they are more."""
        inside = self.cluster.ranks // outer.ranks
        once = float(self.least.computing(inside * micro_batches).sum())
        mean = (micro_batches * once + self.least.updating(inside)) / outer.ranks
        return max(mean, micro_batches * self.least.busiest(inside * micro_batches, outer.ranks))

    def ordered(self, outer: Outer, micro_batches: int) -> float:
        """The same, and what the schedule's chains take."""
        seconds, found = self._counts(outer, micro_batches)
        mean = self.mean(outer, micro_batches)
        return mean if found is None else max(mean, float(found.least(seconds).sum()))

    def sent(self, outer: Outer, micro_batches: int, *, solve: bool = True) -> float:
        """The same with what is sent, and computed more than once. Without `solve` by what is known of fewer
        micro-batches, which leave more shardings."""
        seconds, found = self._counts(outer, micro_batches)
        key = outer.taken, micro_batches
        if solve and key not in self._sent:
            self._sent[key] = chain_seconds(self.planner_of(outer.inside(self.cluster)), micro_batches)
        known = [s for (taken, m), s in self._sent.items() if taken == outer.taken and m <= micro_batches]
        whole = max(known, default=0.0)
        inside = self.cluster.ranks // outer.ranks
        busy = (whole + self.least.updating(inside)) / outer.ranks
        least = max(self.ordered(outer, micro_batches), busy)
        if found is None:
            return least
        more = max(0.0, whole / micro_batches - float(seconds.sum()))
        return max(least, float(found.least(seconds).sum()) + found.least_of_any * more)

    def _counts(self, outer: Outer, micro_batches: int) -> tuple[np.ndarray, Counts | None]:
        seconds = self.least.computing(self.cluster.ranks // outer.ranks * micro_batches)
        schedule = outer.schedule
        most = STAGES.raced_actions if schedule.name == "zero_bubble_v" else ACTIONS
        if outer.stages * micro_batches > most or not seconds.any():
            return seconds, None
        try:
            shares = shares_of(seconds.sum(axis=0))
            return seconds, counts(schedule.name, outer.ranks, micro_batches, schedule.chunks, shares)
        except PlanError:  # no such schedule of so many micro-batches
            return seconds, None

    def all(self, floor: float, best: float, solves: int = STAGES.bound_solves) -> Bound:
        """The least of all configurations, and of `floor`, what no plan in one stage is quicker than. `best`: the
        quickest step that is known; work ends where the bound is close to it."""
        known = len(self.every)
        queue = [(self.mean(*one), 0, number) for number, one in enumerate(self.every)]
        heapq.heapify(queue)
        while queue and queue[0][0] < floor:
            value, closely, number = queue[0]
            one = self.every[number]
            if closely == 3 or value * (1 + STAGES.bound_close) >= best or (closely == 2 and not solves):
                return Bound(value, known)
            if closely == 0:
                found = self.ordered(*one)
            else:
                unsolved = (one[0].taken, one[1]) not in self._sent
                solves -= closely == 2 and unsolved
                found = self.sent(*one, solve=closely == 2)
            heapq.heapreplace(queue, (max(value, found), closely + 1, number))
        return Bound(floor, known)


__all__ = ["Bound", "Bounds"]
