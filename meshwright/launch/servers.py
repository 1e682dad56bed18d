"""Parameter servers of this machine: started before its ranks, started again when killed, ended after them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from meshwright.errors import LaunchError, path_from
from meshwright.launch.nodes import Nodes, trusted
from meshwright.scheduler.client import FILE, Place
from meshwright.scheduler.trust import SECRET, Trust
from meshwright.servers.meeting import FOLDER, JOINS, LAUNCHER, MACHINES, PREFIX, Meeting, meeting, running

POLL_SECONDS = 0.1
ASK_SECONDS = 0.5  # between two looks whether more servers are wanted
SPARE, NEWEST = "spare", "newest"
MOST_SERVERS = 64  # of which each has a block of every table


class Servers:
    """`count`: of this machine, which is called `node`. `folder`: in which its processes find how they meet others.
    `state`: where servers keep what must outlive them, None: nothing does. `replicas`: how many other servers have a
    copy of each."""

    def __init__(self, count: int, folder: Path, state: Path | None, node: str, replicas: int = 0) -> None:
        self.folder, self.state, self._node, self._replicas = folder, state, node, replicas
        self._outlive = state is not None or replicas > 0
        self._meeting: Meeting = meeting(folder)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._lost: set[int] = set()
        # of one machine the ranks may ask at once; of several, a scheduler has to be there
        self._numbers = None if node else self._meeting.begin(count, node)
        # one that has loaded everything: a killed server is back in a moment
        self._spare = self._process(SPARE) if self._outlive and count else None
        self._ending = threading.Event()
        self._watch = threading.Thread(
            target=self._follow, args=(count,), name="parameter servers", daemon=True
        )
        self._watch.start()

    def _process(self, place: str) -> subprocess.Popen[bytes]:
        kept = [str(self._replicas), *([] if self.state is None else [str(self.state)])]
        words = [sys.executable, "-m", "meshwright.launch.server_process", str(os.getpid()), str(self.folder)]
        env = {"OMP_NUM_THREADS": "1", **{k: v for k, v in os.environ.items() if k != SECRET}}
        stdin = subprocess.PIPE if place == SPARE else subprocess.DEVNULL
        return subprocess.Popen([*words, place, *kept], stdin=stdin, env=env)

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        """A server: the spare process, if there is one, which is replaced."""
        spare = self._spare
        if spare is None or spare.poll() is not None:
            return self._process(str(number))
        assert spare.stdin is not None
        spare.stdin.write(f"{number}\n".encode())
        spare.stdin.close()
        self._spare = self._process(SPARE)
        return spare

    def _follow(self, count: int) -> None:
        """Start the servers, again those that are killed, and more when they are asked for."""
        while self._numbers is None and not self._ending.is_set():
            with contextlib.suppress(LaunchError):  # the scheduler is not there yet
                self._numbers = self._meeting.begin(count, self._node)
        for number in self._numbers or ():
            self.processes[number] = self._process(str(number))
        asked = 0.0
        while not self._ending.wait(POLL_SECONDS):
            with contextlib.suppress(LaunchError):  # the scheduler is away for a moment
                self._restart()
                if time.monotonic() > asked + ASK_SECONDS:
                    asked = time.monotonic()
                    self._start_more()
        self._meeting.close()

    def _start_more(self) -> None:
        """Start the servers that `ServerStep.use_servers` asks for."""
        for number in self._meeting.more(MOST_SERVERS):
            if number not in self.processes and self._meeting.starts(number):
                self.processes[number] = self._start(number)

    def _restart(self) -> None:
        """Start servers again that were killed, or let workers know that their values are lost."""
        for number, process in self.processes.items():
            status = process.poll()
            if status is None or number in self._lost:
                continue
            how = signal.Signals(-status).name if status < 0 else f"exit code {status}"
            if self._outlive and status < 0:
                print(f"parameter server {number} ended by {how}: it is started again", file=sys.stderr)
                self.processes[number] = self._start(number)
                continue
            if status:  # else another machine has started it
                kept = "with --replicas 1 or --server-state a killed one goes on"
                self._meeting.lose(number, f"it ended by {how}, and its values with it; {kept}")
            self._lost.add(number)

    def end(self) -> None:
        self._ending.set()
        self._watch.join()
        every = [*self.processes.values(), *([] if self._spare is None else [self._spare])]
        for process in every:
            process.kill()
        for process in every:
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


@contextlib.contextmanager
def started(
    count: int | None, state: Path | None, nodes: Nodes | None = None, replicas: int = 0
) -> Iterator[None]:
    """Servers of this machine within the block; ranks find them, and those of other machines, by the environment.
    `count`: None for a job without servers. `replicas`: how many other servers have a copy of each. Raises LaunchError.
    """
    if count is None or (not count and nodes is None):
        yield
        return
    if not 0 <= count <= MOST_SERVERS:
        raise LaunchError(f"--servers is {count}", why=f"a job has 1 to {MOST_SERVERS}", hint="--servers 2")
    if replicas not in (0, 1) or (replicas and nodes is None and count < 2):
        why = (
            "a copy is on another server, and there is one"
            if replicas == 1
            else "a server has one copy or none"
        )
        raise LaunchError(f"--replicas is {replicas}", why=why, hint="--servers 2 --replicas 1")
    if state is not None:
        hint = "--server-state with a folder that you own"
        state = path_from(state, f"--server-state {state}", LaunchError, hint)
        try:
            state.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise LaunchError(
                f"cannot write to {state}", why=error.strerror or str(error), hint=hint
            ) from None
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))  # only this user can open it
    (folder / LAUNCHER).write_text(str(os.getpid()))
    if nodes is not None:
        Place(nodes.host, nodes.port, Trust(trusted(nodes), nodes.certificates)).write(folder / FILE)
        (folder / MACHINES).write_text(str(nodes.count))
    before = os.environ.get(FOLDER)
    servers = Servers(count, folder, state, "" if nodes is None else nodes.id, replicas)
    os.environ[FOLDER] = str(folder)
    try:
        yield
    finally:
        servers.end()
        shutil.rmtree(folder, ignore_errors=True)
        if before is None:
            del os.environ[FOLDER]
        else:
            os.environ[FOLDER] = before


@contextlib.contextmanager
def added(job: str) -> Iterator[None]:
    """Within the block, ranks are more workers of a job that runs; `job`: the folder of its servers, or ``newest``.
    Raises LaunchError."""
    found = [Path(job)] if job != NEWEST else running()
    if not found or not (found[0] / LAUNCHER).exists():
        raise LaunchError(
            f"--add-to {job}",
            why="no job with parameter servers runs there",
            hint="--add-to newest, or the folder in MESHWRIGHT_SERVERS of its workers",
        )
    names = {FOLDER: str(found[0]), JOINS: "1"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


__all__ = ["Servers", "added", "started"]
