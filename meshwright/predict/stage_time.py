"""The seconds of one pipeline stage for a micro-batch, and at the end of a step, on the rank at the origin."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from meshwright.core.graph import Graph
from meshwright.core.remembered import cached_on_first
from meshwright.cost.cluster import Cluster
from meshwright.cost.machine import QUEUED, launch_seconds
from meshwright.partition import Partition
from meshwright.partition.accumulation import scattered_each_time, summed_first
from meshwright.partition.bucket_sizes import gradient_bytes
from meshwright.partition.buckets import Group, fill
from meshwright.partition.gradients import pending_gradients
from meshwright.partition.interleave import Interleaved
from meshwright.partition.micro_batches import Round
from meshwright.partition.sharded_update import gathers
from meshwright.partition.split_backward import splittable
from meshwright.predict.bucket_tasks import BucketTasks, Pass
from meshwright.predict.phase_tasks import StepTasks
from meshwright.predict.price import node_prices, on_cluster, parameter_prices
from meshwright.predict.timeline import COMPUTE, Timeline, play


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of one stage.

    /- `forward` and `backward` of one micro-batch, with gradient accumulation; `weights` is the share of backward that
    may be delayed.

    - `reduce`: how much longer the last backward takes, until its gradients are reduced; during `waited` of it nothing
      else can be computed.
    - `sums`: seconds in which a link is busy with gradients beside computation, and `slowed` how much longer that
      computation takes.
    """

    forward: float
    backward: float
    weights: float
    reduce: float
    waited: float = 0.0
    sums: float = 0.0
    slowed: float = 0.0

    def with_posts(self, forward: float, backward: float) -> StageSeconds:
        """Return the seconds with those of starting messages."""
        return replace(self, forward=self.forward + forward, backward=self.backward + backward)


def stage_seconds(
    parts: Partition,
    cluster: Cluster,
    graph: Graph,
    turns: Interleaved | None = None,
    halves: bool = False,
) -> StageSeconds:
    """Return the seconds of a stage with the program `graph`.

    `turns`: the interleaved program of all half-batches, if there are several. `halves`: whether weight gradients are
    delayed.
    """
    mesh = on_cluster(parts.plan.mesh, cluster)
    mine = frozenset(i.name for i in graph.inputs)
    groups = _groups(parts, cluster.device_type)
    scattered = [g for g in groups if g.parted and scattered_each_time(parts)]
    held, slowdown = summed_first(parts), cluster.measured.slowdown

    prices = node_prices(parts, graph, mesh, cluster, {parts.stands_for(n.name) for n in graph.nodes})

    def played(number: int) -> Timeline:
        """Simulate forward, backward, and the reductions of the last backward."""
        step, done = StepTasks(parts, graph, mesh, cluster, turns, prices), BucketTasks(mesh, cluster)
        now = _of((groups, scattered)[number == 1], mine)
        step.begin()
        step.forward()
        if number:
            step.backward([g.name for group in now for g in group.members], held if number == 1 else ())
        done.fill(step.items, [Pass(now, waits=number == 1 and bool(scattered))])
        if number == 2:
            done.update(0.0)
        return play(done.tasks, slowdown)

    there, back, last = (played(number) for number in range(3))
    busy: dict[str, float] = defaultdict(float)
    computed = 0.0
    for task, end in zip(last.tasks, last.ends, strict=True):
        if COMPUTE in task.streams and task.kind != "update":
            computed = max(computed, end)
        elif task.kind == "reduce":
            busy[task.streams[0]] += task.seconds
    sums = max(busy.values(), default=0.0) * max(1.0, slowdown.get("collective", 1.0))
    split = [prices[name].backward_seconds / 2 for name in splittable(graph) if name in prices]
    later, backward = math.fsum(split) * parts.copies, back.step_seconds - there.step_seconds
    added = math.fsum(price.adding_seconds for price in prices.values()) * parts.copies
    each = len(split) * parts.copies * launch_seconds(cluster.device, cluster.measured) if halves else 0.0
    forward, inputs, weights = (each * count for count in QUEUED)
    return StageSeconds(
        there.step_seconds + forward,
        backward + inputs + weights,
        min(later, backward - added) + added + weights,
        max(0.0, last.step_seconds - back.step_seconds),
        max(0.0, computed - back.step_seconds),
        sums,
        sums * (1 - 1 / max(1.0, slowdown.get("compute", 1.0))),
    )


@cached_on_first
def _groups(parts: Partition, device: str) -> tuple[Group, ...]:
    """Return the buckets of the gradients of all stages."""
    pending = pending_gradients(parts)
    return fill(pending, device, gradient_bytes(parts.plan, pending))


def update_seconds_of(
    parts: Partition, cluster: Cluster, optimizer_states: int, held: Collection[str]
) -> float:
    """Return the seconds of the optimizer on a rank's parameters, and of gathering those with sharded updates."""
    mesh = on_cluster(parts.plan.mesh, cluster)
    prices = parameter_prices(parts, mesh, cluster, optimizer_states)
    step = BucketTasks(mesh, cluster)
    step.update(math.fsum(update for name, (_, update) in prices.items() if name in held))
    step.gather(_of(gathers(parts, device=cluster.device_type), held))
    return play(step.tasks, cluster.measured.slowdown).step_seconds


def prologue_seconds(parts: Partition, cluster: Cluster, rounds: Iterable[Round]) -> float:
    """Return the seconds of the reductions before the first forward."""
    mesh = on_cluster(parts.plan.mesh, cluster)
    step = StepTasks(parts, _empty(parts), mesh, cluster, prices={})
    for found in rounds:
        step.once(found.sums)
    done = BucketTasks(mesh, cluster)
    done.fill(step.items, ())
    return play(done.tasks, cluster.measured.slowdown).step_seconds


def _empty(parts: Partition) -> Graph:
    return replace(parts.resharded.graph, nodes=(), outputs=(), mutations=())


def _of(groups: Iterable[Group], held: Collection[str]) -> list[Group]:
    mine = (replace(g, members=tuple(m for m in g.members if m.name in held)) for g in groups)
    return [group for group in mine if group.members]


__all__ = ["StageSeconds", "prologue_seconds", "stage_seconds", "update_seconds_of"]
