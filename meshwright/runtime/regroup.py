"""The ranks that are left form a group of their own, in a store of their own, and go on.

`next_generation` waits for the launcher's word of who takes part, `enter` meets them. While they meet another one may
be lost: then the launcher says so, `enter` raises PeerLost, and they meet as the next generation.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch

from meshwright import heartbeat
from meshwright.core.mesh import Mesh
from meshwright.errors import PeerLost
from meshwright.heartbeat import generation
from meshwright.heartbeat.generation import Generation
from meshwright.runtime.communicator import Alone, Communicator, break_off, interrupt
from meshwright.runtime.rendezvous import Meeting, meet_anew
from meshwright.runtime.stores import FileStore, put

WATCH_SECONDS = 0.25  # twice, from the word of the launcher until a step is interrupted
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
        late = -1
        while True:
            time.sleep(WATCH_SECONDS)
            with contextlib.suppress(OSError, ValueError):
                found, number = generation.read(self.folder), self.now.number
                behind = found is not None and found.number > number and self.busy
                if behind and late == number:
                    interrupt()
                late = number if behind else -1

    def next_generation(self, seconds: float) -> bool:
        """Wait for another generation, in which this rank takes part; False if none begins in time."""
        end = time.monotonic() + seconds
        told = heartbeat.begun("next generation", self.now.ranks, "", "the launcher says who is left")
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
        store = FileStore(str(self.folder / f"store-{now.number}"))
        store.set_timeout(timedelta(seconds=STORE_SECONDS))
        put(store, f"here/{rank}", b"here")
        keys = [f"here/{other}" for other in range(world)]
        self._until(lambda: store.check(keys), "the others of its generation")
        meet_anew(store, rank, world, self.changed)
        return Meeting()

    def connect(self, meeting: Meeting, mesh: Mesh, device: torch.device) -> Communicator:
        """The communicator of a mesh of this generation. Raises PeerLost when the next one has begun: whoever is lost
        meanwhile would be waited for as long as a collective may take, so a thread does the waiting."""
        if mesh.size == 1:
            return Alone(mesh)
        made: list[Communicator | Exception] = []

        def make() -> None:
            try:
                made.append(meeting.connect(mesh, device))
            except Exception as error:
                made.append(error)

        thread = threading.Thread(target=make, name="connects", daemon=True)
        thread.start()
        try:
            self._until(lambda: bool(made), "the connections of its generation")
        except PeerLost:
            thread.join(CONNECT_SECONDS)  # a group that is all but made would be in the way of the next one
            raise
        if isinstance(made[0], Exception):
            raise made[0]
        return made[0]

    def _until(self, true: Callable[[], bool], what: str) -> None:
        while not true():
            if self.changed():
                raise PeerLost("another rank has gone", why=f"this one waited for {what}")
            time.sleep(LOOK_SECONDS / 4)


def group() -> Group | None:
    """This process among the generations; None where a job ends with its first rank."""
    place = folder()
    if place is None:
        return None
    now = generation.read(place)
    assert now is not None
    return Group(place, int(os.environ["RANK"]), now)


__all__ = ["Group", "group"]
