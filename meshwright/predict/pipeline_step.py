"""Predict a step of a pipeline: its schedule, simulated with the seconds of its stages, and its peak bytes by rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.core.remembered import cached_on_first
from meshwright.cost.cluster import Cluster, Level
from meshwright.partition import Partition
from meshwright.partition.interleave import Interleaved
from meshwright.partition.micro_batches import MicroBatches, first_micro_batch, first_program
from meshwright.partition.stages import Stage
from meshwright.pipeline.actions import BACKWARD, FORWARD, Action
from meshwright.pipeline.levels import link_of
from meshwright.pipeline.meshes import meshes_of
from meshwright.pipeline.messages import Messages
from meshwright.pipeline.messages_across_meshes import Routes
from meshwright.pipeline.of_plan import holders, schedule_of
from meshwright.pipeline.play import Played
from meshwright.predict.pipeline_claims import play_stages
from meshwright.predict.pipeline_memory import bytes_of
from meshwright.predict.stage_time import StageSeconds, prologue_seconds, stage_seconds, update_seconds_of
from meshwright.redistribute.steps import origin


@dataclass(frozen=True)
class Predicted:
    """A step of a pipeline on the ranks with the largest shards.

    /- `stages`: the seconds of each stage.

    - `received`: the bytes that each stage reads from earlier ones per micro-batch, and `messages` their seconds.
    - `updates`: the seconds of each place's update.
    - `prologue`: the seconds of the reductions before the first forward.
    - `peaks`: the peak bytes on a rank of each place; `hosted`: those in host memory, 0 if it is the device's.
    """

    played: Played
    stages: tuple[StageSeconds, ...]
    received: tuple[int, ...]
    messages: tuple[float, ...]
    updates: tuple[float, ...]
    prologue: float
    peaks: tuple[int, ...]
    hosted: tuple[int, ...]

    @property
    def step_seconds(self) -> float:
        """The end of the last rank's update."""
        return self.prologue + self.played.end

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they wait for each other."""
        return self.played.bubble


def predict(parts: Partition, cluster: Cluster, optimizer_states: int = 2) -> Predicted:
    """Simulate the schedule of a plan with stages. `optimizer_states`: moments per parameter."""
    schedule, meshes = schedule_of(parts.requested), meshes_of(parts.requested)
    cuts = parts.for_places(meshes.places, _cut_at)
    told = Messages(cuts[0].together, schedule)
    routes = Routes(parts, schedule.ranks, cuts[0].copy_of)
    posts = posting_seconds(told, cluster, routes)
    times = tuple(
        stage_seconds(
            parts.of_place(place),
            cluster,
            cuts[place].one[s].segment.graph,
            cuts[place].turns[s],
            schedule.splits_backward(place),
        ).with_posts(*posts[s])
        for s, place in enumerate(schedule.ranks)
    )
    held = holders(parts, schedule)
    mine = [frozenset(n for n, places in held.items() if p in places) for p in meshes.every_place]
    updates = [
        update_seconds_of(parts.of_place(place), cluster, optimizer_states, names)
        for place, names in zip(meshes.every_place, mine, strict=True)
    ]
    received = tuple(_received(cuts[place].together[s]) for s, place in enumerate(schedule.ranks))
    link = link_of(cluster, meshes)
    messages = [_arrival_seconds(told, routes, cluster, link, s, size) for s, size in enumerate(received)]
    return Predicted(
        play_stages(schedule, times, messages, updates),
        times,
        received,
        tuple(messages),
        tuple(updates),
        max(
            prologue_seconds(parts.of_place(place), cluster, cut.programs.rounds)
            for place, cut in zip(meshes.every_place, cuts, strict=True)
        ),
        *_bytes(parts, cluster.device_type, optimizer_states, None),
    )


def _arrival_seconds(
    messages: Messages, routes: Routes, cluster: Cluster, link: Level, stage: int, received: int
) -> float:
    """Return the seconds from sending a stage's values of a micro-batch to their arrival.

    `received`: their bytes on a rank. If places have separate meshes, several ranks may read the same values of one
    rank, or pass received ones on to each other.
    """
    needed = messages.needed(Action(FORWARD, stage, 0))
    crossing = sum(map(routes.crossing_bytes, needed)) if routes.every.own else received
    return cluster.message_seconds(link, crossing) + sum(map(routes.passing_seconds, needed))


def posting_seconds(messages: Messages, cluster: Cluster, routes: Routes) -> list[tuple[float, float]]:
    """Return the seconds of the first rank of a place to start a micro-batch's messages, by stage, forward and
    backward.

    The stream of a GPU does not wait for its host to do so.
    """
    each = 0.0 if cluster.device_type == "cuda" else cluster.measured.post_seconds
    found: list[tuple[float, float]] = []
    for stage in range(messages.schedule.stages):
        forward, backward = (Action(kind, stage, 0) for kind in (FORWARD, BACKWARD))
        counts = (
            sum(routes.receives(m, 0) for m in messages.needed(a))
            + sum(routes.sends(m, 0) for m in messages.sent(a))
            for a in (forward, backward)
        )
        there, back = (each * count for count in counts)
        found.append((there, back))
    return found


@dataclass(frozen=True)
class _Cut:
    """The program of a place's first micro-batch, split into stages: of `one` half-batch, and of all `together`."""

    programs: MicroBatches
    one: tuple[Stage, ...]
    together: tuple[Stage, ...]
    turns: list[Interleaved | None]

    @property
    def copy_of(self) -> Mapping[str, int]:
        """The half-batch of each value."""
        return self.turns[0].copy_of if self.turns[0] is not None else {}


def _cut_at(parts: Partition) -> _Cut:
    mesh = parts.plan.mesh
    rank = mesh.rank(origin(mesh))
    programs, (together, turns) = first_micro_batch(parts, rank), stages_in_copies(parts, rank)
    one = together if parts.copies == 1 else parts.stages(programs.programs[0])
    return _Cut(programs, one, together, turns)


def peaks_of(
    parts: Partition, cluster: Cluster, optimizer_states: int = 2, *, staged: bool | None = None
) -> tuple[int, ...]:
    """Return the peak bytes on a rank of each place in the pipeline, as in `Predicted`.

    `staged`: whether a reduce-scatter receives everything before it reduces (by default on a CPU).
    """
    return _bytes(parts, cluster.device_type, optimizer_states, staged)[0]


@cached_on_first
def _bytes(
    parts: Partition, device: str, optimizer_states: int, staged: bool | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    cuts = parts.for_places(
        meshes_of(parts.requested).places,
        lambda one: stages_in_copies(one, one.plan.mesh.rank(origin(one.plan.mesh)))[0],
    )
    return bytes_of(parts, device, optimizer_states, cuts, staged)


@cached_on_first
def stages_in_copies(parts: Partition, rank: int) -> tuple[tuple[Stage, ...], list[Interleaved | None]]:
    """Return the stages of the first micro-batch as they run, with their interleaved programs, if any."""
    if parts.copies == 1:
        cut = parts.stages(first_micro_batch(parts, rank).programs[0])
        return cut, [None] * len(cut)
    together = first_program(parts, rank)
    cut = parts.stages(together.graph, together.copy_of)
    return cut, [Interleaved(stage.segment.graph, together.copy_of) for stage in cut]


def claims_of(parts: Partition, cluster: Cluster, optimizer_states: int) -> dict[str, Any]:
    """Return the claims of a plan with stages."""
    found = predict(parts, cluster, optimizer_states)
    place = max(range(len(found.peaks)), key=found.peaks.__getitem__)
    return {
        "cluster": cluster.name,
        "step_seconds": found.step_seconds,
        "bubble": found.bubble,
        "peak_bytes": found.peaks[place],
        "peak_where": f"rank {place} of the pipeline",
        **({"host_bytes": max(found.hosted)} if any(found.hosted) else {}),
        "space": "strategies and stages as given",
        "prologue_seconds": found.prologue,
        "stages": [{**asdict(t), "message": m} for t, m in zip(found.stages, found.messages, strict=True)],
        "updates": list(found.updates),
    }


def _received(stage: Stage) -> int:
    return sum(stage.segment.graph.types[value].size_bytes for value in stage.takes)


__all__ = ["Predicted", "claims_of", "peaks_of", "predict"]
