"""The peak bytes on each rank of a pipeline, along its list of actions.

They are the permanent bytes of its stages, activations of micro-batches under way, gradients so far, and messages that
came early or are not read yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from meshwright.core.rank_numbers import PipelineRank
from meshwright.partition import Partition
from meshwright.partition.accumulation import scattered_each_time
from meshwright.partition.stages import Stage
from meshwright.pipeline.actions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, Schedule
from meshwright.pipeline.messages import Message, Messages
from meshwright.pipeline.of_plan import schedule_of
from meshwright.predict.memory.allocator import optimizer_on
from meshwright.predict.memory.stage import Backward, StageMemory, stage_memory
from meshwright.predict.memory.updates import ALONE, Beside
from meshwright.redistribute.steps import origin

ENDS = (BACKWARD, BACKWARD_WEIGHT)  # what a micro-batch's backward in a stage ends with


def bytes_of(
    parts: Partition,
    device: str,
    optimizer_states: int,
    cuts: Sequence[Sequence[Stage]],
    staged: bool | None = None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the peak bytes of each place, on the device and on the host.

    `cuts`: the stages of its program, of which it runs its own.
    """
    optimizer, schedule = optimizer_on(device, optimizer_states), schedule_of(parts.requested)
    memory: list[StageMemory] = []
    for s, place in enumerate(schedule.ranks):
        there, apart = parts.of_place(place), schedule.splits_backward(place)
        rank = there.plan.mesh.rank(origin(there.plan.mesh))
        others = _beside(there, schedule, cuts[place], s)
        graph = cuts[place][s].segment.graph
        memory.append(stage_memory(there, rank, graph, optimizer, device, apart, others, staged))
    places = tuple(map(PipelineRank, range(len(cuts))))
    peaks = tuple(peak_of(Messages(cuts[place], schedule), place, memory) for place in places)
    return peaks, tuple(hosted_of(schedule, place, memory) for place in places)


def _beside(parts: Partition, schedule: Schedule, cut: Sequence[Stage], stage: int) -> Beside:
    """Return the other stages of the rank of a stage."""
    place = schedule.ranks[stage]
    first: dict[int, int] = {}
    # number of the action that ends the backward of a stage, of its first and last micro-batch
    last: dict[int, int] = {}
    for number, action in enumerate(schedule.actions[place]):
        if action.kind in ENDS:
            first.setdefault(action.stage, number)
            last[action.stage] = number
    others = [s for s in schedule.held_by(place) if s != stage]
    if not others:
        return ALONE
    trained = {s: _named(cut[s], trained=True) for s in (stage, *others)}
    every = frozenset[str]().union(*trained.values())
    later = [s for s in others if last.get(s, 0) > last.get(stage, 0)]
    counted = _named(cut[stage]) & frozenset[str]().union(*(_named(cut[s]) for s in later))
    given = frozenset(v for v, maker in cut[stage].takes.items() if maker in others)
    if scattered_each_time(parts):
        starts = any(first.get(s, 0) < first.get(stage, 0) for s in others)
        return Beside(every, starts=starts, counted=counted, given=given)
    after = frozenset[str]().union(*(trained[s] for s in later))
    return Beside(every, every - after - trained[stage], after, counted=counted, given=given)


def _named(stage: Stage, trained: bool = False) -> frozenset[str]:
    """Return the parameters, buffers and constants that a stage reads, or those that it trains."""
    inputs = stage.segment.graph.inputs
    if trained:
        return frozenset(i.name for i in inputs if i.role == "parameter" and i.needs_grad)
    return frozenset(i.name for i in inputs if i.role not in ("batch", "boundary"))


def peak_of(messages: Messages, place: PipelineRank, memory: Sequence[StageMemory]) -> int:
    """Return the peak bytes on a rank, along its list.

    They include messages that arrived early, and sent ones without an acknowledgement.
    """
    mine = [memory[s] for s in messages.schedule.held_by(place)]
    types = [stage.segment.graph.types for stage in messages.cut]
    known = messages.acknowledged(place)
    fixed = sum(m.fixed for m in mine) - (len(mine) - 1) * mine[0].batch
    turns = _Turns(messages, place, memory)
    live = early = 0
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
        turns.begin(action)
        beside = fixed + live + early + sum(sending.values()) + sum(turns.gradients.values())
        match action.kind:
            case "forward":
                most = max(most, beside + one.forward)
                live += one.kept
            case "backward" | "backward_input":
                both = action.kind == BACKWARD
                now = turns.take(action)
                at_once = max(now.most, now.weights) if both else now.most
                most = max(most, beside - one.kept + at_once)
                live -= one.kept - (0 if both else one.later + now.held)
            case "backward_weight":
                now = turns.take(action)
                most = max(most, beside - one.later - now.held + now.weights)
                live -= one.later + now.held
        for message in known.get(action, ()):
            sending.pop(message, None)
        sending |= {m: types[action.stage][m.value].size_bytes for m in messages.sent(action) if m.back}
    return max(
        most,
        fixed + sum(turns.gradients.values()) + sum(sending.values()) + max(m.update for m in mine),
    )


def hosted_of(schedule: Schedule, place: PipelineRank, memory: Sequence[StageMemory]) -> int:
    """Return the peak bytes of a rank in host memory."""
    live = most = sum(memory[s].host_fixed for s in schedule.held_by(place))
    for action in schedule.actions[place]:
        if action.kind == FORWARD:
            live += memory[action.stage].host_kept
            most = max(most, live)
        elif action.kind in (BACKWARD, BACKWARD_INPUT):
            live -= memory[action.stage].host_kept
    return most


class _Turns:
    """Which backward of its stage an action belongs to: the first, a middle one, or the last.

    `gradients` are the bytes that stay, by stage; with delayed weight gradients, all from the first half on.
    """

    def __init__(self, messages: Messages, place: PipelineRank, memory: Sequence[StageMemory]) -> None:
        self.memory = memory
        self.gradients: dict[int, int] = {}
        ends = (a for a in messages.listed(place) if a.kind in (BACKWARD, BACKWARD_INPUT))
        self.count = Counter(action.stage for action in ends)
        self.done: Counter[tuple[str, int]] = Counter()

    def begin(self, action: Action) -> None:
        """Begin an action."""
        if action.kind == BACKWARD_INPUT and self.count[action.stage] > 1:
            self.gradients.setdefault(action.stage, self.memory[action.stage].middle.gradients)

    def take(self, action: Action) -> Backward:
        """Return the memory of an action's backward beside earlier gradients; its own gradients count from now on."""
        stage, one = action.stage, self.memory[action.stage]
        for half in (BACKWARD_INPUT, BACKWARD_WEIGHT) if action.kind == BACKWARD else (action.kind,):
            self.done[half, stage] += 1
        half = BACKWARD_INPUT if action.kind == BACKWARD_INPUT else BACKWARD_WEIGHT
        is_last = self.done[half, stage] == self.count[stage]
        now = one.last if is_last else one.middle if stage in self.gradients else one.first
        if action.kind != BACKWARD_INPUT:
            self.gradients[stage] = now.gradients
        return now


__all__ = ["bytes_of"]
