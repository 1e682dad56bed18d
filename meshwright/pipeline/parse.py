"""A printed schedule, read back: how a user's own goes into a plan file."""

from __future__ import annotations

import re

from meshwright.errors import PlanError
from meshwright.pipeline.actions import COMPUTE, KINDS, MESSAGES, Action, Schedule
from meshwright.techniques import Techniques

_HEAD = re.compile(r"(.*): (\d+) stages on (\d+) ranks, (\d+) micro-batches")
_RANK = re.compile(r"rank (\d+): (.*)")
_ACTION = re.compile(r"(\w+)(?:\((\d+), (\d+)\))?")


def is_own(techniques: Techniques) -> bool:
    """Whether the schedule that is asked for is a user's own, by its text."""
    return "\n" in techniques.schedule


def parse(text: str) -> Schedule:
    """The schedule that prints as `text`. Raises PlanError that names the line and the word that is wrong."""
    lines = [line.strip() for line in text.strip().splitlines()]
    head = _HEAD.fullmatch(lines[0])
    if head is None:
        raise PlanError(
            f"{lines[0]!r} is no schedule",
            why="its first line says how large it is",
            hint="1f1b: 2 stages on 2 ranks, 4 micro-batches",
        )
    name, stages, ranks, micro_batches = head[1], int(head[2]), int(head[3]), int(head[4])
    lists: list[tuple[Action, ...]] = []
    for number, line in enumerate(lines[1:]):
        found = _RANK.fullmatch(line)
        if found is None or int(found[1]) != number:
            raise PlanError(
                f"{line[:40]!r} is no list of rank {number}",
                why="one line for each rank, in order",
                where=name,
            )
        words = re.findall(r"[^,(]+(?:\([^)]*\))?", found[2])
        lists.append(tuple(_action(word.strip(), f"{name}, rank {number}") for word in words))
    held = {a.stage: rank for rank, actions in enumerate(lists) for a in actions if a.kind in COMPUTE}
    if len(lists) != ranks or sorted(held) != list(range(stages)):
        raise PlanError(
            f"the schedule {name} is not whole",
            why=f"it says {stages} stages on {ranks} ranks, and lists {len(held)} on {len(lists)}",
        )
    return Schedule(name, tuple(held[s] for s in range(stages)), micro_batches, tuple(lists))


def _action(word: str, where: str) -> Action:
    found = _ACTION.fullmatch(word)
    kinds = (*COMPUTE, *MESSAGES)
    if found is None or found[1] not in KINDS or (found[1] in kinds) != (found[2] is not None):
        raise PlanError(
            f"{word!r} is no action", where=where, why="actions: " + ", ".join(KINDS), hint="forward(0, 1)"
        )
    return Action(found[1], int(found[2] or 0), int(found[3] or 0))


__all__ = ["is_own", "parse"]
