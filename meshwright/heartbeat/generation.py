"""Which ranks of a job take part, where it goes on without those that failed: written by the launcher, read by ranks.

A *generation* begins when a rank has ended or one that was started again is ready. The launcher knows best who lives:
the kernel tells it. So it counts generations and names their ranks in one small file, which is replaced at once;
ranks look at it at the border of a step, and when a collective fails. Without the file a job ends with its first rank.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

FILE = "generation"  # beside the store of the job
READY = ".ready"  # `rank1.ready`, beside it: a rank that was started again can join
GOES_ON = ".goes-on"  # so, too: a rank that can go on without another one
JOINED = ".joined"  # so, too: it has joined, and has the state of the others
RESTARTS = ".restarts"  # so, too: one that cannot, and why


@dataclass(frozen=True, slots=True)
class Generation:
    """`ranks`: as they were launched; the place of each is its number in the group. `ended`: those that have come to
    the end of their scripts."""

    number: int
    ranks: tuple[int, ...]
    ended: tuple[int, ...] = ()


def read(folder: Path) -> Generation | None:
    """The generation now; None where the job ends with its first rank."""
    try:
        found = json.loads((folder / FILE).read_text("utf-8"))
    except FileNotFoundError:
        return None
    return Generation(int(found["number"]), tuple(map(int, found["ranks"])), tuple(map(int, found["ended"])))


def write(folder: Path, now: Generation) -> None:
    """Begin a generation."""
    beside = folder / f"{FILE}.new"
    beside.write_text(json.dumps({"number": now.number, "ranks": now.ranks, "ended": now.ended}), "utf-8")
    beside.replace(folder / FILE)


def say(folder: Path, rank: int, word: str, text: str = "") -> None:
    """Leave a word of a rank for the launcher: READY, JOINED, GOES_ON, or RESTARTS with the reason."""
    with contextlib.suppress(OSError):
        (folder / f"rank{rank}{word}").write_text(text, "utf-8")


__all__ = ["FILE", "GOES_ON", "JOINED", "READY", "RESTARTS", "Generation", "read", "say", "write"]
