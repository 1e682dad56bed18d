"""How long a step takes, without its timeline: of many micro-batches a few are played.

From the second one on each finds what the one before it left, and so a step with one more takes longer by as much as
one more before that did, up to the first and the last, which differ. Two such differences in a row are held against
each other; where they are not equal all of the step is played.

In which order copies take turns: each is put on the timeline of the cluster, and the quickest is the plan's.
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
from meshwright.predict.tasks import step_tasks
from meshwright.predict.timeline import Task, play

PLAYED = (3, 4, 5)  # micro-batches of the steps that tell those of longer ones
ALL = sum(PLAYED) + 1  # of so few all are played, which costs no more


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step, those in which something is sent and nothing computes, and those in which both happen."""

    step_seconds: float
    exposed_seconds: float
    hidden_seconds: float

    def plus(self, other: StepTimes, times: float) -> StepTimes:
        """With so many times another's."""
        return StepTimes(
            self.step_seconds + times * other.step_seconds,
            self.exposed_seconds + times * other.exposed_seconds,
            self.hidden_seconds + times * other.hidden_seconds,
        )


def step_times(parts: Partition, cluster: Cluster, optimizer_states: int = 2) -> StepTimes:
    """What `simulate` says of a step, but for the timeline. `optimizer_states`: moments per parameter (2 for Adam)."""

    def of(programs: int) -> StepTimes:
        return played(step_tasks(parts, cluster, optimizer_states, programs=programs), cluster)

    return of_many(programs_in_time(parts), of)


def of_many(count: int, of: Callable[[int], StepTimes]) -> StepTimes:
    """The step with so many micro-batches, by what is seen of it with some number of them."""
    if count <= ALL:
        return of(count)
    first, second, third = map(of, PLAYED)
    if not math.isclose(
        third.step_seconds - second.step_seconds, second.step_seconds - first.step_seconds, rel_tol=1e-9
    ):
        return of(count)
    return third.plus(third.plus(second, -1.0), count - PLAYED[-1])


def played(tasks: Sequence[Task], cluster: Cluster) -> StepTimes:
    """What a timeline of some tasks says."""
    line = play(tasks, cluster.measured.slowdown)
    return StepTimes(line.step_seconds, line.exposed_seconds, line.hidden_seconds)


def with_turns(graph: Graph, plan: Plan, cluster: Cluster, optimizer_states: int = 2) -> Plan:
    """The plan with the order of turns that ends a step first on a cluster; itself where nothing takes turns."""
    if plan.techniques.interleave == 1:
        return plan

    def seconds(turns: str) -> float:
        parts = partition(graph, replace(plan, turns=turns))
        return step_times(parts, cluster, optimizer_states).step_seconds

    return replace(plan, turns=min(TURNS, key=seconds))


__all__ = ["StepTimes", "of_many", "played", "step_times", "with_turns"]
