"""Ranks that have left, and others that wait for them in vain: an error within seconds, not after a silence.

A rank has left when its script has ended without an error, or when it waits in `mw.shutdown()`. It begins no further
collective, so whoever waits in one that it has not begun waits for ever. Nobody else is disturbed: ranks may end at
different moments, as one that evaluates or saves alone does.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from meshwright.errors import LaunchError
from meshwright.heartbeat import IN_STEP, SHUTDOWN, generation
from meshwright.heartbeat.reader import Group, Seen, Waits, long_wait, read
from meshwright.heartbeat.record import GROUPS
from meshwright.launch.hang_diagnosis import PLACES, Finding, State, alone, named_ranks, waiting_lines
from meshwright.launch.ranks import Ranks
from meshwright.launch.span import Span
from meshwright.scheduler.client import Client, Place

LOOK_SECONDS = 0.5  # between two looks
WAIT_SECONDS = 1.0  # a rank that waits less is not looked at
SILENT_SECONDS = 10.0  # a rank on a GPU is not seen to wait: its record stands still
ASK_SECONDS = 2.0  # between two questions to the scheduler
PATIENCE_SECONDS = 2.0  # for a scheduler that is away
WORD_SECONDS = 3.0  # for the word of another machine about a lost peer: some looks, on a busy machine
AGAIN_SECONDS = 0.1  # between two looks for it
OTHER_END = {"sent": "received", "received": "sent"}
BESIDE_STEPS = ("save", *PLACES)  # groups that do not stand for a collective
HINT = (
    "all ranks must do the same number of steps before they end: look for a break, a return or a shorter loop there; "
    "mw.shard_loader gives all ranks the same number of batches"
)


class Left(msgspec.Struct, frozen=True):
    """A rank that begins no further collective. `ended`: its script has ended; else it waits in `mw.shutdown()`.
    `step`: its last one, -1 if it is unknown. `begun`: by `key` of a group, how many collectives. `complete`: False if
    there are more groups than a record counts."""

    rank: int
    ended: bool
    step: int = -1
    begun: dict[str, int] = {}
    complete: bool = True


def key(group: Group) -> str:
    """A short name of a group of ranks, the same on all machines."""
    return hashlib.sha256(f"{group.axes}/{','.join(map(str, group.ranks))}".encode()).hexdigest()[:16]


def left(rank: int, seen: Seen | None, ended: bool) -> Left | None:
    """Whether a rank has left. `ended`: its process has ended with exit code 0."""
    if seen is None:
        return Left(rank, True) if ended else None
    if not ended and (seen.waits is None or seen.waits.kind != SHUTDOWN):
        return None
    begun = {key(group): count for group, count in seen.begun.items()}
    return Left(rank, ended, seen.step, begun, len(begun) < GROUPS)


def misses(gone: Left, kind: str, group: Group, number: int) -> bool:
    """Whether a rank that has left does not take part in the `number`-th collective of a group."""
    if gone.rank not in group.ranks or (
        kind == "checkpoint" and not gone.ended
    ):  # a thread of it may still save
        return False
    count = gone.begun.get(key(Group(group.ranks, OTHER_END.get(group.axes, group.axes))))
    return count < number if count is not None else gone.complete


def waits_of(seen: Seen, silent: bool) -> list[Waits]:
    """What a rank waits for. `silent`: it has not moved, and may wait for any collective that it has begun."""
    if seen.waits is not None:
        return [seen.waits]
    groups = [g for g in seen.begun if silent and g.axes not in BESIDE_STEPS]
    return [
        Waits(seen.latest.get((g, seen.begun[g]), ("collective", ""))[0], g, seen.begun[g]) for g in groups
    ]


def in_vain(seen: Seen, silent: bool, gone: Iterable[Left]) -> list[int]:
    """The ranks that have left for which one waits."""
    waits = waits_of(seen, silent)
    return [g.rank for g in gone if any(misses(g, w.kind, w.group, w.number) for w in waits)]


def diagnose(
    states: Mapping[int, Seen], silent: Iterable[int], gone: Mapping[int, Left], world: int
) -> Finding | None:
    """Which ranks wait in vain, and for whom. `states`: of ranks that wait or are silent."""
    quiet = set(silent)
    waiting = {r: v for r, s in states.items() if (v := in_vain(s, r in quiet, gone.values()))}
    if not waiting:
        return None
    ranks = sorted({g for found in waiting.values() for g in found})
    others = sorted(waiting)
    of_others = {r: State(states[r]) for r in others}
    lines = waiting_lines(of_others, [r for r in others if states[r].waits])
    of_all = {**of_others, **{r: State(None) for r in ranks}}
    for_whom = "it" if len(ranks) == 1 else "them"
    verb = "waits" if len(others) == 1 else "wait"
    what = f"{leaving([gone[r] for r in ranks], world)}, and {named_ranks(others)} {verb} for {for_whom}"
    steps = sorted(
        (s.step, bool(s.numbers) or s.doing == IN_STEP)
        for r, s in states.items()
        if r in waiting and s.step >= 0
    )
    when = f" {'in' if steps[0][1] else 'after'} step {steps[0][0]}" if steps else ""
    return Finding(tuple(ranks), what + when, tuple(lines), *alone(of_all, others))


def leaving(gone: Sequence[Left], world: int) -> str:
    """``rank 1 of 2 ended with exit code 0 after step 3``."""
    how = "ended with exit code 0" if any(g.ended for g in gone) else f"reached {SHUTDOWN}"
    steps = sorted({g.step for g in gone if g.step >= 0})
    after = f" after step {' or '.join(map(str, steps))}" if steps else ""
    return f"{named_ranks([g.rank for g in gone])} of {world} {how}{after}"


class Departures:
    """Looks for ranks that have left, within a ``with`` block. `found`: what was found, at most once.

    `records`: the folder of the records of this machine's `ranks`. `place`: of the scheduler that tells of the ranks
    on other machines, None where there are none. `goes_on`: the job goes on without ranks that have ended."""

    def __init__(self, records: Path, ranks: Ranks, span: Span, place: Place | None, goes_on: bool) -> None:
        self._records, self._ranks, self._span, self._goes_on = records, ranks, span, goes_on
        self._client = None if place is None else Client(place, PATIENCE_SECONDS)
        self.found: Finding | None = None
        self._told: list[Left] = []
        self._others: dict[int, Left] = {}
        self._asked, self._count = 0.0, b""  # when the scheduler was asked, and how many words there were
        self._marks: dict[int, tuple[bytes, float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch for departures", daemon=True)

    def __enter__(self) -> Departures:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._tell(self._of(self._ranks.ended_well()))

    def early(self, ended: Iterable[int], over: Callable[[], bool]) -> list[Left]:
        """The ranks that have ended without an error before others failed: `ended`, or else those of other machines.

        The failure of a rank that lost a peer may be seen here before the other machine has looked at that peer, so
        its word is waited for, unless the attempt is `over` for another reason."""
        here, until = self._of(sorted(ended)), time.monotonic() + WORD_SECONDS
        if here or self._client is None:
            return here
        while True:
            self._asked = 0.0
            last = over() or time.monotonic() > until
            if (found := [g for g in self.elsewhere().values() if g.ended]) or last:
                return found
            time.sleep(AGAIN_SECONDS)

    def _of(self, ended: Iterable[int]) -> list[Left]:
        return [g for r in ended if (g := left(r, self._seen(r), True)) is not None]

    def _watch(self) -> None:
        before: Finding | None = None
        while not self._stop.wait(LOOK_SECONDS):
            finding = self._look()
            if finding is not None and finding == before:  # a record may be read while it is written
                self.found = finding
                return
            before = finding

    def _look(self) -> Finding | None:
        now, ended = time.monotonic(), set(self._ranks.ended_well())
        marks = {rank: self._mark(rank, now) for rank in self._span.ranks}
        waiting = {
            r for r, (data, _) in marks.items() if r not in ended and long_wait(data, now) > WAIT_SECONDS
        }
        silent = {r for r, (_, since) in marks.items() if r not in ended and now - since > SILENT_SECONDS}
        if not (waiting or silent or ended) or self._regrouped():
            return None
        seen = {rank: self._seen(rank) for rank in waiting | silent | ended}
        gone = {r: g for r, s in seen.items() if (g := left(r, s, r in ended)) is not None}
        self._tell(list(gone.values()))
        states = {r: s for r, s in seen.items() if s is not None and r not in gone}
        states |= {r: s for r in gone if not gone[r].ended and (s := seen[r]) is not None}  # in mw.shutdown()
        if states:
            gone |= self.elsewhere()
        if self._goes_on:
            gone = {r: g for r, g in gone.items() if not g.ended}
        return diagnose(states, silent, gone, self._span.world)

    def _mark(self, rank: int, now: float) -> tuple[bytes, float]:
        data = b""
        with contextlib.suppress(OSError):
            data = (self._records / f"rank{rank}.pulse").read_bytes()
        before = self._marks.get(rank)
        if before is None or before[0] != data:
            self._marks[rank] = (data, now)
        return self._marks[rank]

    def _seen(self, rank: int) -> Seen | None:
        return read(self._records / f"rank{rank}")

    def _regrouped(self) -> bool:
        """Whether ranks were lost before: then groups are numbered anew."""
        now = generation.read(self._records) if self._goes_on else None
        return now is not None and now.number > 0

    # ---- other machines

    @property
    def _words(self) -> str:
        """The key that counts the words of all machines about ranks that have left."""
        return f"{self._span.attempt}/left"

    def _tell(self, gone: list[Left]) -> None:
        """Tell the other machines who has left."""
        if self._client is None or gone == self._told or not gone:
            return
        with contextlib.suppress(LaunchError):  # the scheduler is away: said again at the next look
            self._client.set(f"{self._words}/{self._span.place}", msgspec.msgpack.encode(gone))
            self._client.add(self._words, 1)
            self._told = gone

    def elsewhere(self) -> dict[int, Left]:
        """The ranks of other machines that have left."""
        if self._client is not None and time.monotonic() - self._asked > ASK_SECONDS:
            with contextlib.suppress(LaunchError):
                count = self._client.get(self._words, 0.0) or b""
                if count != self._count:
                    self._others, self._count = self._said(self._client), count
            self._asked = time.monotonic()
        return self._others

    def _said(self, client: Client) -> dict[int, Left]:
        keys = [f"{self._words}/{place}" for place in range(self._span.places) if place != self._span.place]
        missing, found = set(client.wait(tuple(keys), 0.0)), []
        for there in keys:
            data = None if there in missing else client.get(there, 0.0)
            found += msgspec.msgpack.decode(data, type=list[Left]) if data is not None else []
        return {g.rank: g for g in found}


__all__ = ["HINT", "Departures", "Left", "diagnose", "key", "leaving", "left", "misses"]
