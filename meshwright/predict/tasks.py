"""The tasks of the rank at the origin in one training step: forward, backward, buckets, update.

The order is the runtime's: forward and backward of each micro-batch (`phase_tasks.py`). A bucket of gradients starts
when its last gradient is complete and those before it have started. At the end come a wait for the buckets and the
update.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from meshwright.core.graph import Graph
from meshwright.core.mesh import Mesh
from meshwright.cost.cluster import Cluster
from meshwright.partition import Partition
from meshwright.partition.accumulation import programs_in_time, scattered_each_time, summed_first
from meshwright.partition.bucket_sizes import gradient_bytes
from meshwright.partition.buckets import BucketBytes, fill
from meshwright.partition.gradients import pending_gradients
from meshwright.partition.micro_batches import MicroBatches, first_micro_batch, first_program
from meshwright.partition.sharded_update import gathered_bytes, gathered_last
from meshwright.partition.stages import check_one_stage
from meshwright.predict.bucket_tasks import Arrival, BucketTasks, Pass
from meshwright.predict.issued import Issued
from meshwright.predict.phase_tasks import StepTasks
from meshwright.predict.price import NodePrice, first_local, node_prices, on_cluster, parameter_prices
from meshwright.predict.timeline import Task, Timeline, play
from meshwright.redistribute.steps import origin


def simulate(
    parts: Partition, cluster: Cluster, optimizer_states: int = 2, *, bucket_bytes: BucketBytes | None = None
) -> Timeline:
    """Return the timeline of one training step under a plan. `optimizer_states`: moments per parameter (2 for Adam)."""
    tasks = step_tasks(parts, cluster, optimizer_states, bucket_bytes=bucket_bytes)
    return play(tasks, cluster.measured.slowdown)


def step_tasks(
    parts: Partition,
    cluster: Cluster,
    optimizer_states: int = 2,
    *,
    bucket_bytes: BucketBytes | None = None,
) -> tuple[Task, ...]:
    """Return the tasks of one training step in the order in which the host issues them."""
    return Lister(parts, cluster, optimizer_states).filled(bucket_bytes=bucket_bytes).tasks


@dataclass(frozen=True)
class Filled:
    """The tasks of a step with its buckets. `ends`: how many of them there are at the end of each backward."""

    tasks: tuple[Task, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True)
class Lister:
    """Lists the step of a program that is not split into stages. What is the same for any number of micro-batches is
    found once."""

    parts: Partition
    cluster: Cluster
    optimizer_states: int = 2

    def issued(self, programs: int | None = None) -> Issued:
        """Return the step before its buckets are filled.

        `programs`: instead, that of a step with so many micro-batches of equal size (or groups of interleaved
        half-batches).
        """
        count = programs_in_time(self.parts) if programs is None else programs
        longer = self._three.with_more(count - 3) if count > 3 else None
        return self._listed(count) if longer is None else longer

    def filled(self, programs: int | None = None, bucket_bytes: BucketBytes | None = None) -> Filled:
        """Return the tasks of the step. `programs`: as in `issued`."""
        return filled(self.issued(programs), self.parts, self.cluster, bucket_bytes=bucket_bytes)

    @functools.cached_property
    def _three(self) -> Issued:
        return self._listed(3)

    @functools.cached_property
    def _mesh(self) -> Mesh:
        return on_cluster(self.parts.plan.mesh, self.cluster)

    @functools.cached_property
    def _pieces(self) -> MicroBatches | None:
        return first_micro_batch(self.parts, self._rank) if self.parts.micro_batches > 1 else None

    @property
    def _rank(self) -> int:
        return self._mesh.rank(origin(self._mesh))

    @functools.cached_property
    def _local(self) -> Graph:
        return first_local(self.parts)

    @functools.cached_property
    def _prices(self) -> dict[str, NodePrice]:
        return node_prices(self.parts, self._local, self._mesh, self.cluster)

    @functools.cached_property
    def _updates(self) -> dict[str, float]:
        prices = parameter_prices(self.parts, self._mesh, self.cluster, self.optimizer_states)
        return {name: update for name, (_, update) in prices.items()}

    def _listed(self, programs: int) -> Issued:
        parts, pieces = self.parts, self._pieces
        check_one_stage(parts.plan, "the timeline")
        turns = first_program(parts, self._rank) if parts.copies > 1 else None
        step = StepTasks(parts, self._local, self._mesh, self.cluster, turns, self._prices)
        gradients, sections = pending_gradients(parts), []
        for found in pieces.rounds if pieces is not None else ():
            step.once(found.sums)
        sections.append(len(step.items))
        held = summed_first(parts)
        for left in reversed(range(programs)):
            step.begin()
            step.forward()
            sections.append(len(step.items))
            step.backward([g.name for g in gradients], held if left else ())
            sections.append(len(step.items))
        if pieces is not None:
            step.once(pieces.late)
        sections.append(len(step.items))
        weights = gathered_last(parts, self.cluster.device_type)
        return Issued(tuple(step.items), tuple(sections), gradients, weights, self._updates)


def filled(
    step: Issued, parts: Partition, cluster: Cluster, *, bucket_bytes: BucketBytes | None = None
) -> Filled:
    """Return the tasks of a step with the buckets of a program."""
    size = gradient_bytes(parts.plan, step.gradients) if bucket_bytes is None else bucket_bytes
    groups = fill(step.gradients, cluster.device_type, size)
    scattered = [g for g in groups if g.parted and scattered_each_time(parts)]
    ends = sum(isinstance(item, Arrival) and item.ends for item in step.items)
    done = BucketTasks(on_cluster(parts.plan.mesh, cluster), cluster)
    done.fill(step.items, (*[Pass(scattered, bool(scattered))] * (ends - 1), Pass(groups)))
    done.update(math.fsum(step.updates.values()), len(step.updates))
    done.gather(fill(step.weights, cluster.device_type, gathered_bytes(parts.plan, bucket_bytes)))
    done.end()
    return Filled(tuple(done.tasks), tuple(done.ends))


__all__ = ["Filled", "Lister", "filled", "simulate", "step_tasks"]
