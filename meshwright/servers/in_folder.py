"""Parameter servers of one machine are found in a folder of it."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from meshwright.errors import ServerError
from meshwright.scheduler.client import FILE
from meshwright.servers.places import JOB, LATE_WORKERS, LAUNCHER, PREFIX, beside, widen

LOSS = "loss"  # the end of the name of a file for each loss of a server's values


class InFolder:
    """Sockets and files in a folder that only the job's user can open: who can open it is trusted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def job(self) -> str:
        return (self.folder / JOB).read_text() if (self.folder / JOB).exists() else self.folder.name

    def begin(self, count: int, node: str) -> range:
        self._write("servers", str(count))
        return range(count)

    def runs(self, most: int) -> dict[int, bool]:
        return dict.fromkeys(self.numbers()[:most], True)

    def take_over(self, nodes: Sequence[str], gone: Sequence[int] = ()) -> None:
        """There is one machine."""

    def gone(self) -> Sequence[int]:
        return ()

    def lose(self, number: int, why: str) -> None:
        self._write(f"{number}.lost", why)

    def listen(self, number: int) -> socket.socket:
        path = self._address(number)
        path.unlink(missing_ok=True)
        made = socket.socket(socket.AF_UNIX)
        made.bind(str(path))
        made.listen(4096)
        return made

    def been(self, number: int) -> bool:
        return self._address(number).exists()

    def moved(self, number: int) -> bool:
        return False

    def lose_values(self, number: int) -> None:
        self._write(f"{number}.{os.getpid()}.{LOSS}", "")

    def beside(self, number: int) -> int | None:
        return beside([self.count()], number)

    def admit(self, made: socket.socket) -> socket.socket:
        return widen(made)

    def worker(self) -> int:
        for number in itertools.count(LATE_WORKERS):
            with contextlib.suppress(FileExistsError):
                (self.folder / f"worker{number}").touch(exist_ok=False)
                return number
        raise AssertionError

    def count(self) -> int:
        return int((self.folder / "servers").read_text())

    def numbers(self) -> list[int]:
        wanted = self.folder / "wanted"
        return list(range(max(self.count(), int(wanted.read_text()) if wanted.exists() else 0)))

    def want(self, count: int) -> None:
        self._write("wanted", str(count))

    def call(self, number: int) -> socket.socket:
        made = widen(socket.socket(socket.AF_UNIX))
        try:
            made.connect(str(self._address(number)))
        except OSError:
            made.close()
            raise
        return made

    def losses(self) -> int:
        return len(list(self.folder.glob(f"*.{LOSS}")))

    def lost(self, number: int) -> str:
        path = self.folder / f"{number}.lost"
        return path.read_text() if path.exists() else ""

    def place(self, number: int) -> str:
        return str(self._address(number))

    def close(self) -> None:
        """Nothing is open."""

    def _address(self, number: int) -> Path:
        return self.folder / f"{number}.sock"

    def _write(self, name: str, text: str) -> None:
        """Write a file that is there in full or not at all."""
        part = self.folder / f"{name}.part"
        part.write_text(text)
        part.rename(self.folder / name)


def running() -> list[Path]:
    """The folders of this user's jobs of this machine whose launcher runs, the newest first; one for each job."""
    found = []
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):
            if path.stat().st_uid == os.getuid() and runs(path):
                # launchers and processes started by hand have folders of their own, with the same scheduler
                scheduler = (path / FILE).read_bytes() if (path / FILE).exists() else path
                found.append((path.stat().st_mtime, path, scheduler))
    newest_first = sorted(found, key=lambda each: each[0], reverse=True)
    return list({scheduler: path for _, path, scheduler in reversed(newest_first)}.values())[::-1]


def runs(folder: Path) -> bool:
    """Return whether a folder is that of a job whose launcher runs."""
    with contextlib.suppress(OSError, ValueError):
        os.kill(int((folder / LAUNCHER).read_text()), 0)
        return True
    return False


def the_job(folder: Path | None, what: str, hint: str) -> Path:
    """The folder of a job of this machine: the one that is given, or else of the only job that runs. Raises
    ServerError, of `what` the user has asked, where none runs or several do."""
    jobs = running() if folder is None else [folder] if runs(folder) else []
    if not jobs:
        where = "here" if folder is None else f"in {folder}"
        raise ServerError(what, why=f"no job with parameter servers runs {where}", hint=hint)
    if len(jobs) > 1:
        why = f"{len(jobs)} jobs with parameter servers run here: {', '.join(map(str, jobs))}"
        raise ServerError(what, why=why, hint="one of these folders")
    return jobs[0]


__all__ = ["InFolder", "running", "runs", "the_job"]
