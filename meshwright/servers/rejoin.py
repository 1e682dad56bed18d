"""A worker under `meshwright run --on-failure continue`: the others go on without it, and it may be started again."""

from __future__ import annotations

import time

from meshwright import heartbeat
from meshwright.errors import PeerLost
from meshwright.heartbeat import generation
from meshwright.heartbeat.generation import GOES_ON, JOINED, READY, RESTARTS

POLL_SECONDS = 0.05
ADMIT_SECONDS = 60.0


def starts_together() -> bool:
    """Whether the launcher starts all workers again with one that fails."""
    store = heartbeat.store()
    return store is not None and generation.read(store.parent) is None


def take_part(worker: int, unable: str = "") -> None:
    """Let the launcher know that this worker, which has joined its servers, needs no other one; or why it does. One
    that was started again waits until the launcher counts on it. Raises PeerLost if that does not happen."""
    store = heartbeat.store()
    folder = None if store is None else store.parent
    now = None if folder is None else generation.read(folder)
    if folder is None or now is None:  # the job ends with its first worker
        return
    if unable:
        generation.say(folder, worker, RESTARTS, unable)
        return
    end = time.monotonic() + ADMIT_SECONDS
    if worker not in now.ranks:
        generation.say(folder, worker, READY)
    while now is not None and worker not in now.ranks:
        if time.monotonic() > end:
            raise PeerLost(
                "the job has ended without this worker",
                why=f"it was started again, and waited {ADMIT_SECONDS:g} s",
            )
        time.sleep(POLL_SECONDS)
        now = generation.read(folder)
    generation.say(folder, worker, JOINED)
    generation.say(folder, worker, GOES_ON)


__all__ = ["starts_together", "take_part"]
