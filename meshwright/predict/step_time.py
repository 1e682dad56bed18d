"""The times of a step without its timeline: of many micro-batches a few are simulated.

From the second one on, each micro-batch finds what the one before it left, so each further one takes as long as the one
before, except for the first and the last. Two consecutive differences are compared; if they are not equal, the full
step is simulated. The order of interleaved half-batches is chosen here too: each order is simulated, and the quickest
is the plan's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from meshwright.core.graph import Graph
from meshwright.core.techniques import TURNS
from meshwright.cost.cluster import Cluster
from meshwright.partition import Partition, partition
from meshwright.partition.accumulation import programs_in_time
from meshwright.plan.plan import Plan
from meshwright.predict.tasks import Lister
from meshwright.predict.timeline import Task, play

PLAYED = (3, 4, 5)  # micro-batches of the steps from which longer ones are extrapolated
ALL = sum(PLAYED) + 1  # so few are all simulated, which costs no more


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step, of exposed communication, and of communication hidden behind computation."""

    step_seconds: float
    exposed_seconds: float
    hidden_seconds: float

    def plus(self, other: StepTimes, times: float) -> StepTimes:
        """Return the sum with `times` times another's."""
        return StepTimes(
            self.step_seconds + times * other.step_seconds,
            self.exposed_seconds + times * other.exposed_seconds,
            self.hidden_seconds + times * other.hidden_seconds,
        )


def step_times(parts: Partition, cluster: Cluster, optimizer_states: int = 2) -> StepTimes:
    """Return the times of `simulate`, without the timeline. `optimizer_states`: moments per parameter (2 for Adam)."""

    return times_of(Lister(parts, cluster, optimizer_states))


def times_of(steps: Lister) -> StepTimes:
    """Return the times of a step from its lists."""
    return of_many(
        programs_in_time(steps.parts), lambda programs: played(steps.tasks(programs), steps.cluster)
    )


def of_many(count: int, of: Callable[[int], StepTimes]) -> StepTimes:
    """Return the times of a step with so many micro-batches, from those with a few."""
    if count <= ALL:
        return of(count)
    first, second, third = map(of, PLAYED)
    if not math.isclose(
        third.step_seconds - second.step_seconds, second.step_seconds - first.step_seconds, rel_tol=1e-9
    ):
        return of(count)
    return third.plus(third.plus(second, -1.0), count - PLAYED[-1])


def played(tasks: Sequence[Task], cluster: Cluster) -> StepTimes:
    """Return the times of a timeline of some tasks."""
    line = play(tasks, cluster.measured.slowdown)
    return StepTimes(line.step_seconds, line.exposed_seconds, line.hidden_seconds)


def with_turns(graph: Graph, plan: Plan, cluster: Cluster, optimizer_states: int = 2) -> Plan:
    """Return the plan with the interleaving order of the shortest step; the plan itself if nothing is interleaved."""
    if plan.techniques.interleave == 1:
        return plan

    def seconds(turns: str) -> float:
        parts = partition(graph, replace(plan, turns=turns))
        return step_times(parts, cluster, optimizer_states).step_seconds

    return replace(plan, turns=min(TURNS, key=seconds))


__all__ = ["StepTimes", "of_many", "played", "step_times", "times_of", "with_turns"]
