"""The servers of the job that this process belongs to."""

from __future__ import annotations

import os
from pathlib import Path

from meshwright.errors import ServerError
from meshwright.servers.local import Local, Transport
from meshwright.servers.meeting import FOLDER, meeting
from meshwright.servers.server import Server
from meshwright.servers.sockets import Remote


def transport(workers: int) -> tuple[Transport, tuple[int, ...]]:
    """The servers of this job, and their numbers; without any, one in this process, if it is alone."""
    if (named := os.environ.get(FOLDER)) is not None:
        found = meeting(Path(named))
        return Remote(found), tuple(range(found.count()))
    if workers > 1:
        raise ServerError(
            f"{workers} workers have no parameter server",
            why="servers are processes of their own",
            hint=f"meshwright run --servers 1 --workers {workers} script.py",
        )
    return Local({0: Server(0)}), (0,)


__all__ = ["transport"]
