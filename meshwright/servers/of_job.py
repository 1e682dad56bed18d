"""The servers of the job that this process belongs to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from meshwright.errors import ServerError
from meshwright.launchers import launched
from meshwright.launchers.dynamic_cluster import worker
from meshwright.launchers.environment import DYNAMIC
from meshwright.servers.local import Local, Transport
from meshwright.servers.meeting import meeting, meeting_by_hand
from meshwright.servers.places import FOLDER, JOINS
from meshwright.servers.server import Server
from meshwright.servers.sockets import Remote

ALL_REDUCED = "parameters that are on no server are all-reduced among the workers"
SHARES = "each worker trains its share of every batch"

ALONE = "alone"  # the name of the job of a process with a server of its own
JOBS: set[str] = set()  # of whose servers a step of this process has made use


def check_first(job: str) -> None:
    """Raise ServerError for a second step on the servers of a job: they would go on with the values of the first,
    though it is closed, and those of the new model would be lost."""
    if job != ALONE and job in JOBS:
        raise ServerError(
            "this script has made a step on the servers of this job before",
            why="servers keep the values of that one, and would not take those of another model",
            hint="a meshwright run for each, or one step for a module that has both models",
        )


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


def comes_late(transport: Remote, shares: bool, rest: Sequence[str]) -> int:
    """The number of a worker that comes while others train. Raises ServerError where these would not notice: they train
    `shares` of one batch, or `rest` names parameters that are on no server."""
    if shares:
        raise ServerError(
            "a worker cannot come while others train",
            why=SHARES,
            hint="mw.parameter_server(…), and batches by step.samples(…)",
        )
    if rest:
        raise ServerError(
            "a worker cannot come while others train",
            why=f"{ALL_REDUCED}: {', '.join(rest[:5])}",
            hint="mw.on_server(model), or no mark at all: then all parameters are on servers",
        )
    place = os.environ[JOINS]
    return int(place) + launched().rank if place.isdecimal() else transport.meeting.worker()


__all__ = ["ALL_REDUCED", "ALONE", "JOBS", "SHARES", "attempt", "check_first", "comes_late", "transport"]
