"""The times of a step without its timeline: of many micro-batches a few are simulated.

From the second one on, each micro-batch finds what the one before it left, so each further one takes as long as the one
before, except for the first and the last. Of four, the second and the third are compared, task by task: if the third
does not repeat the second, or the host falls behind with each, the full step is simulated. The order of interleaved
half-batches is chosen here too: each order is simulated, and the quickest is the plan's.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace

from meshwright.core.graph import Graph
from meshwright.core.techniques import TURNS
from meshwright.cost.cluster import Cluster
from meshwright.partition import Partition, partition
from meshwright.partition.accumulation import programs_in_time
from meshwright.plan.plan import Plan
from meshwright.predict.tasks import Filled, Lister
from meshwright.predict.timeline import Timeline, play

FEW = 4  # micro-batches of the step from which longer ones are extrapolated: the first, two between, and the last
SAME = 1e-9  # relative: rounding of sums of seconds


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
    count = programs_in_time(steps.parts)
    if count > FEW:
        with contextlib.suppress(Unlike):
            return played(steps.filled(FEW), steps.cluster, count - FEW)
    return played(steps.filled(count), steps.cluster)


class Unlike(Exception):
    """A micro-batch does not repeat the one before it."""


def played(step: Filled, cluster: Cluster, more: int = 0) -> StepTimes:
    """Return the times of a listed step, or of one with `more` micro-batches than the few that are listed.

    Raises Unlike if there are more and the third does not repeat the second.
    """
    if not more:
        return _times(play(step.tasks, cluster.measured.slowdown))
    first, second, third, _ = step.ends
    length = third - second
    seconds = [task.seconds for task in step.tasks[first:third]]
    if not any(seconds) or seconds[:length] != seconds[length:]:
        raise Unlike
    line = play(step.tasks, cluster.measured.slowdown, (second - 1, third - 1))
    further = line.ends[third - 1] - line.ends[second - 1]
    issued = math.fsum(task.issue_seconds for task in step.tasks[second:third])
    late = (line.ends[n + length] - line.ends[n] - further for n in range(first, second))
    if issued > further * (1 + SAME) or any(abs(each) > further * SAME for each in late):
        raise Unlike
    (exposed, hidden), (exposed_after, hidden_after) = line.marked
    added = StepTimes(further, exposed_after - exposed, hidden_after - hidden)
    return _times(line).plus(added, more)


def _times(line: Timeline) -> StepTimes:
    return StepTimes(line.step_seconds, line.exposed_seconds, line.hidden_seconds)


def with_turns(graph: Graph, plan: Plan, cluster: Cluster, optimizer_states: int = 2) -> Plan:
    """Return the plan with the interleaving order of the shortest step; the plan itself if nothing is interleaved."""
    if plan.techniques.interleave == 1:
        return plan

    def seconds(turns: str) -> float:
        parts = partition(graph, replace(plan, turns=turns))
        return step_times(parts, cluster, optimizer_states).step_seconds

    return replace(plan, turns=min(TURNS, key=seconds))


__all__ = ["FEW", "StepTimes", "Unlike", "played", "step_times", "times_of", "with_turns"]
