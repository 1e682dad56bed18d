"""The record of a rank: a small file that is also its memory, written with `struct.pack_into`.

Texts and groups have numbers, which stand in a list beside it; `seen.py` reads both.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import signal
import struct
import time
from pathlib import Path

# Where the entries of a record begin: what is done, waited for, waited for by a thread (first come the process and its
# signs of life)
NOW, WAIT, BESIDE = 16, 64, 96
NUMBERS, LATEST = 128, 2048  # how many collectives of each group were begun, and the latest ones
GROUPS, KEPT = 240, 512
DOING = struct.Struct("<d5i")  # since, what, patient, step, first and second number
WAITING = struct.Struct("<d4i")  # since, kind, group, number, of what
BEGUN = struct.Struct("<5i")  # serial number, group, number in it, kind, of what
NUMBER = struct.Struct("<q")
SIZE = LATEST + BEGUN.size * KEPT
NONE = -1
OWN_CODE, IN_STEP = "the script's own code", "a step"
ENDED = "the end of its script"  # what a rank comes to last, with an error or without
SHUTDOWN = "mw.shutdown()"  # the barrier at the end of a script
FOR_SAVE = "waiting for its save"  # what a rank does while a thread of its own ends a checkpoint
SAVING, LOADING = "saving a checkpoint", "loading a checkpoint"
STATE, MODEL = "putting the state together", "putting the model together"
# What a rank does in a call that all ranks make → the call.
CALLS = {
    SAVING: "step.save(path)",
    LOADING: "step.load(path)",
    STATE: "step.full_state()",
    MODEL: "step.full()",
}

Entry = tuple[int, int, int, int]  # kind, group, number, of what


def every_rank(doing: str) -> str:
    """A hint where a rank may be alone in a call that all ranks make; empty where it is in none."""
    if (call := CALLS.get(doing)) is None:
        return ""
    return f"every rank calls {call}: take it out of `if rank == 0:`, and use what it returns on one rank"


def stack_signal() -> int:
    """The signal at which a rank writes its Python stacks: one that nobody else is likely to use."""
    real_time = getattr(signal, "SIGRTMIN", None)
    return signal.SIGUSR2 if real_time is None else real_time + 9


class Pulse:
    """The record of this process, at `path` with the suffixes .pulse, .names and .stack."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.with_suffix(".pulse").open("w+b") as file:
            file.truncate(SIZE)
            self._map = mmap.mmap(file.fileno(), SIZE)
        self._names: dict[object, int] = {}
        self._lines = 0  # of the list of names
        self._listed = path.with_suffix(".names").open("wb", buffering=0)
        self._groups: dict[tuple[str, tuple[int, ...]], int] = {}
        self._begun: dict[int, int] = {}
        self._latest = 0
        self._launched: tuple[int, ...] = ()
        self._lives = 0
        self.of = ""  # what the next collective is of
        self.now = (OWN_CODE, False, NONE, NONE)
        self.step = NONE
        NUMBER.pack_into(self._map, 0, os.getpid())
        self.doing(*self.now)
        self.over()
        self.over(BESIDE)
        self._stack = path.with_suffix(".stack").open("wb", buffering=0)
        faulthandler.register(stack_signal(), self._stack, all_threads=True)

    def close(self) -> None:
        """End it."""
        self._map.close()
        self._listed.close()
        self._stack.close()

    def named(self, name: object) -> int:
        """The number of a text, or of a group."""
        found = self._names.get(name)
        if found is None:
            found = self._names[name] = self._lines
            self._lines += 1
            self._listed.write(json.dumps(name).encode() + b"\n")
        return found

    def regroup(self, launched: tuple[int, ...]) -> None:
        """The ranks of the job are others from now on, and their collectives are counted anew, the same on all.
        `launched`: the number by which each was launched."""
        self._launched = launched
        for key, group in self._groups.items():
            del self._names["group", group, *key[::-1]]
        self._groups.clear()
        self._begun.clear()
        self._latest = 0
        self.over()
        self.over(BESIDE)
        self._map[NUMBERS:SIZE] = bytes(SIZE - NUMBERS)

    def doing(self, what: str, patient: bool = False, one: int = NONE, two: int = NONE) -> None:
        """From now on the rank does this."""
        self.now = what, patient, one, two
        now = time.monotonic()
        DOING.pack_into(self._map, NOW, now, self.named(what), patient, self.step, one, two)

    def alive(self) -> None:
        """It still does what it did."""
        self._lives += 1
        NUMBER.pack_into(self._map, 8, self._lives)

    def begun(self, kind: str, ranks: tuple[int, ...], axes: str = "", of: str | None = None) -> Entry:
        """A collective begins, counted among those of these ranks and `axes`. `of`: what it is of, by default what this
        object's `of` says, once."""
        if self._launched:
            ranks = tuple(self._launched[rank] for rank in ranks)
        key = (axes, ranks)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = len(self._groups)
            self.named(("group", group, ranks, axes))
        number = self._begun[group] = self._begun.get(group, 0) + 1
        of, self.of = (self.of, "") if of is None else (of, self.of)
        entry = self.named(kind), group, number, self.named(of)
        place = LATEST + BEGUN.size * (self._latest % KEPT)
        self._latest += 1
        BEGUN.pack_into(self._map, place, self._latest, group, number, entry[0], entry[3])
        if group < GROUPS:
            NUMBER.pack_into(self._map, NUMBERS + 8 * group, number)
        return entry

    def waits(self, entry: Entry, at: int = WAIT) -> None:
        """The rank (or, `at` BESIDE, a thread of it) waits for something that has begun."""
        WAITING.pack_into(self._map, at, time.monotonic(), *entry)

    def over(self, at: int = WAIT) -> None:
        """It waits no more."""
        WAITING.pack_into(self._map, at, 0.0, NONE, 0, 0, 0)

    def long_wait(self) -> float:
        """For how many seconds the rank has waited for what it waits for; 0 if it does not."""
        since, kind, *_ = WAITING.unpack_from(self._map, WAIT)
        return time.monotonic() - since if kind >= 0 else 0.0


__all__ = ["ENDED", "Entry", "Pulse", "stack_signal"]
