"""Ranks on several machines of which none moves: each launcher leaves the records of its ranks with the scheduler once
they are silent, and removes them when one moves. When all machines have done so, each can diagnose the hang.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping

import msgspec

from meshwright.errors import LaunchError
from meshwright.heartbeat.reader import Group, Seen, Waits
from meshwright.launch.hang_diagnosis import State
from meshwright.launch.span import Span
from meshwright.scheduler.client import Client, Place

PATIENCE_SECONDS = 2.0  # for a scheduler that is away


class Record(msgspec.Struct, frozen=True, array_like=True):
    """A `Seen` without dictionaries by group: `begun` and `latest` name groups by their place in `groups`. `age`: of
    what the rank does, in seconds."""

    doing: str
    patient: bool
    step: int
    numbers: tuple[int, ...]
    age: float
    waits: Waits | None
    groups: tuple[Group, ...]
    begun: tuple[tuple[int, int], ...]
    latest: tuple[tuple[int, int, str, str], ...]


class Silent(msgspec.Struct, frozen=True, array_like=True):
    """A rank, and its process as `State` has it."""

    rank: int
    process: str
    record: Record | None


def silent(rank: int, state: State, now: float) -> Silent:
    """A rank as another machine reads it. `now`: on the clock of its record."""
    seen = state.seen
    if seen is None:
        return Silent(rank, state.process, None)
    groups = tuple(dict.fromkeys((*seen.begun, *(group for group, _ in seen.latest))))
    place = {group: number for number, group in enumerate(groups)}
    begun = tuple((place[group], count) for group, count in seen.begun.items())
    latest = tuple((place[group], number, *of) for (group, number), of in seen.latest.items())
    age = now - seen.since
    about = (seen.doing, seen.patient, seen.step, seen.numbers, age, seen.waits, groups, begun, latest)
    return Silent(rank, state.process, Record(*about))


def state_of(rank: Silent, now: float) -> State:
    """The rank as this machine's own are. `now`: on this machine's clock."""
    record = rank.record
    if record is None:
        return State(None, rank.process)
    begun = {record.groups[place]: count for place, count in record.begun}
    latest = {(record.groups[place], number): (kind, of) for place, number, kind, of in record.latest}
    about = (record.doing, record.patient, record.step, record.numbers, now - record.age, record.waits)
    return State(Seen(*about, begun, latest), rank.process)


class Elsewhere:
    """What the machines of an attempt know of one another while no rank moves. `span`: what this one has of it.
    `machines`: the numbers of those that take part now."""

    def __init__(self, place: Place, span: Span, machines: Callable[[], Iterable[int]]) -> None:
        self._client = Client(place, PATIENCE_SECONDS)
        self._key, self._machines = f"{span.attempt}/silent/{{}}".format, machines
        self._own = self._key(span.place)
        self._away_since: float | None = None  # when the scheduler was found away, and has not answered since
        self._said = True  # this machine may have left something before it was lost and came again

    def all_of(self, states: Mapping[int, State], now: float) -> dict[int, State] | None:
        """All ranks of the job, once all machines are silent. `states`: of the ranks here, which are."""
        try:
            found = self._heard(states, now)
        except LaunchError:  # the scheduler is away: asked again at the next look
            self._away_since = now if self._away_since is None else self._away_since
            return None
        self._away_since = None
        return found

    def away_seconds(self, now: float) -> float:
        """How long the scheduler has not answered."""
        return 0.0 if self._away_since is None else now - self._away_since

    def _heard(self, states: Mapping[int, State], now: float) -> dict[int, State] | None:
        if not self._said:
            own = [silent(rank, state, now) for rank, state in states.items()]
            self._client.set(self._own, msgspec.msgpack.encode(own))
            self._said = True
        keys = tuple(map(self._key, self._machines()))
        if self._client.wait(keys, 0.0):
            return None
        every = [self._client.get(key, 0.0) for key in keys]
        if None in every:
            return None
        found = [s for data in every if data for s in msgspec.msgpack.decode(data, type=list[Silent])]
        return {s.rank: state_of(s, now) for s in found} | dict(states)

    def moves(self) -> None:
        """A rank here moves."""
        self._away_since = None
        if self._said:
            with contextlib.suppress(LaunchError):
                self._client.delete(self._own)
                self._said = False


__all__ = ["Elsewhere", "silent", "state_of"]
