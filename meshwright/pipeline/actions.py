"""A schedule is data: for each pipeline rank, the list of what it does, in order.

A *stage* is a stretch of the model; a rank may hold several (interleaved schedules call them chunks). Stages are
numbered along the model, so values go from stage s to s + 1 and gradients back.

A printed schedule, read back: how a user's own goes into a plan file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.core.rank_numbers import PipelineRank
from meshwright.core.techniques import Techniques
from meshwright.errors import PlanError

FORWARD, BACKWARD = "forward", "backward"
BACKWARD_INPUT, BACKWARD_WEIGHT = "backward_input", "backward_weight"
COMPUTE = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
MESSAGES = ("receive_value", "send_value", "receive_gradient", "send_gradient")
KINDS = (*COMPUTE, *MESSAGES, "reduce", "update")
SHORT = {FORWARD: "F", BACKWARD: "B", BACKWARD_INPUT: "I", BACKWARD_WEIGHT: "W"}


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does. ``backward`` is both halves at once: the gradient of what came in
    (``backward_input``) and of the weights (``backward_weight``)."""

    kind: str
    stage: int = 0
    micro_batch: int = 0

    def __str__(self) -> str:
        if self.kind not in (*COMPUTE, *MESSAGES):
            return self.kind
        return f"{self.kind}({self.stage}, {self.micro_batch})"

    @property
    def short(self) -> str:
        """``F3``: forward of micro-batch 3, for drawings; ``R`` and ``U`` at the end of a step."""
        return f"{SHORT[self.kind]}{self.micro_batch}" if self.kind in SHORT else self.kind[:1].upper()


@dataclass(frozen=True)
class Schedule:
    """`actions`: rank → its list. `ranks`: stage → the rank that holds it. A user may build one of their own; `play`
    says whether it can run."""

    name: str
    ranks: tuple[PipelineRank, ...]
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        """The number of stages of the model."""
        return len(self.ranks)

    @property
    def every_rank(self) -> tuple[PipelineRank, ...]:
        """The ranks of the pipeline, in order."""
        return tuple(map(PipelineRank, range(len(self.actions))))

    def held_by(self, rank: PipelineRank) -> tuple[int, ...]:
        """The stages of a rank."""
        return tuple(stage for stage, at in enumerate(self.ranks) if at == rank)

    @property
    def has_backward(self) -> bool:
        """True for training, False for a forward-only schedule."""
        return any(a.kind in (BACKWARD, BACKWARD_INPUT) for actions in self.actions for a in actions)

    def splits_backward(self, place: PipelineRank) -> bool:
        """True if a rank of the pipeline runs the two halves of backward apart."""
        return any(a.kind == BACKWARD_WEIGHT for a in self.actions[place])

    def __str__(self) -> str:
        head = f"{self.name}: {self.stages} stages on {len(self.actions)} ranks, {self.micro_batches} micro-batches"
        lists = (f"rank {rank}: {', '.join(map(str, actions))}" for rank, actions in enumerate(self.actions))
        return "\n".join([head, *lists])


def with_messages(schedule: Schedule) -> Schedule:
    """The schedule with what is sent and received between stages of different ranks: receives right before the action
    that needs them (the runtime posts them earlier), sends right after the one that made the value."""
    return Schedule(
        schedule.name,
        schedule.ranks,
        schedule.micro_batches,
        tuple(tuple(_with_messages(schedule, actions)) for actions in schedule.actions),
    )


def _with_messages(schedule: Schedule, actions: Iterable[Action]) -> Iterable[Action]:
    last = schedule.stages - 1
    for action in actions:
        s, m = action.stage, action.micro_batch
        before = s > 0 and schedule.ranks[s - 1] != schedule.ranks[s]
        after = s < last and schedule.ranks[s + 1] != schedule.ranks[s]
        match action.kind:
            case "forward":
                yield from (Action("receive_value", s, m) for _ in range(before))
                yield action
                yield from (Action("send_value", s, m) for _ in range(after))
            case "backward" | "backward_input":
                yield from (Action("receive_gradient", s, m) for _ in range(after))
                yield action
                yield from (Action("send_gradient", s, m) for _ in range(before))
            case _:
                yield action


_HEAD = re.compile(r"(.*): (\d+) stages on (\d+) ranks, (\d+) micro-batches")
_RANK = re.compile(r"rank (\d+): (.*)")
_ACTION = re.compile(r"(\w+)(?:\((\d+), (\d+)\))?")


def is_own(techniques: Techniques) -> bool:
    """True if the requested schedule is a user's own, given as text."""
    return "\n" in techniques.schedule


def parse(text: str) -> Schedule:
    """The schedule that prints as `text`. Raises PlanError that names the line and the word that is wrong."""
    lines = [line.strip() for line in text.strip().splitlines()]
    head = _HEAD.fullmatch(lines[0])
    if head is None:
        raise PlanError(
            f"{lines[0]!r} is not a schedule",
            why="its first line must give its size",
            hint="1f1b: 2 stages on 2 ranks, 4 micro-batches",
        )
    name, stages, ranks, micro_batches = head[1], int(head[2]), int(head[3]), int(head[4])
    lists: list[tuple[Action, ...]] = []
    for number, line in enumerate(lines[1:]):
        found = _RANK.fullmatch(line)
        if found is None or int(found[1]) != number:
            raise PlanError(
                f"{line[:40]!r} is not the list of rank {number}",
                why="one line for each rank, in order",
                where=name,
            )
        words = re.findall(r"[^,(]+(?:\([^)]*\))?", found[2])
        lists.append(tuple(_action(word.strip(), f"{name}, rank {number}") for word in words))
    held = {
        a.stage: PipelineRank(rank)
        for rank, actions in enumerate(lists)
        for a in actions
        if a.kind in COMPUTE
    }
    if len(lists) != ranks or sorted(held) != list(range(stages)):
        raise PlanError(
            f"the schedule {name} is incomplete",
            why=f"it says {stages} stages on {ranks} ranks, and lists {len(held)} on {len(lists)}",
        )
    return Schedule(name, tuple(held[s] for s in range(stages)), micro_batches, tuple(lists))


def _action(word: str, where: str) -> Action:
    found = _ACTION.fullmatch(word)
    kinds = (*COMPUTE, *MESSAGES)
    if found is None or found[1] not in KINDS or (found[1] in kinds) != (found[2] is not None):
        raise PlanError(
            f"{word!r} is not an action",
            where=where,
            why="actions: " + ", ".join(KINDS),
            hint="forward(0, 1)",
        )
    return Action(found[1], int(found[2] or 0), int(found[3] or 0))


__all__ = ["is_own", "parse"]
