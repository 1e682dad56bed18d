"""A job over machines that is disturbed: its machines and its scheduler may be killed and started again, its ranks are
found by their processes, and its steps by what they write (`bench.recovery_run`)."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.machines import Machine
from bench.recovery_lines import Found, Line, after, read

SCRIPT = Path(__file__).with_name("recovery_run.py")
PATIENCE_SECONDS = 180.0
WARM_STEPS = 10  # before an event
LAST_STEPS = 12  # after it
PORT = 29517


@dataclass
class Job:
    """A launched job, of which every machine may be started again. `options`: of `meshwright run`; `plan`: of
    `recovery_run`."""

    folder: Path
    places: list[Machine]
    options: tuple[object, ...]
    plan: tuple[str, ...] = ()
    ranks: int = 2
    machines: int = 1  # of `places`, with which it begins
    nnodes: str = ""  # MIN:MAX; else it is as many
    scheduler: tuple[object, ...] | None = (
        None  # options of one of its own, rather than that of the first machine
    )
    secret: str = field(default_factory=secrets.token_hex)
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.each = self.ranks // self.machines
        if self.scheduler is not None:
            self.schedule()
        for place in range(self.machines):
            self.start(place)

    def _popen(self, place: int, *words: object) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).parents[1])
        path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
        command = (*self.places[place].prefix, sys.executable, "-m", "meshwright.cli", *words)
        with (self.folder / f"stderr{place}").open("ab") as out:
            return subprocess.Popen(
                list(map(str, command)),
                env={**os.environ, "PYTHONPATH": path, "MESHWRIGHT_SECRET": self.secret},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    @property
    def master(self) -> str:
        return f"{self.places[0].address}:{PORT}"

    def start(self, place: int) -> None:
        """Start a machine, for the first time or again."""
        count = self.machines
        one = "--node-rank" if place < count else "--node-id"
        several = ("--nnodes", self.nnodes or count, one, place, "--master", self.master) if count > 1 else ()
        script = (SCRIPT, self.folder, 10**6, *self.plan)
        words = ("run", "--nproc", self.each, *several, *self.options, *script)
        self.running[place] = self._popen(place, *words)

    def schedule(self) -> None:
        """Start the scheduler, for the first time or again."""
        listen = ("--listen", self.master, "--state", self.folder / "kept", *(self.scheduler or ()))
        self.running[-1] = self._popen(0, "scheduler", *listen)

    def kill(self, place: int) -> float:
        """Kill a machine, its ranks with their launcher, or the scheduler (-1); when."""
        moment = time.time()
        os.killpg(self.running[place].pid, signal.SIGKILL)
        for rank in range(place * self.each, (place + 1) * self.each) if place >= 0 else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid(rank), signal.SIGKILL)
        self.running[place].wait()
        return moment

    def pid(self, rank: int) -> int:
        """The process of a rank."""
        return int((self.folder / f"pid{rank}").read_text())

    def lines(self) -> list[Line]:
        return read(self.folder)

    def until(self, true: Callable[[], object], what: str) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not true():
            ended = [p for p in self.running.values() if p.poll() not in (None, 0)]
            if ended or time.monotonic() > end:
                raise RuntimeError(f"the job ended before {what}\n{self.said()}")
            time.sleep(0.02)

    def warm(self, more: int = WARM_STEPS) -> frozenset[int]:
        """Wait until all ranks have done some steps; their processes."""
        begin = max((line.step for line in self.lines()), default=0)
        self.until(
            lambda: len({n.pid for n in self.lines() if n.step >= begin + more}) >= self.ranks, "it was warm"
        )
        return frozenset(self.pid(rank) for rank in range(self.ranks))

    def next(self, moment: float, new: Callable[[Line], bool]) -> Found:
        """What an event cost, once there has been a step since."""
        self.until(lambda: after(self.lines(), moment, new), "the next step")
        found = after(self.lines(), moment, new)
        assert found is not None
        return found

    def end(self, last: int = 0, seconds: float = PATIENCE_SECONDS) -> int:
        """Have it end by itself within some seconds, after a step or soon; its last step."""
        last = last or max(line.step for line in self.lines()) + LAST_STEPS
        (self.folder / "last").write_text(str(last))
        for process in self.running.values():
            if process.wait(seconds):
                raise RuntimeError(f"the job failed\n{self.said()}")
        return last

    def said(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("stderr*")))

    def close(self) -> None:
        for place, process in self.running.items():
            if process.poll() is None:
                self.kill(place)


__all__ = ["PATIENCE_SECONDS", "Job"]
