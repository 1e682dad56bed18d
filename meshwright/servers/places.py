"""What a process of a job asks of the place where its parameter servers are found: a folder, or the scheduler.

Launchers use this too, so nothing here imports torch.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Protocol

from meshwright.errors import ServerError

FOLDER = "MESHWRIGHT_SERVERS"  # the environment variable with the folder of a job's servers
JOINS = "MESHWRIGHT_JOINS"  # the environment variable of workers that come while others train
LATE_WORKERS = 1024  # the number of the first of these
PREFIX = "meshwright-servers-"  # of its name, among temporary files
MACHINES = "machines"  # the file in it with the number of machines of a job, at least
BY_HAND = "by-hand"  # the file in it of a job whose servers no launcher starts: each counts as a machine
LAUNCHER = "launcher"  # the file in it with the launcher's process id
JOB = "job"  # the file in it with the job's name, where that is not the folder's: a launcher went on from a state
LAUNCHES = "launches"  # the file in it that says how often
BUFFER_BYTES = 4 << 20
# A machine that has gone closes no connection: after so many seconds without an answer it is closed here.
UNANSWERED_SECONDS = 15
SILENT_SECONDS = 9  # so, too, where another machine may have a server by then: as --node-time-out with copies


class Meeting(Protocol):
    """`job`: its name, the same for all of its processes."""

    @property
    def job(self) -> str: ...

    # ---- a launcher

    def begin(self, count: int, node: str) -> range:
        """Say that this machine starts so many servers; their numbers. Raises LaunchError without a scheduler."""
        ...

    def runs(self, most: int) -> dict[int, bool]:
        """By number, below `most`, whether this machine is the one that runs a server now."""
        ...

    def take_over(self, nodes: Sequence[str], gone: Sequence[int] = ()) -> None:
        """Give servers of machines that are not among `nodes` to these, if any has servers. `gone`: the workers that
        ran there."""
        ...

    def lose(self, number: int, why: str) -> None:
        """Say that a server will not come again."""
        ...

    # ---- a server

    def listen(self, number: int) -> socket.socket:
        """The socket of a server, which others find from now on."""
        ...

    def been(self, number: int) -> bool:
        """Return whether a server of this number has listened before."""
        ...

    def moved(self, number: int) -> bool:
        """Return whether another machine has taken over this server at some time."""
        ...

    def gone(self) -> Sequence[int]:
        """The workers that are gone with their machines. Raises LaunchError without a scheduler."""
        ...

    def lose_values(self, number: int) -> None:
        """Say that all that a server had is lost. Raises LaunchError without a scheduler."""
        ...

    def beside(self, number: int) -> int | None:
        """The server that has the copy of another one, of another machine if any has servers; the same at all times.
        None while the machines have not said how many they start. Raises ServerError if there is no other."""
        ...

    def admit(self, made: socket.socket) -> socket.socket:
        """A connection that was accepted, from somebody who belongs to the job. Raises OSError, EOFError, Malformed."""
        ...

    # ---- a worker

    def worker(self) -> int:
        """A number for a worker that comes while others train, which no other has."""
        ...

    def count(self) -> int:
        """The number of servers that the job begins with. Raises ServerError where a machine does not say it."""
        ...

    def numbers(self) -> list[int]:
        """The numbers of all servers, those that came later included."""
        ...

    def want(self, count: int) -> None:
        """Ask for so many servers in all."""
        ...

    def call(self, number: int) -> socket.socket:
        """A connection to a server. Raises OSError where there is none, LaunchError for a stranger."""
        ...

    def losses(self) -> int:
        """How often values were lost: workers that are started after that begin anew."""
        ...

    def lost(self, number: int) -> str:
        """Why a server will not come again; empty for one that may."""
        ...

    def place(self, number: int) -> str:
        """Where a server is, for people."""
        ...

    def close(self) -> None: ...


def widen(made: socket.socket) -> socket.socket:
    """A socket with room for large messages."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        made.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    if made.family != socket.AF_UNIX:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        close_after(made, UNANSWERED_SECONDS)
    return made


def close_after(made: socket.socket, seconds: int) -> None:
    """Close a connection over a network after so many seconds in which the other side does not answer."""
    if made.family != socket.AF_UNIX:
        options = {
            socket.TCP_KEEPIDLE: seconds // 3,
            socket.TCP_KEEPINTVL: seconds // 3,
            socket.TCP_KEEPCNT: 2,
            socket.TCP_USER_TIMEOUT: 1000 * seconds,
        }
        for option, value in options.items():
            made.setsockopt(socket.IPPROTO_TCP, option, value)


def beside(counts: list[int], number: int) -> int:
    """The server for the copy of another one, by the counts of all machines: of the next machine that has any."""
    firsts = [sum(counts[:machine]) for machine in range(len(counts) + 1)]
    mine, place = number % len(counts), number // len(counts)  # of one that was started later
    for machine, first in enumerate(firsts[:-1]):
        if first <= number < firsts[machine + 1]:
            mine, place = machine, number - first
    others = [(mine + step) % len(counts) for step in range(1, len(counts))]
    for machine in (x for x in others if counts[x]):
        return firsts[machine] + place % counts[machine]
    other = firsts[mine] + (place + 1) % max(counts[mine], 1)
    if other == number:
        raise ServerError(
            f"parameter server {number} has no other for its copy",
            hint="--servers 2, here or on another machine",
        )
    return other


__all__ = [
    "FOLDER",
    "JOINS",
    "LATE_WORKERS",
    "LAUNCHER",
    "MACHINES",
    "PREFIX",
    "SILENT_SECONDS",
    "Meeting",
    "beside",
    "close_after",
    "widen",
]
