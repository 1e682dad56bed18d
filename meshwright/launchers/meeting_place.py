"""Ranks of one machine that a launcher of somebody else's started find one another, without a port.

Rank 0 listens at a socket in a folder that only its user can open, and tells each other rank the name of a new file; it
stops listening once all have come, so that nobody meets an earlier program of the same launcher there. The socket's
name is that of the job, else of the launcher's process: the nearest ancestor that is not itself a rank.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from meshwright.errors import LaunchError
from meshwright.launchers.environment import LAUNCHERS, Launched

RETRY_SECONDS = 0.02
ANSWER_SECONDS = 10.0  # for a rank that has connected to say which it is
LONGEST_ADDRESS = 100  # bytes of the path of a socket: the kernel takes 107


def file_of(mine: Launched, seconds: float) -> Path:
    """A file for all ranks of this job, in which nothing is yet. Raises LaunchError for ranks that do not come."""
    folder = _folder()
    path = folder / f"{mine.job or _launcher(mine)}.socket"
    return _give(mine, folder, path, seconds) if mine.rank == 0 else _take(mine, path, seconds)


def _folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"meshwright-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise LaunchError(
            f"{folder} cannot be trusted",
            why="ranks meet there, and others may write to it",
            hint=f"remove it, or chmod 700 {folder}",
        )
    return folder


def _launcher(mine: Launched) -> str:
    """The number and start of the process that started all ranks of this machine."""
    names = [f"{row.rank}=".encode() for row in LAUNCHERS if row.name == mine.launcher]
    pid = os.getppid()
    while pid > 1:
        try:
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # of another user, or no such file system
            break
        if not any(entry.startswith(name) for entry in entries for name in names):
            break
        pid = int(_fields(pid)[1])
    with contextlib.suppress(OSError):
        return f"{pid}-{_fields(pid)[19]}"
    return str(pid)


def _fields(pid: int) -> list[str]:
    """What the kernel says of a process, from its state on: see proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _give(mine: Launched, folder: Path, path: Path, seconds: float) -> Path:
    _sweep(folder)
    file, end = folder / f"{os.getpid()}-{secrets.token_hex(8)}.store", time.monotonic() + seconds
    missing = set(range(1, mine.world))
    with socket.socket(socket.AF_UNIX) as listening:
        new = folder / f"{os.getpid()}.new"
        new.unlink(missing_ok=True)
        with _address(new) as address:
            listening.bind(address)
        listening.listen(mine.world)
        new.rename(path)  # from now on it answers, whatever was there before
        try:
            while missing:
                listening.settimeout(max(0.1, end - time.monotonic()))
                with contextlib.suppress(OSError), _accepted(listening, missing, end, seconds) as other:
                    other.settimeout(ANSWER_SECONDS)
                    rank = int.from_bytes(_all_of(other, 4), "big")
                    other.sendall(len(file.name).to_bytes(4, "big") + file.name.encode())
                    missing.discard(rank)
        finally:
            path.unlink(missing_ok=True)
    return file


def _accepted(listening: socket.socket, missing: set[int], end: float, seconds: float) -> socket.socket:
    try:
        return listening.accept()[0]
    except TimeoutError:
        if time.monotonic() < end:
            raise
        ranks = ", ".join(map(str, sorted(missing)[:8]))
        raise LaunchError(
            f"ranks {ranks} did not arrive within {seconds:.0f} s",
            why="rank 0 waits for them on this machine",
        ) from None


def _take(mine: Launched, path: Path, seconds: float) -> Path:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError, EOFError), socket.socket(socket.AF_UNIX) as there:
            there.settimeout(ANSWER_SECONDS)
            with _address(path) as address:
                there.connect(address)
            there.sendall(mine.rank.to_bytes(4, "big"))
            return path.parent / _all_of(there, int.from_bytes(_all_of(there, 4), "big")).decode()
        time.sleep(RETRY_SECONDS)
    raise LaunchError(f"rank 0 did not arrive within {seconds:.0f} s", why=f"rank {mine.rank} waits for it")


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """The address of a socket in a folder, however long the folder's name is."""
    if len(os.fsencode(path)) <= LONGEST_ADDRESS:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _all_of(there: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = there.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _sweep(folder: Path) -> None:
    """Remove the files of rank 0s that have gone."""
    for file in folder.glob("*.store"):
        pid = file.name.partition("-")[0]
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            file.unlink(missing_ok=True)
        except (OSError, ValueError):
            pass


__all__ = ["file_of"]
