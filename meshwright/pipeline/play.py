"""Playing a schedule: whether it is complete and free of deadlock, how long it takes, what it keeps alive.

Every rank takes its actions strictly in order; an action waits until what it needs has been made, here or on another
rank, and has arrived.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from meshwright.errors import PlanError
from meshwright.pipeline.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE,
    FORWARD,
    KINDS,
    MESSAGES,
    Action,
    Schedule,
)

Seconds = Callable[[Action], float]
UNITS = {FORWARD: 1.0, BACKWARD: 2.0, BACKWARD_INPUT: 1.0, BACKWARD_WEIGHT: 1.0}


def units(action: Action) -> float:
    """Time in units of a forward, where both halves of backward take one each."""
    return UNITS.get(action.kind, 0.0)


@dataclass(frozen=True)
class Played:
    """How a schedule goes. `times`: rank → (action, begin, end). `peaks`: rank → the most pairs of stage and
    micro-batch whose activations it holds at once."""

    schedule: Schedule
    times: tuple[tuple[tuple[Action, float, float], ...], ...]
    peaks: tuple[int, ...]

    @property
    def end(self) -> float:
        """When the last rank is done."""
        return max((end for rank in self.times for _, _, end in rank), default=0.0)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they have nothing to do."""
        busy = sum(end - begin for rank in self.times for _, begin, end in rank)
        return 1.0 - busy / (self.end * len(self.times)) if self.end else 0.0


def play(schedule: Schedule, seconds: Seconds = units, message_seconds: float | Seconds = 0.0) -> Played:
    """Play a schedule. `message_seconds`: how long a value or gradient takes from one rank to another, the same for all
    or by the action that it is for. From a rank to another messages go one after the other.

    Raises PlanError that names the first action that is wrong, missing, or waits for ever.
    """
    check_complete(schedule)
    count = len(schedule.actions)
    place, now = [0] * count, [0.0] * count
    times: list[list[tuple[Action, float, float]]] = [[] for _ in range(count)]
    done: dict[tuple[str, int, int], float] = {}
    links: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while place[rank] < len(actions):
                action = actions[place[rank]]
                needs = [(done.get(key), at) for key, at in _needs(schedule, action)]
                if any(when is None for when, _ in needs):
                    break
                sent = message_seconds(action) if callable(message_seconds) else message_seconds
                arrived = [
                    w if at == rank else _arrival(links[at, rank], w, sent)
                    for w, at in needs
                    if w is not None
                ]
                begin = max([now[rank], *arrived])
                now[rank] = begin + seconds(action)
                times[rank].append((action, begin, now[rank]))
                if action.kind in COMPUTE:
                    done[_made(action)] = now[rank]
                place[rank] += 1
                moved = True
    stuck = [r for r in range(count) if place[r] < len(schedule.actions[r])]
    if stuck:
        raise _deadlock(schedule, stuck, place, done)
    return Played(schedule, tuple(map(tuple, times)), tuple(map(_peak, schedule.actions)))


def _arrival(link: list[tuple[float, float]], ready: float, seconds: float) -> float:
    """Return when a message arrives that is `ready` for a link, and note it among the times in which that is busy."""
    if seconds <= 0.0:
        return ready
    place = max(0, bisect_right(link, (ready, math.inf)) - 1)
    while place < len(link) and link[place][0] < ready + seconds:
        ready = max(ready, link[place][1])
        place += 1
    link.insert(place, (ready, ready + seconds))
    return ready + seconds


def check_complete(schedule: Schedule) -> None:
    """Raise PlanError unless every stage takes every micro-batch forward once, and backward (or each half) once."""
    found: Counter[tuple[str, int, int]] = Counter()
    for rank, actions in enumerate(schedule.actions):
        for number, action in enumerate(actions):
            where = f"rank {rank}, action {number}"
            if action.kind not in KINDS:
                raise PlanError(
                    f"there is no action {action.kind!r}", where=where, why="actions: " + ", ".join(KINDS)
                )
            if action.kind not in (*COMPUTE, *MESSAGES):
                continue
            if not (0 <= action.stage < schedule.stages and 0 <= action.micro_batch < schedule.micro_batches):
                raise PlanError(
                    f"{action} names a stage or micro-batch that this schedule does not have",
                    where=where,
                    why=f"it has {schedule.stages} stages and {schedule.micro_batches} micro-batches",
                )
            if schedule.ranks[action.stage] != rank:
                raise PlanError(
                    f"{action} is on rank {rank}",
                    where=where,
                    why=f"stage {action.stage} is held by rank {schedule.ranks[action.stage]}",
                )
            found[action.kind, action.stage, action.micro_batch] += 1
    for (kind, stage, micro_batch), times in found.items():
        if times > 1:
            raise PlanError(
                f"{Action(kind, stage, micro_batch)} is listed {times} times in {schedule.name}",
                why="a stage takes each micro-batch once",
                where=f"rank {schedule.ranks[stage]}",
            )
    for stage in range(schedule.stages):
        for m in range(schedule.micro_batches):
            missing = _missing(found, stage, m, schedule.has_backward)
            if missing:
                raise PlanError(
                    f"{schedule.name} lacks {', '.join(map(str, missing))}",
                    why=f"rank {schedule.ranks[stage]} holds stage {stage}, which takes each of "
                    f"{schedule.micro_batches} micro-batches",
                    hint=f"Action({missing[0].kind!r}, {stage}, {m}) in the list of rank {schedule.ranks[stage]}",
                )


def _missing(found: Counter[tuple[str, int, int]], stage: int, m: int, trains: bool) -> list[Action]:
    kinds = [] if found[FORWARD, stage, m] else [FORWARD]
    if trains and not found[BACKWARD, stage, m]:
        kinds += [kind for kind in (BACKWARD_INPUT, BACKWARD_WEIGHT) if not found[kind, stage, m]]
        kinds = (
            kinds
            if len(kinds) < 2 or kinds[-2:] != [BACKWARD_INPUT, BACKWARD_WEIGHT]
            else [*kinds[:-2], BACKWARD]
        )
    if found[BACKWARD, stage, m] and (found[BACKWARD_INPUT, stage, m] or found[BACKWARD_WEIGHT, stage, m]):
        raise PlanError(
            f"{Action(BACKWARD, stage, m)} is listed together with one of its halves",
            why="it contains both halves",
        )
    return [Action(kind, stage, m) for kind in kinds]


def _made(action: Action) -> tuple[str, int, int]:
    kind = BACKWARD_INPUT if action.kind == BACKWARD else action.kind
    return kind, action.stage, action.micro_batch


def _needs(schedule: Schedule, action: Action) -> list[tuple[tuple[str, int, int], int]]:
    """List the actions, with their ranks, that must end before an action can begin."""
    s, m, last = action.stage, action.micro_batch, schedule.stages - 1
    found: list[tuple[str, int]] = []
    match action.kind:
        case "forward" | "receive_value":
            found = [(FORWARD, s - 1)] if s else []
        case "backward" | "backward_input" | "receive_gradient":
            found = [(FORWARD, s), *([(BACKWARD_INPUT, s + 1)] if s < last else [])]
        case "backward_weight" | "send_gradient":
            found = [(BACKWARD_INPUT, s)]
        case "send_value":
            found = [(FORWARD, s)]
    return [((kind, stage, m), schedule.ranks[stage]) for kind, stage in found]


def _peak(actions: tuple[Action, ...]) -> int:
    held = most = 0
    for action in actions:
        held += {FORWARD: 1, BACKWARD: -1, BACKWARD_WEIGHT: -1}.get(action.kind, 0)
        most = max(most, held)
    return most


def _deadlock(
    schedule: Schedule, stuck: list[int], place: list[int], done: dict[tuple[str, int, int], float]
) -> PlanError:
    lines: list[str] = []
    for rank in stuck:
        action = schedule.actions[rank][place[rank]]
        kind, stage, m = next(key for key, _ in _needs(schedule, action) if key not in done)
        lines.append(
            f"rank {rank} waits at action {place[rank]}, {action}, for {Action(kind, stage, m)} "
            f"of rank {schedule.ranks[stage]}"
        )
    return PlanError(
        f"the schedule {schedule.name} deadlocks",
        why="; ".join(lines),
        hint="an order in which every value is made before the action that needs it",
    )
