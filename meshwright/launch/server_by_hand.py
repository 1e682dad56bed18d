"""A parameter server that no launcher has started (`MS_ROLE=MS_PSERVER`): ``… -m meshwright.launch.server_by_hand
SETTINGS`` with JSON, and the secret of the job in the environment.

It is the server of its name: one that is started again under the same name takes its place. It ends with the job, or
when the scheduler stays away.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec

from meshwright.errors import LaunchError, ServerError
from meshwright.launch.server_process import load_optimizers, serving_of
from meshwright.scheduler import messages as m
from meshwright.scheduler.client import Client, Place
from meshwright.scheduler.trust import SECRET, Trust
from meshwright.servers.by_scheduler import JOB
from meshwright.servers.meeting import meeting, meeting_by_hand
from meshwright.servers.places import Meeting
from meshwright.servers.serving import Serving

ASK_SECONDS = 2.0
STAY_SECONDS = 5.0  # for the last step of workers, when a server is asked to end


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The scheduler at `host` and `port`. `node`: the name of this server, of `servers`. `number`: its own, from
    `servers` on for one that comes later; -1: as they come. `state`: the folder in which it keeps what must outlive it,
    empty: nothing does. `replicas`: how many other servers have a copy. `fresh`: it had no values before. `job`: the
    job's name, the same when a folder is used again; empty: any. `wait_seconds`: for the scheduler at the start;
    `away_seconds`: later."""

    host: str
    port: int
    node: str
    servers: int
    number: int = -1
    state: str = ""
    replicas: int = 0
    fresh: bool = False
    job: str = ""
    wait_seconds: float = 1800.0
    away_seconds: float = 30.0


def number_of(met: Meeting, settings: Settings) -> int:
    """The number of this server, once the scheduler is there. Raises LaunchError for one too many."""
    if settings.number >= settings.servers:  # workers that come do not look for it
        return settings.number
    end = time.monotonic() + settings.wait_seconds
    while True:
        try:
            (number,) = met.begin(1, settings.node)
            break
        except LaunchError:
            if time.monotonic() > end:
                raise
    if settings.number >= 0:
        return settings.number
    if number >= settings.servers:
        raise LaunchError(
            f"server {settings.node} is one too many",
            why=f"the job has {settings.servers} parameter servers (MS_SERVER_NUM)",
            hint="MS_NODE_ID=NAME, the same when a server is started again",
        )
    return number


def follow(place: Place, settings: Settings, serving: Serving) -> None:
    """End the server with the job."""
    client, seen, heard = Client(place, patience=ASK_SECONDS), -1, time.monotonic()
    name = f"server {settings.node}"  # a worker may have the same name
    while time.monotonic() - heard < settings.away_seconds:
        with contextlib.suppress(LaunchError):
            state = client.ask(m.Watch(name, 0, seen, ASK_SECONDS), m.State, ASK_SECONDS)
            seen, heard = state.seen, time.monotonic()
            if state.settled and not state.again:
                break
    else:
        why = f"it was tried for {settings.away_seconds:g} s"
        serving.failure = LaunchError(f"no scheduler answers at {place}", why=why)
    serving.close()


def stay(asked: threading.Event, serving: Serving) -> None:
    """End the server when it is asked to. Who deletes a job asks all of its processes at once, and workers have a step
    to finish: they come first."""
    asked.wait()
    end = time.monotonic() + STAY_SECONDS
    while serving.has_workers() and time.monotonic() < end:
        time.sleep(0.05)
    serving.close()


def run(settings: Settings, secret: str) -> None:
    """Serve until the job has ended. Raises LaunchError when it cannot begin, ServerError if values are lost."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda heard, _: sys.exit(128 + heard))
    place = Place(settings.host, settings.port, Trust(secret))
    if settings.job:
        Client(place, settings.wait_seconds).swap(JOB, b"", settings.job.encode())
    met = meeting(meeting_by_hand(place, settings.servers))
    load_optimizers()
    number = number_of(met, settings)
    state = Path(settings.state) / "servers" if settings.state else None
    serving = serving_of(met, number, state, settings.replicas, fresh=settings.fresh)
    print(f"parameter server {number} of {settings.servers}: {settings.node}", flush=True)
    threading.Thread(target=follow, args=(place, settings, serving), daemon=True).start()
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda heard, _: sys.exit(128 + heard) if asked.is_set() else asked.set())
    threading.Thread(target=stay, args=(asked, serving), daemon=True).start()
    serving.run()
    if asked.is_set():  # all is written, and torch takes a second of work to unload
        os._exit(128 + signal.SIGTERM)
    if serving.failure is not None:
        raise serving.failure


def main() -> None:
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    try:
        run(settings, os.environ.pop(SECRET, ""))
    except (LaunchError, ServerError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None


if __name__ == "__main__":
    main()
