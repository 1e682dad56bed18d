"""How long a step takes, without its timeline: of many micro-batches a few are played.

From the second one on each finds what the one before it left, and so a step with one more takes longer by as much as
one more before that did, up to the first and the last, which differ. Two such differences in a row are held against
each other; where they are not equal all of the step is played.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.cost.cluster import Cluster
from meshwright.cost.timeline import Timeline, play
from meshwright.partition import Partition
from meshwright.partition.accumulation import programs_in_time
from meshwright.partition.tasks import step_tasks

PLAYED = (3, 4, 5)  # micro-batches of the steps that tell those of longer ones
ALL = sum(PLAYED) + 1  # of so few all are played, which costs no more


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step, those in which something is sent and nothing computes, and those in which both happen."""

    step_seconds: float
    exposed_seconds: float
    hidden_seconds: float


def step_times(parts: Partition, cluster: Cluster, optimizer_states: int = 2) -> StepTimes:
    """What `simulate` says of a step, but for the timeline. `optimizer_states`: moments per parameter (2 for Adam)."""

    def played(programs: int | None) -> Timeline:
        tasks = step_tasks(parts, cluster, optimizer_states, programs=programs)
        return play(tasks, cluster.measured.slowdown)

    count = programs_in_time(parts)
    if count <= ALL:
        return _times(played(None))
    first, second, third = (_times(played(programs)) for programs in PLAYED)
    if not math.isclose(
        third.step_seconds - second.step_seconds, second.step_seconds - first.step_seconds, rel_tol=1e-9
    ):
        return _times(played(None))
    more = count - PLAYED[-1]
    return StepTimes(
        third.step_seconds + more * (third.step_seconds - second.step_seconds),
        third.exposed_seconds + more * (third.exposed_seconds - second.exposed_seconds),
        third.hidden_seconds + more * (third.hidden_seconds - second.hidden_seconds),
    )


def _times(line: Timeline) -> StepTimes:
    return StepTimes(line.step_seconds, line.exposed_seconds, line.hidden_seconds)
