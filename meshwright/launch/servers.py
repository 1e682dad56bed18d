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
from collections.abc import Iterator, Sequence
from pathlib import Path

from meshwright.errors import LaunchError, ServerError
from meshwright.launch import server_state
from meshwright.launch.nodes import Nodes, master, trusted
from meshwright.launchers.dynamic_cluster import SERVER_COUNT
from meshwright.launchers.interfaces import resolve
from meshwright.scheduler.client import FILE, Place
from meshwright.scheduler.trust import SECRET, Trust
from meshwright.servers.by_scheduler import known, named
from meshwright.servers.in_folder import the_job
from meshwright.servers.meeting import meeting, meeting_by_hand
from meshwright.servers.places import FOLDER, JOB, JOINS, LAUNCHER, LAUNCHES, MACHINES, PREFIX, Meeting

POLL_SECONDS = 0.1
ASK_SECONDS = 0.5  # between two looks whether more servers are wanted
SPARE, NEWEST = "spare", "newest"
STATE = "state"  # the file with the folder of --server-state, of a job over several machines
# the file with the number of the newest attempt, the ranks that are gone from it, and the names of its machines
ATTEMPT = "attempt"
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
        self._attempt = ""  # the machines of the newest one, as `machines_are` wrote them
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
        while self._waits() and not self._ending.wait(POLL_SECONDS):
            pass
        for number in () if self._waits() else self._numbers or ():
            self.processes[number] = self._process(str(number))
        asked = 0.0
        while not self._ending.wait(POLL_SECONDS):
            with contextlib.suppress(LaunchError):  # the scheduler is away for a moment
                self._restart()
                if self._machines_change() or time.monotonic() > asked + ASK_SECONDS:
                    asked = time.monotonic()
                    self._run_mine()
        self._meeting.close()

    def _waits(self) -> bool:
        """Return whether it is not known yet if the folder is that of this job (`attempt_begins`)."""
        return bool(self._node) and self.state is not None and not (self.folder / ATTEMPT).exists()

    def _machines_change(self) -> bool:
        """Return whether other machines take part now, perhaps without some whose servers have a copy on others."""
        path = self.folder / ATTEMPT
        if not self._replicas or not path.exists() or (text := path.read_text()) == self._attempt:
            return False
        first, *nodes = text.splitlines()
        self._meeting.take_over(nodes, [int(rank) for rank in first.split()[1:]])
        self._attempt = text
        return True

    def _run_mine(self) -> None:
        """Start the servers that `ServerStep.use_servers` asks for, and those of machines that are lost; end those that
        another machine has now."""
        for number, here in self._meeting.runs(MOST_SERVERS).items():
            if here and number not in self.processes:
                self.processes[number] = self._start(number)
            elif not here and number in self.processes:
                process = self.processes.pop(number)
                process.kill()
                process.wait()
                self._lost.discard(number)

    def _restart(self) -> None:
        """Start servers again that were killed, and let workers know of those that have failed."""
        for number, process in self.processes.items():
            status = process.poll()
            if status is None or number in self._lost:
                continue
            how = signal.Signals(-status).name if status < 0 else f"exit code {status}"
            if status < 0:
                values = "" if self._outlive else ", without its values"
                print(
                    f"parameter server {number} ended by {how}: it is started again{values}", file=sys.stderr
                )
                self.processes[number] = self._start(number)
                continue
            if status:  # else another machine has started it
                self._meeting.lose(number, f"it ended by {how}, and its values with it")
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


def check_joins() -> None:
    """Before this machine joins others: raise LaunchError where their job runs already, and --server-state has the
    values of another one."""
    folder = Path(os.environ.get(FOLDER, ""))
    if FOLDER in os.environ and (folder / STATE).exists() and (job := known(Place.read(folder / FILE))):
        server_state.check(Path((folder / STATE).read_text()), job)


def attempt_begins(attempt: int, nodes: Sequence[str]) -> None:
    """Note the machines of an attempt for the servers of this one, if it has any. Raises LaunchError where
    --server-state has the values of another job."""
    folder = Path(os.environ.get(FOLDER, ""))
    if FOLDER not in os.environ or not nodes or JOINS in os.environ:
        return
    if (folder / STATE).exists():
        server_state.claim(
            Path((folder / STATE).read_text()), named(Place.read(folder / FILE)), 0, alone=False
        )
    machines_are(attempt, nodes)


def machines_are(attempt: int, nodes: Sequence[str], gone: Sequence[int] = ()) -> None:
    """Note the machines that take part now: the servers of all others are lost. `gone`: their ranks, without which
    the others go on."""
    folder = Path(os.environ.get(FOLDER, ""))
    if FOLDER not in os.environ or not nodes or JOINS in os.environ:
        return
    part, text = folder / f"{ATTEMPT}.part", "\n".join((" ".join(map(str, (attempt, *gone))), *nodes))
    if not (folder / ATTEMPT).exists() or (folder / ATTEMPT).read_text() != text:
        part.write_text(text)
        part.rename(folder / ATTEMPT)


@contextlib.contextmanager
def started(
    count: int | None,
    state: Path | None,
    nodes: Nodes | None = None,
    replicas: int = 0,
    *,
    resumes: bool = False,
) -> Iterator[None]:
    """Servers of this machine within the block; ranks find them, and those of other machines, by the environment.
    `count`: None for a job without servers, or with those that MS_SERVER_NUM counts. `replicas`: how many other servers
    have a copy of each. `resumes`: go on from `state`, which a launcher before this one has left. Raises LaunchError.
    """
    if count is None and nodes is not None and (by_hand := servers_by_hand()):
        place = Place(nodes.host, nodes.port, Trust(trusted(nodes), nodes.certificates))
        with _environment({FOLDER: str(meeting_by_hand(place, by_hand))}):
            yield
        return
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
    if resumes and state is None:
        raise LaunchError(
            "--resume-state without --server-state",
            why="it goes on from what servers have written there",
            hint="--server-state FOLDER",
        )
    if resumes and nodes is not None:
        raise LaunchError(
            "--resume-state over several machines",
            why="servers are numbered as their machines come, and the scheduler that knew it has ended",
            hint=f"another --server-state; a new job resumes from a checkpoint: {server_state.RESUMES}",
        )
    state = None if state is None else server_state.made(state)
    with server_state.locked(state if nodes is None else None):
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))  # only this user can open it
        try:
            (folder / LAUNCHER).write_text(str(os.getpid()))
            if nodes is not None:
                Place(nodes.host, nodes.port, Trust(trusted(nodes), nodes.certificates)).write(folder / FILE)
                (folder / MACHINES).write_text(str(nodes.count))
                if state is not None:
                    (folder / STATE).write_text(str(state.resolve()))
            elif state is not None and resumes:
                owner = server_state.go_on(state)
                (folder / JOB).write_text(owner.job)
                (folder / LAUNCHES).write_text(str(owner.launches))
                count = max(count, owner.servers)
            elif state is not None:
                server_state.claim(state, folder.name, count, alone=True)
            servers = Servers(count, folder, state, "" if nodes is None else nodes.id, replicas)
            try:
                with _environment({FOLDER: str(folder)}):
                    yield
            finally:
                servers.end()
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def added(
    job: str,
    place: int | None = None,
    secret: Path | None = None,
    certificates: Path | None = None,
    *,
    insecure: bool = False,
) -> Iterator[None]:
    """Within the block, ranks are more workers of a job that runs; `job`: the folder of its servers, ``newest``, or
    ``HOST:PORT`` of its scheduler, which is trusted by the rest. `place`: the number of the first of these ranks, None
    for any that no other has. Raises LaunchError."""
    if ":" in job and "/" not in job:
        at = folder_of(job, secret, certificates, insecure=insecure)
    else:
        hint = (
            "--add-to newest, the folder in MESHWRIGHT_SERVERS of its workers, or HOST:PORT of its scheduler"
        )
        try:
            at = the_job(None if job == NEWEST else Path(job), f"--add-to {job}", hint)
        except ServerError as error:
            raise LaunchError(error.what, why=error.why, hint=error.hint) from None
    with _environment({FOLDER: str(at), JOINS: "any" if place is None else str(place)}):
        yield


def folder_of(scheduler: str, secret: Path | None, certificates: Path | None, *, insecure: bool) -> Path:
    """A folder by which processes of this machine find the servers of a job: at ``HOST:PORT`` is its scheduler. With
    MS_SERVER_NUM, as many servers are waited for. Raises LaunchError."""
    host, port = master(scheduler, "--add-to")
    resolve(host, port, "--add-to")
    nodes = Nodes(1, host, port, secret=secret, insecure=insecure, certificates=certificates)
    place = Place(host, port, Trust(trusted(nodes), certificates))
    return meeting_by_hand(place, servers_by_hand())


def servers_by_hand() -> int:
    """How many servers of a job no launcher starts, as the environment says; 0 if it does not."""
    text = os.environ.get(SERVER_COUNT, "0")
    if not text.isdecimal():
        raise LaunchError(f"{SERVER_COUNT} is {text!r:.40}", why="it is a whole number, at least 0")
    return int(text)


@contextlib.contextmanager
def _environment(names: dict[str, str]) -> Iterator[None]:
    """Variables within the block."""
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


__all__ = ["Servers", "added", "attempt_begins", "check_joins", "folder_of", "machines_are", "started"]
