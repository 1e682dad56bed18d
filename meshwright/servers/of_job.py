"""The servers of the job that this process belongs to."""

from __future__ import annotations

import os
from pathlib import Path

from meshwright.errors import ServerError
from meshwright.launchers import launched
from meshwright.launchers.dynamic_cluster import worker
from meshwright.launchers.environment import DYNAMIC
from meshwright.servers.local import Local, Transport
from meshwright.servers.meeting import FOLDER, meeting, meeting_by_hand
from meshwright.servers.server import Server
from meshwright.servers.sockets import Remote


def transport(workers: int) -> tuple[Transport, tuple[int, ...]]:
    """The servers, and their numbers; without any, one in this process, if it is alone. Raises ServerError."""
    by_hand = worker(os.environ) if FOLDER not in os.environ and launched().launcher == DYNAMIC else None
    if by_hand is not None and by_hand.servers:
        os.environ[FOLDER] = str(meeting_by_hand(by_hand.place, by_hand.servers))
    if (named := os.environ.get(FOLDER)) is not None:
        found = meeting(Path(named))
        return Remote(found), tuple(range(found.count()))
    if workers > 1:
        hint = f"meshwright run --servers 1 --workers {workers} script.py"
        if by_hand is not None:
            hint = "MS_SERVER_NUM=1 in all processes of the job, and one with MS_ROLE=MS_PSERVER"
        raise ServerError(
            f"{workers} workers have no parameter server", why="servers are processes of their own", hint=hint
        )
    return Local({0: Server(0)}), (0,)


def attempt() -> int:
    """How often the workers of this job have been started again."""
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ and launched().launcher == DYNAMIC:
        return worker(os.environ).attempt - 1
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


__all__ = ["attempt", "transport"]
