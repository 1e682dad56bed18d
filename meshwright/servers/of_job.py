"""The servers of the job that this process belongs to."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from meshwright.errors import LaunchError, ServerError
from meshwright.launchers import launched
from meshwright.launchers.dynamic_cluster import worker
from meshwright.launchers.environment import DYNAMIC
from meshwright.servers.local import Local, Transport
from meshwright.servers.meeting import meeting, meeting_by_hand
from meshwright.servers.messages import Declare
from meshwright.servers.places import FOLDER, JOINS, LAUNCHES
from meshwright.servers.same_job import LAUNCH
from meshwright.servers.server import Server
from meshwright.servers.sockets import Remote
from meshwright.servers.worker import Worker

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


def begun(transport: Transport, *, outside: bool) -> int:
    """How often what the job trains has begun anew. What is on no server is lost when all workers start again, so what
    servers have would not fit it; shares of a step that was pushed in part would not either (`outside`). What servers
    have is lost with one of them. Raises ServerError without a scheduler."""
    if outside:
        return attempt()
    if not isinstance(transport, Remote):
        return 0
    try:
        return transport.meeting.losses()
    except LaunchError as error:
        raise ServerError(error.what, why=error.why, hint=error.hint) from None


def life() -> int:
    """How often the workers of this job have begun: more with each attempt, and again more with each launcher that goes
    on from the state of one before."""
    return launches() * LAUNCH + attempt()


def launches() -> int:
    """How often a launcher went on from the state of one before."""
    path = Path(os.environ.get(FOLDER, "")) / LAUNCHES
    return int(path.read_text()) if FOLDER in os.environ and path.exists() else 0


def goes_on(worker: Worker, declare: Declare) -> int:
    """The step at which a worker begins that was started again with all others, as servers kept their values; 0 of any
    other one. Worker 0 says so, and which options of its optimizers differ from theirs."""
    if not declare.together or not worker.clock:
        return 0
    step = worker.steps
    others = {
        f"{key}={has[key]:g}, not {now:g}"
        for p in declare.parameters
        for key, now in p.options.items()
        if (has := worker.options.get(p.name)) and isinstance(now, float) and has.get(key, now) != now
    }
    if worker.number == 0:
        text = f"training goes on at step {step}, with the servers' values: batches have to follow step.steps"
        if others:
            text += f", and so has the schedule of the optimizer ({', '.join(sorted(others))})"
        print(text, file=sys.stderr, flush=True)
    return step


def check_begins(step: int) -> None:
    """Raise ServerError before the first batch of a script that begins anew, where training goes on at a step that it
    has not asked for; 0: it may begin."""
    if step:
        raise ServerError(
            f"training goes on at step {step}, and the script begins with its first batch",
            why="all workers were started again, the servers have kept their values, and the script has not read "
            "step.steps",
            hint="for number in range(step.steps, len(batches)): step(batches[number]); or step.samples(…), which "
            "deals what is left",
        )


def check_goes_on(rest: Sequence[str], shares: bool) -> None:
    """Raise ServerError where a job cannot go on from the state of its servers alone. `rest` names parameters that are
    on none; `shares`: of steps that some workers may have pushed."""
    if launches() and (rest or shares):
        raise ServerError(
            "this job cannot go on from --server-state alone",
            why=SHARES if shares else f"{ALL_REDUCED}, and ended with them: {', '.join(rest[:5])}",
            hint="delete the folder, and leave out --resume-state; step.resume(path) loads a checkpoint",
        )


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


__all__ = [
    "ALL_REDUCED",
    "ALONE",
    "JOBS",
    "SHARES",
    "attempt",
    "begun",
    "check_begins",
    "check_first",
    "check_goes_on",
    "comes_late",
    "goes_on",
    "life",
    "transport",
]
