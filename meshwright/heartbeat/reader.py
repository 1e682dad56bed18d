"""Reading the records of ranks: what the launcher sees when nothing moves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.heartbeat.record import (
    BEGUN,
    BESIDE,
    DOING,
    FOR_SAVE,
    GROUPS,
    KEPT,
    LATEST,
    NONE,
    NOW,
    NUMBER,
    NUMBERS,
    SIZE,
    WAIT,
    WAITING,
)


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of a collective, and their axes of the mesh as a person writes them."""

    ranks: tuple[int, ...]
    axes: str = ""


@dataclass(frozen=True, slots=True)
class Waits:
    """The collective that a rank waits for: the `number`-th of a group. `of`: what it sends."""

    kind: str
    group: Group
    number: int
    of: str = ""


@dataclass(frozen=True)
class Seen:
    """The record of a rank, as the launcher finds it. `since`: of `time.monotonic`. `begun`: by group, how many
    collectives. `latest`: (group, number) → kind and what of, of the latest ones, in their order."""

    doing: str = ""
    patient: bool = False
    step: int = NONE
    numbers: tuple[int, ...] = ()
    since: float = 0.0
    waits: Waits | None = None
    begun: Mapping[Group, int] = field(default_factory=dict)
    latest: dict[tuple[Group, int], tuple[str, str]] = field(default_factory=dict)


def computes(data: bytes) -> bool:
    """True if a rank with this record computes and may go long without a heartbeat."""
    if len(data) < SIZE:
        return False
    _, _, patient, *_ = DOING.unpack_from(data, NOW)
    return bool(patient) and WAITING.unpack_from(data, WAIT)[1] < 0


def long_wait(data: bytes, now: float) -> float:
    """For how many seconds a rank with this record has waited for one and the same collective; 0 if it does not."""
    if len(data) < SIZE:
        return 0.0
    waits = [WAITING.unpack_from(data, at) for at in (WAIT, BESIDE)]
    return max((now - since for since, kind, _, number, _ in waits if kind >= 0 and number > 0), default=0.0)


def read(path: Path) -> Seen | None:
    """The record of a rank; None where it has none."""
    try:
        data = path.with_suffix(".pulse").read_bytes()
        names = [json.loads(line) for line in path.with_suffix(".names").read_text("utf-8").splitlines()]
    except (OSError, ValueError):
        return None
    if len(data) < SIZE:
        return None
    told = [n for n in names if isinstance(n, list)]
    groups = {number: Group(tuple(ranks), axes) for _, number, ranks, axes in told}

    def waited(at: int) -> Waits | None:
        _, kind, group, number, of = WAITING.unpack_from(data, at)
        return Waits(names[kind], groups[group], number, names[of]) if number > 0 and kind >= 0 else None

    since, what, patient, step, one, two = DOING.unpack_from(data, NOW)
    counted = {g: NUMBER.unpack_from(data, NUMBERS + 8 * n)[0] for n, g in groups.items() if n < GROUPS}
    counts = {
        group: count for group, count in counted.items() if count
    }  # else it is of ranks that were before
    ring = sorted(BEGUN.unpack_from(data, LATEST + BEGUN.size * place) for place in range(KEPT))
    latest = {(groups[g], n): (names[kind], names[of]) for serial, g, n, kind, of in ring if serial}
    beside = waited(BESIDE) if what < len(names) and names[what] == FOR_SAVE else None
    return Seen(
        names[what], bool(patient), step, tuple(n for n in (one, two) if n >= 0), since,
        waited(WAIT) or beside, counts, latest,
    )  # fmt: skip


__all__ = ["Group", "Seen", "Waits", "computes", "long_wait", "read"]
