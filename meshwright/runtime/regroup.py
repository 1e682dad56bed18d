"""The ranks that are left form a group of their own, in a store of their own, and go on.

`next_generation` waits for the launcher's word of who takes part, `enter` meets them, `connect` makes their groups.
While they meet another one may be lost: then the launcher says so, these raise PeerLost, and the others meet as the
next generation.

torch cannot be stopped in the middle of making a group, which lasts until all its ranks are connected. So all ranks of
a generation make theirs or none does: the first that has either seen all others come, or seen that the launcher has
begun another generation, decides for all. After that only a loss ends it; a rank that comes is taken in later.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from meshwright import heartbeat
from meshwright.core.mesh import Mesh
from meshwright.errors import PeerLost
from meshwright.heartbeat import generation
from meshwright.heartbeat.generation import Generation
from meshwright.runtime.communicator import Alone, Communicator, break_off, interrupt
from meshwright.runtime.rendezvous import Meeting, meet_anew, store_of_generation
from meshwright.runtime.scheduler_store import arrived
from meshwright.runtime.stores import Store, put

WATCH_SECONDS = 0.25  # twice, from the word of the launcher until a step is interrupted
STUCK_SECONDS = 10.0  # for which a step that is interrupted may go on waiting
LOOK_SECONDS = 0.01  # between two looks at what the launcher or another rank says
STORE_SECONDS = 600.0
CONNECT_SECONDS = 0.5  # for ranks of which all have come


def folder() -> Path | None:
    """Where the launcher says who takes part; None where a job ends with its first rank."""
    store = heartbeat.store()
    return store.parent if store is not None and (store.parent / generation.FILE).exists() else None


class Group:
    """This process among the generations of its job: `launched` is its number as it was launched."""

    def __init__(self, place: Path, launched: int, now: Generation) -> None:
        self.folder, self.launched, self.now = place, launched, now
        self._seen = 0
        self.busy = False  # with a step
        self._left = threading.Event()  # the generation that was met last
        self._late, self._looks = -1, 0  # the generation of a step that is behind, and for how many looks

    @property
    def comes(self) -> bool:
        """Whether this rank was started again, and is not among the others yet."""
        return self.launched not in self.now.ranks

    def say(self, word: str) -> None:
        """Leave a word for the launcher."""
        generation.say(self.folder, self.launched, word)

    def cannot_go_on(self, reason: str) -> None:
        """Tell the launcher why this rank cannot go on without another one."""
        (self.folder / f"rank{self.launched}{generation.GOES_ON}").unlink(missing_ok=True)
        generation.say(self.folder, self.launched, generation.RESTARTS, reason)

    def changed(self) -> bool:
        """Whether the launcher has begun another generation. Costs a look at a file."""
        seen = (self.folder / generation.FILE).stat().st_mtime_ns
        if seen == self._seen:
            return False
        found = generation.read(self.folder)
        assert found is not None
        if found.number == self.now.number:
            self._seen = seen
        return found.number > self.now.number

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Within it, this rank does a step with the others."""
        self.busy = True
        try:
            yield
        finally:
            self.busy = False

    def watch(self) -> None:
        """From now on end what a step waits for when another generation has begun meanwhile: a connection need not
        tell that the rank at its other end has left."""
        threading.Thread(target=self._watch, name="next generation", daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(WATCH_SECONDS)
            with contextlib.suppress(OSError, ValueError):
                self.look()

    def look(self) -> None:
        """Interrupt a step if another generation had begun at the look before, too. A rank that cannot be freed ends:
        the launcher starts it again, where the others would wait for it for ever."""
        found, number = generation.read(self.folder), self.now.number
        behind = found is not None and found.number > number and self.busy
        self._looks = self._looks + 1 if behind and self._late == number else 0
        self._late = number if behind else -1
        if not self._looks:
            return
        interrupt()
        if self._looks * WATCH_SECONDS > STUCK_SECONDS and heartbeat.long_wait() > STUCK_SECONDS:
            told = f"rank {self.launched} still waits in a collective of ranks that have gone on without it: it ends"
            print(told, file=sys.stderr, flush=True)
            os._exit(1)

    def next_generation(self, seconds: float) -> bool:
        """Wait for another generation, in which this rank takes part; False if none begins in time."""
        end = time.monotonic() + seconds
        ranks = (self.launched,) if self.comes else tuple(range(len(self.now.ranks)))
        told = heartbeat.begun("next generation", ranks, "", "the launcher says who is left")
        with heartbeat.waiting(told):
            while True:
                found = generation.read(self.folder)
                if found is not None and found.number > self.now.number and self.launched in found.ranks:
                    self.now = found
                    return True
                if time.monotonic() > end:
                    return False
                time.sleep(LOOK_SECONDS)

    def enter(self) -> Meeting:
        """Leave the groups that there are, and meet the ranks of this generation. Raises PeerLost when the next one
        has begun."""
        break_off()
        now = self.now
        rank, world = now.ranks.index(self.launched), len(now.ranks)
        heartbeat.regroup(now.ranks)
        store = store_of_generation(self.folder, now.number, timedelta(seconds=STORE_SECONDS))
        if store.add("here", 1) == world:
            put(store, "all here", b"yes")
        while not arrived(store, ["all here"], LOOK_SECONDS / 4):
            if self.changed() and _decide(store, "no") == "no":
                raise PeerLost(
                    "another rank has gone", why="this one waited for the others of its generation"
                )
        if _decide(store, "yes") == "no":
            raise PeerLost("another rank has gone", why="another one did not wait for all of its generation")
        self._left = threading.Event()
        meet_anew(LeftStore(store, self._left), rank, world, self.changed)
        return Meeting()

    def connect(self, meeting: Meeting, mesh: Mesh, device: torch.device) -> Communicator:
        """The communicator of a mesh of this generation. Raises PeerLost when one of its ranks is lost: it would be
        waited for as long as a collective may take, so a thread does the waiting."""
        if mesh.size == 1:
            return Alone(mesh)
        made: list[Communicator | Exception] = []
        left = self._left

        def make() -> None:
            try:
                made.append(meeting.connect(mesh, device))
            except Exception as error:
                made.append(error)
                return
            if left.is_set():  # torch has one default group: this one has taken the place of the next one
                print("the group of an earlier generation was made too late", file=sys.stderr, flush=True)
                os._exit(1)

        thread = threading.Thread(target=make, name="connects", daemon=True)
        thread.start()
        while not made:
            if self._lacks_one():
                thread.join(
                    CONNECT_SECONDS
                )  # a group that is all but made would be in the way of the next one
                if not made:
                    left.set()
                raise PeerLost("another rank has gone", why="this one waited for the connections to it")
            time.sleep(LOOK_SECONDS / 4)
        if isinstance(made[0], Exception):
            raise made[0]
        return made[0]

    def _lacks_one(self) -> bool:
        """Whether a rank of this generation has been lost since it began."""
        if not self.changed():
            return False
        found = generation.read(self.folder)
        return found is not None and found.ranks[: len(self.now.ranks)] != self.now.ranks


class LeftStore(Store):
    """The store of a generation, of no use to a thread that still makes its groups once they were `left`."""

    def __init__(self, store: Store, left: threading.Event) -> None:
        super().__init__()
        self._store, self._left = store, left

    def _now(self) -> Store:
        if self._left.is_set():
            raise RuntimeError("the ranks have met as another generation since")
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        return self._store.timeout  # pyright: ignore[reportAttributeAccessIssue]  the stub lacks it

    def set(self, key: str, value: bytes | str) -> None:
        put(self._now(), key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._now().get(key)

    def add(self, key: str, value: int) -> int:
        return self._now().add(key, value)

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        return self._now().compare_set(key, expected_value, desired_value)

    def check(self, keys: Sequence[str]) -> bool:
        return self._now().check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        end = time.monotonic() + (timeout or self.timeout).total_seconds()
        while not arrived(self._now(), keys, LOOK_SECONDS / 4):
            if time.monotonic() > end:
                raise RuntimeError(f"Wait timeout: {keys[0]} has not come")

    def delete_key(self, key: str) -> bool:
        return self._now().delete_key(key)

    def num_keys(self) -> int:
        return self._now().num_keys()


def _decide(store: Store, word: str) -> str:
    """Whether the ranks of a generation make their groups: the first word counts, for all."""
    return bytes(store.compare_set("meets", "", word)).decode()


def group() -> Group | None:
    """This process among the generations; None where a job ends with its first rank."""
    place = folder()
    if place is None:
        return None
    now = generation.read(place)
    assert now is not None
    return Group(place, int(os.environ["RANK"]), now)


__all__ = ["Group", "group"]
