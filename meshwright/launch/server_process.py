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
from meshwright.servers.server import Server
from meshwright.servers.serving import Serving


def main() -> None:
    launcher, folder, place, replicas = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    die_with(launcher)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher says when
    torch.optim.SGD(
        [torch.nn.Parameter(torch.zeros(1))]
    )  # the first one loads the compiler, a second of work
    if place == "spare":
        place = sys.stdin.readline()
        if not place:
            return
    number = int(place)
    journal = Journal(Path(sys.argv[5]) / str(number), number) if len(sys.argv) > 5 else None
    met = meeting(folder)
    lost = (journal is None or journal.fresh) and met.been(number)
    server = journal.server() if journal is not None and not lost else Server(number, lost=lost)
    (folder / f"{number}.pid").write_text(str(os.getpid()))
    serving = Serving(server, met, journal, replicas)
    serving.run()
    if serving.failure is not None:
        raise SystemExit(f"ServerError: {serving.failure}")


if __name__ == "__main__":
    main()
