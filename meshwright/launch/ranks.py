"""The processes of one attempt: started, looked at, and stopped.

Each rank has a session of its own, so that Ctrl-C reaches the launcher alone and a signal to a rank its children too. A
rank whose script raised says so in a file (`meshwright.runtime.lost_peer`): it may take its time to leave, and may
wait for others meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from meshwright.heartbeat import RAISED
from meshwright.launch.failure import RankEnd

LOOK_SECONDS = 0.02  # between two looks at ranks that have been asked to stop


class Ranks:
    """`commands`: by rank, what it executes and its environment. `records`: the folder of what ranks say of themselves.
    `logs`: the folder of their logs."""

    def __init__(
        self, commands: Mapping[int, tuple[Sequence[str], Mapping[str, str]]], records: Path, logs: Path
    ) -> None:
        self.records, self.logs = records, logs
        self._commands = dict(commands)
        self._stopped: set[int] = set()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for rank, (command, env) in commands.items():
                self._processes[rank] = subprocess.Popen(command, env=env, start_new_session=True)
        except BaseException:
            self.stop(signal.SIGKILL, 0.0)
            raise

    def end(self, rank: int) -> None:
        """Kill what is left of a rank that has failed, with what it had started."""
        with contextlib.suppress(OSError):
            os.killpg(self._processes[rank].pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[rank].wait(1.0)

    def start_again(self, rank: int) -> None:
        """Start a rank anew."""
        command, env = self._commands[rank]
        self._processes[rank] = subprocess.Popen(command, env=env, start_new_session=True)

    def running(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank, process in self._processes.items() if process.poll() is None]

    def raised(self, rank: int) -> bool:
        """Return whether a rank has said that its script raised."""
        return (self.records / f"rank{rank}{RAISED}").exists()

    def ended_well(self) -> list[int]:
        """The ranks that have ended without an error."""
        return [rank for rank, p in self._processes.items() if p.poll() == 0 and not self.raised(rank)]

    def failed(self, besides: Collection[int] = ()) -> bool:
        """Return whether a rank has ended with an error, or is about to, `besides` some."""
        return any(
            p.poll() or self.raised(rank) for rank, p in self._processes.items() if rank not in besides
        )

    def stop(self, number: int, seconds: float, now: Callable[[], bool] = lambda: False) -> None:
        """Ask all that run to stop, and kill those that have not within a time, or as soon as `now` is true. A rank
        that has raised is on its way out and not asked."""
        for rank in self.running():
            if not self.raised(rank):
                self._signal(rank, number)
        end = time.monotonic() + seconds
        while self.running() and time.monotonic() < end and not now():
            time.sleep(LOOK_SECONDS)
        for rank in self.running():
            self._signal(rank, signal.SIGKILL)
        for process in self._processes.values():
            # a process that the kernel cannot end now (uninterruptible sleep) must not hold up the launcher
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(1.0, seconds))

    def _signal(self, rank: int, number: int) -> None:
        self._stopped.add(rank)
        with contextlib.suppress(OSError):
            os.killpg(self._processes[rank].pid, number)

    def failures(self) -> list[RankEnd]:
        """How those ended that did not end well."""
        ends = []
        for rank, process in self._processes.items():
            code = process.poll()
            code = -signal.SIGKILL if code is None else code
            if code == 0 and self.raised(rank):
                code = 1
            if code:
                ends.append(RankEnd(rank, code, self.logs / f"rank{rank}.log", rank in self._stopped))
        return ends


__all__ = ["Ranks"]
