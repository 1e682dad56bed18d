"""What a step of a pipeline takes, before it runs: the schedule played with the seconds of its stages, and the most
bytes on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwright.cost.cluster import Cluster
from meshwright.partition import Partition
from meshwright.partition.interleave import Interleaved
from meshwright.partition.micro_batches import first_micro_batch, first_program
from meshwright.partition.peaks import optimizer_on
from meshwright.partition.stage_memory import StageMemory, stage_memory
from meshwright.partition.stage_seconds import (
    StageSeconds,
    prologue_seconds,
    stage_seconds,
    update_seconds_of,
)
from meshwright.partition.stages import Stage
from meshwright.pipeline.actions import BACKWARD, FORWARD
from meshwright.pipeline.check import Played
from meshwright.pipeline.claimed import play_stages
from meshwright.pipeline.held import holders
from meshwright.pipeline.levels import link_between, taken_of
from meshwright.pipeline.meshes import meshes_of
from meshwright.pipeline.messages import Message, Messages
from meshwright.pipeline.order import schedule_of
from meshwright.redistribute.steps import origin


@dataclass(frozen=True)
class Predicted:
    """A step of a pipeline on the ranks that hold the largest blocks. `stages`: seconds of each. `received`: bytes that
    each stage takes from earlier ones for a micro-batch, in so many seconds of `messages`. `updates`: seconds of each
    place's update. `prologue`: those of the sums before the first forward. `peaks`: the most bytes on a rank of each
    place in the pipeline."""

    played: Played
    stages: tuple[StageSeconds, ...]
    received: tuple[int, ...]
    messages: tuple[float, ...]
    updates: tuple[float, ...]
    prologue: float
    peaks: tuple[int, ...]

    @property
    def step_seconds(self) -> float:
        """The end of the last rank's update."""
        return self.prologue + self.played.end

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they wait for one another."""
        return self.played.bubble


def predict(parts: Partition, cluster: Cluster, optimizer_states: int = 2) -> Predicted:
    """Play the schedule of a plan with stages. `optimizer_states`: moments per parameter."""
    schedule, meshes = schedule_of(parts.asked), meshes_of(parts.asked)
    mesh = parts.plan.mesh
    rank = mesh.rank(origin(mesh))
    programs = first_micro_batch(parts, rank)
    one, (cut, turns) = parts.stages(programs.programs[0]), stages_in_copies(parts, rank)
    times = tuple(
        stage_seconds(parts, cluster, stage.segment.graph, taken)
        for stage, taken in zip(one, turns, strict=True)
    )
    received = tuple(map(_received, cut))
    held = holders(parts, schedule)
    mine = [frozenset(n for n, places in held.items() if p in places) for p in range(meshes.places)]
    updates = [update_seconds_of(parts, cluster, optimizer_states, names) for names in mine]
    link = link_between(cluster, taken_of(cluster, meshes))
    messages = [link.latency_seconds + size / link.bytes_per_s for size in received]
    return Predicted(
        play_stages(schedule, times, messages, updates),
        times,
        received,
        tuple(messages),
        tuple(updates),
        prologue_seconds(parts, cluster, programs.rounds),
        _peaks(parts, cluster, optimizer_states, cut),
    )


def peaks_of(parts: Partition, cluster: Cluster, optimizer_states: int = 2) -> tuple[int, ...]:
    """The most bytes on a rank of each place in the pipeline, as `Predicted` has them."""
    mesh = parts.plan.mesh
    return _peaks(parts, cluster, optimizer_states, stages_in_copies(parts, mesh.rank(origin(mesh)))[0])


def stages_in_copies(parts: Partition, rank: int) -> tuple[tuple[Stage, ...], list[Interleaved | None]]:
    """The stages of the first micro-batch as they run; and where its copies take turns, the program of each."""
    if parts.copies == 1:
        cut = parts.stages(first_micro_batch(parts, rank).programs[0])
        return cut, [None] * len(cut)
    together = first_program(parts, rank)
    cut = parts.stages(together.graph, together.copy_of)
    return cut, [Interleaved(stage.segment.graph, together.copy_of) for stage in cut]


def _peaks(
    parts: Partition, cluster: Cluster, optimizer_states: int, cut: Sequence[Stage]
) -> tuple[int, ...]:
    mesh, device = parts.plan.mesh, cluster.device_type
    rank, optimizer = mesh.rank(origin(mesh)), optimizer_on(device, optimizer_states)
    schedule = schedule_of(parts.asked)
    halves = [schedule.splits_backward(place) for place in schedule.ranks]
    memory = [
        stage_memory(parts, rank, stage.segment.graph, optimizer, device, apart)
        for stage, apart in zip(cut, halves, strict=True)
    ]
    messages = Messages(cut, schedule)
    return tuple(peak_of(messages, place, memory) for place in range(meshes_of(parts.asked).places))


def claims_of(parts: Partition, cluster: Cluster, optimizer_states: int) -> dict[str, Any]:
    """What a plan with stages says of itself."""
    found = predict(parts, cluster, optimizer_states)
    place = max(range(len(found.peaks)), key=found.peaks.__getitem__)
    return {
        "cluster": cluster.name,
        "step_seconds": found.step_seconds,
        "bubble": found.bubble,
        "peak_bytes": found.peaks[place],
        "peak_where": f"rank {place} of the pipeline",
        "space": "strategies and stages as given",
        "prologue_seconds": found.prologue,
        "stages": [{**asdict(t), "message": m} for t, m in zip(found.stages, found.messages, strict=True)],
        "updates": list(found.updates),
    }


def _received(stage: Stage) -> int:
    return sum(stage.segment.graph.types[value].size_bytes for value in stage.takes)


def peak_of(messages: Messages, place: int, memory: Sequence[StageMemory]) -> int:
    """The most bytes on a rank, along its list. What it received a little early, and what it sent and nobody has told
    it of yet, is there too."""
    mine = [memory[s] for s in messages.schedule.held_by(place)]
    types = [stage.segment.graph.types for stage in messages.cut]
    known = messages.acknowledged(place)
    fixed = sum(m.fixed for m in mine) - (len(mine) - 1) * mine[0].batch
    gradients = sum(m.gradients for m in mine)
    live = early = there = 0
    sending: dict[Message, int] = {}
    most = fixed
    for action in messages.listed(place):
        one = memory[action.stage]
        kind = {"receive_value": FORWARD, "receive_gradient": BACKWARD}.get(action.kind, action.kind)
        arriving = sum(
            types[action.stage][m.value].size_bytes for m in messages.needed(replace(action, kind=kind))
        )
        if kind != action.kind:
            early += arriving
            continue
        early -= arriving
        beside = fixed + live + early + sum(sending.values())
        match action.kind:
            case "forward":
                most = max(most, beside + there + one.forward)
                live += one.kept
            case "backward" | "backward_input":
                there = gradients
                both = action.kind == "backward"
                at_once = max(one.backward, one.weights) if both else one.backward
                most = max(most, beside + there - one.kept + at_once)
                live -= one.kept - (0 if both else one.later)
            case "backward_weight":
                most = max(most, beside + there - one.later + one.weights)
                live -= one.later
        for message in known.get(action, ()):
            sending.pop(message, None)
        sending |= {m: types[action.stage][m.value].size_bytes for m in messages.sent(action) if m.back}
    return max(most, fixed + there + sum(sending.values()) + max(m.update for m in mine))


__all__ = ["Predicted", "claims_of", "peaks_of", "predict"]
