"""Heartbeat records: the current action of a rank and the collectives it has begun, in a file that the launcher reads.

A rank that hangs cannot report it. So each rank that `meshwright run` starts keeps a record in a memory-mapped file:
what it does, what it waits for, the number of collectives of each group it has begun, and the last of them. An entry is
one `struct.pack_into`, about a microsecond; the launcher only reads it when no rank makes progress. Processes without a
launcher have no record, and the functions here return at once.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from meshwright.heartbeat.record import (
    BESIDE,
    ENDED,
    FOR_SAVE,
    IN_STEP,
    LOADING,
    MODEL,
    NONE,
    OWN_CODE,
    SAVING,
    SHUTDOWN,
    STATE,
    WAIT,
    Entry,
    Pulse,
    every_rank,
)

OWN = "MESHWRIGHT_PULSE"  # set by the launcher: the process it is for, and the file without its suffix
STORE = (
    "MESHWRIGHT_STORE"  # so, too: the process, and the file in which the ranks of a job on one machine meet
)
JOB = "job"  # beside that file: the name of the job
RAISED = ".raised"  # `rank1.raised`, beside that file: its script has raised, and its log says so
_mine: Pulse | None = None


def store() -> Path | None:
    """The file in which the ranks of this job meet; None where no launcher of ours has started this very process."""
    pid, _, path = os.environ.get(STORE, "").partition(":")
    return Path(path) if pid == str(os.getpid()) else None


def job() -> str:
    """The name of this process's job, the same on all its machines and in all its attempts; empty where no launcher of
    ours has started it."""
    path = store()
    with contextlib.suppress(OSError):
        return "" if path is None else path.with_name(JOB).read_text("utf-8")
    return ""


def begin() -> None:
    """Begin the record of this process, where a launcher has asked for it."""
    global _mine
    pid, _, path = os.environ.get(OWN, "").partition(":")
    if _mine is None and pid == str(os.getpid()):  # and not of a child that was started anew
        with contextlib.suppress(OSError):
            _mine = Pulse(Path(path))
            atexit.register(_ended, pid)


def _ended(pid: str) -> None:
    if pid == str(os.getpid()):  # and not of a child that was forked
        doing(ENDED)


def doing(what: str, one: int = NONE, two: int = NONE) -> None:
    """Say what this rank does from now on, maybe with numbers of it."""
    if _mine is not None:
        _mine.doing(what, False, one, two)


def all_call() -> str:
    """A hint if this rank is in a call that all ranks make; empty if not, or without a launcher."""
    return "" if _mine is None else every_rank(_mine.now[0])


def step(number: int) -> None:
    """Say in which step this rank is."""
    if _mine is not None:
        _mine.step = number


@contextlib.contextmanager
def during(what: str, patient: bool = False) -> Iterator[None]:
    """Say what this rank does within the block. `patient`: it may take long without a word, if only it computes."""
    if _mine is None:
        yield
        return
    before = _mine.now
    _mine.doing(what, patient)
    try:
        yield
    finally:
        _mine.doing(*before)


def alive() -> None:
    """Say that this rank goes on: in a long loop of the script's own, so that nobody takes it for one that hangs."""
    if _mine is not None:
        _mine.alive()


def regroup(launched: tuple[int, ...]) -> None:
    """Say that the ranks of the job are others from now on: those that were launched with these numbers."""
    if _mine is not None:
        _mine.regroup(launched)


def of(what: str) -> None:
    """Say what the next collective is of."""
    if _mine is not None:
        _mine.of = what


def begun(kind: str, ranks: tuple[int, ...], axes: str = "", of: str | None = None) -> Entry | None:
    """Say that a collective of some ranks begins. Returns what `waits` wants."""
    return None if _mine is None else _mine.begun(kind, ranks, axes, of)


def waits(entry: Entry | None, *, beside: bool = False) -> None:
    """Say that this rank waits for what has begun."""
    if _mine is not None and entry is not None:
        _mine.waits(entry, BESIDE if beside else WAIT)


def over(entry: Entry | None, *, beside: bool = False) -> None:
    """Say that it waits no more."""
    if _mine is not None and entry is not None:
        _mine.over(BESIDE if beside else WAIT)


def long_wait() -> float:
    """For how many seconds this rank has waited for one and the same collective; 0 if it does not."""
    return 0.0 if _mine is None else _mine.long_wait()


@contextlib.contextmanager
def waiting(entry: Entry | None, *, beside: bool = False) -> Iterator[None]:
    """Say that this rank waits within the block."""
    waits(entry, beside=beside)
    try:
        yield
    finally:
        over(entry, beside=beside)


__all__ = [
    "ENDED",
    "FOR_SAVE",
    "IN_STEP",
    "JOB",
    "LOADING",
    "MODEL",
    "OWN",
    "OWN_CODE",
    "RAISED",
    "SAVING",
    "SHUTDOWN",
    "STATE",
    "STORE",
    "Entry",
    "alive",
    "all_call",
    "begin",
    "begun",
    "doing",
    "during",
    "every_rank",
    "job",
    "of",
    "over",
    "regroup",
    "step",
    "store",
    "waiting",
    "waits",
]
