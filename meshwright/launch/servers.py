"""Parameter servers of a job on this machine: started before its ranks, started again when killed, ended after them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from meshwright.errors import LaunchError, path_from

FOLDER = "MESHWRIGHT_SERVERS"  # see `meshwright.servers.sockets`, which imports torch
POLL_SECONDS = 0.1
SPARE = "spare"
MOST_SERVERS = 64  # of which each has a block of every table


class Servers:
    """`folder`: of their sockets. `state`: where they keep what must outlive them, None: nothing does."""

    def __init__(self, count: int, folder: Path, state: Path | None) -> None:
        self.folder, self.state = folder, state
        (folder / "servers").write_text(str(count))
        self.processes = [self._process(str(number)) for number in range(count)]
        # one that has loaded everything: a killed server is back in a moment
        self._spare = self._process(SPARE) if state is not None else None
        self._ending = threading.Event()
        self._watch = threading.Thread(target=self._restart, name="parameter servers", daemon=True)
        self._watch.start()

    def _process(self, place: str) -> subprocess.Popen[bytes]:
        kept = [] if self.state is None else [str(self.state)]
        words = [sys.executable, "-m", "meshwright.launch.server_process", str(os.getpid()), str(self.folder)]
        env = {"OMP_NUM_THREADS": "1", **os.environ}
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

    def _restart(self) -> None:
        """Start servers again that were killed, or let workers know that their values are lost."""
        while not self._ending.wait(POLL_SECONDS):
            self._start_more()
            for number, process in enumerate(self.processes):
                status = process.poll()
                if status is None or (self.folder / f"{number}.lost").exists():
                    continue
                how = signal.Signals(-status).name if status < 0 else f"exit code {status}"
                if self.state is not None and status < 0:
                    print(f"parameter server {number} ended by {how}: it is started again", file=sys.stderr)
                    self.processes[number] = self._start(number)
                else:
                    why = (
                        f"it ended by {how}, and its values with it; with --server-state a killed one goes on"
                    )
                    part = self.folder / f"{number}.part"
                    part.write_text(why)
                    part.rename(self.folder / f"{number}.lost")

    def _start_more(self) -> None:
        """Start the servers that `ServerStep.use_servers` asks for."""
        try:
            wanted = int((self.folder / "wanted").read_text())
        except (OSError, ValueError):  # nobody does, or it is being written
            return
        while len(self.processes) < min(wanted, MOST_SERVERS):
            self.processes.append(self._start(len(self.processes)))

    def end(self) -> None:
        self._ending.set()
        self._watch.join()
        every = [*self.processes, *([] if self._spare is None else [self._spare])]
        for process in every:
            process.kill()
        for process in every:
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


@contextlib.contextmanager
def started(count: int, state: Path | None) -> Iterator[None]:
    """Servers within the block; ranks find them by the environment. Raises LaunchError."""
    if not count:
        yield
        return
    if not 0 < count <= MOST_SERVERS:
        raise LaunchError(f"--servers is {count}", why=f"a job has 1 to {MOST_SERVERS}", hint="--servers 2")
    if state is not None:
        hint = "--server-state with a folder that you own"
        state = path_from(state, f"--server-state {state}", LaunchError, hint)
        try:
            state.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise LaunchError(
                f"cannot write to {state}", why=error.strerror or str(error), hint=hint
            ) from None
    folder = Path(tempfile.mkdtemp(prefix="meshwright-servers-"))  # only this user can open it
    before = os.environ.get(FOLDER)
    servers = Servers(count, folder, state)
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


__all__ = ["Servers", "started"]
