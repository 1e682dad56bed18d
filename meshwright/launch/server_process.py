"""One parameter server: ``python -m meshwright.launch.server_process LAUNCHER FOLDER NUMBER REPLICAS [STATE]``.

It ends with the launcher, whose process id is LAUNCHER. REPLICAS: how many other servers have a copy of what it has.
STATE: the folder from which it goes on after it was killed. NUMBER ``spare``: load everything, and read the number from
the input when it is needed.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from meshwright.launch.bootstrap import die_with
from meshwright.servers.journal import Journal
from meshwright.servers.meeting import meeting
from meshwright.servers.places import LAUNCHES, Meeting
from meshwright.servers.server import Server
from meshwright.servers.serving import Serving
from meshwright.servers.torn import pushed


def load_optimizers() -> None:
    """Load the compiler, a second of work, which torch does with the first optimizer."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])


def serving_of(
    met: Meeting,
    number: int,
    state: Path | None,
    replicas: int = 0,
    *,
    fresh: bool = False,
    resumes: bool = False,
) -> Serving:
    """A server at its socket, with what it had when it was killed. `fresh`: it had no values. `resumes`: all servers
    were killed, and all workers."""
    journal = None if state is None else Journal(state / str(number), number)
    # a folder may have what a server had before another machine took it over
    old = journal is None or journal.fresh or (replicas > 0 and met.moved(number))
    lost = old and met.been(number) and not fresh
    if state is None or journal is None or lost:
        server = Server(number, lost=lost)
    else:
        server = journal.server(pushed(state) if resumes and not met.been(number) else None)
    return Serving(server, met, journal, replicas)


def main() -> None:
    launcher, folder, place, replicas = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    die_with(launcher)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher says when
    load_optimizers()
    if place == "spare":
        place = sys.stdin.readline()
        if not place:
            return
    number = int(place)
    (folder / f"{number}.pid").write_text(str(os.getpid()))
    state = Path(sys.argv[5]) if len(sys.argv) > 5 else None
    resumes = (folder / LAUNCHES).exists()
    serving = serving_of(meeting(folder), number, state, replicas, resumes=resumes)
    serving.run()
    serving.close()
    if serving.failure is not None:
        print(f"ServerError: {serving.failure}", file=sys.stderr, flush=True)
    # not by the interpreter's end: threads may be in the middle of an update, and must not lose torch there
    os._exit(serving.failure is not None)


if __name__ == "__main__":
    main()
