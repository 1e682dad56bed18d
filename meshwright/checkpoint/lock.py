"""One job at a time saves into a folder: who does is written in a file of it, which the kernel locks for its process.

Two jobs would remove each other's unfinished saves and oldest checkpoints. Rank 0 takes the lock with the first save,
and holds it as long as the step lives. The kernel lets go of it however the process ends, so a job that was killed is
followed by the next one at once. A host's word about a process of another host is not trusted: not every network file
system passes locks on. A process of the same job takes the lock from another one, whatever became of that: where a job
goes on or begins again without a rank, it takes no more part in saves.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import time
import weakref
from pathlib import Path

from meshwright import heartbeat
from meshwright.checkpoint.safetensors_io import cannot_write
from meshwright.errors import CheckpointError

LOCK = ".lock"
OWNER_BYTES = 4096  # what is read of a lock
ELSEWHERE = (errno.EACCES, errno.EAGAIN)  # another process has it
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)  # of this file system


class Lock:
    """The right to save into a folder, for this process, as long as the object is held."""

    def __init__(self, folder: Path, handle: int) -> None:
        self._file, self._handle = folder / LOCK, handle
        weakref.finalize(self, _let_go, self._file, handle, os.getpid())

    def stands(self) -> bool:
        """Return whether its file is still there, which somebody may have removed with the folder."""
        return _is(self._file, self._handle)


_held: weakref.WeakValueDictionary[tuple[Path, int], Lock] = weakref.WeakValueDictionary()


def lock(folder: Path) -> Lock:
    """The lock of a folder that exists; that which this process has already, where it has. Raises CheckpointError."""
    key = folder.resolve(), os.getpid()
    found = _held.get(key)
    if found is None or not found.stands():
        found = _held[key] = Lock(folder, _taken(folder / LOCK))
    return found


def _taken(path: Path) -> int:
    """The handle of a file that is locked and says whose it is."""
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise cannot_write(path, error) from None
        try:
            free = _free(handle)
            owner = _owner(os.pread(handle, OWNER_BYTES, 0))
            here = owner.get("host") == socket.gethostname()
            if free is None:  # no lock tells: of this host the list of processes does
                free = not here or not _runs(owner.get("pid"))
            if not free or (owner and not here):
                if not owner.get("of") or owner["of"] != heartbeat.job():
                    raise _refused(path, owner, runs=not free)
                path.unlink(missing_ok=True)
            elif _is(path, handle):
                os.ftruncate(handle, 0)
                os.pwrite(handle, json.dumps(_mine()).encode(), 0)
                return handle
            os.close(handle)  # it, or its owner, has been removed: another one is made
        except OSError as error:
            os.close(handle)
            raise cannot_write(path, error) from None
        except BaseException:
            os.close(handle)
            raise


def _is(path: Path, handle: int) -> bool:
    """Return whether a path is that of an open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except OSError:
        return False


def _free(handle: int) -> bool | None:
    """Lock a file: whether that went well, None where the file system has no locks."""
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of this process, not of those that it forks
    except OSError as error:
        if error.errno in NO_LOCKS:
            return None
        if error.errno not in ELSEWHERE:
            raise
        return False
    return True


def _mine() -> dict[str, str | int]:
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    mine: dict[str, str | int] = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
    return mine | {"job": sys.argv[0] or "python", "of": heartbeat.job()}


def _owner(text: bytes) -> dict[str, object]:
    """Parse the owner that a lock names; empty for a lock that was not written completely."""
    with contextlib.suppress(ValueError):
        found = json.loads(text)
        if isinstance(found, dict):
            return found
    return {}


def _runs(pid: object) -> bool:
    if not isinstance(pid, int) or pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def _refused(path: Path, owner: dict[str, object], *, runs: bool) -> CheckpointError:
    who = "another job"
    if owner:
        job, pid, host, since = (str(owner.get(k, "?"))[:200] for k in ("job", "pid", "host", "since"))
        who = f"{job} (process {pid} on {host}, since {since})"
    if runs:
        return CheckpointError(
            f"{who} saves into {str(path.parent)!r}",
            why="two jobs would remove each other's checkpoints",
            hint="another folder, or end that job",
        )
    return CheckpointError(
        f"{who} saved into {str(path.parent)!r} and did not report its end",
        why="whether it still runs cannot be seen from this host",
        where=str(path),
        hint=f"if it has ended: rm {str(path)!r}",
    )


def _let_go(path: Path, handle: int, pid: int) -> None:
    if pid == os.getpid():  # and not in a child that was forked
        with contextlib.suppress(OSError):
            if _is(path, handle):
                path.unlink()
        with contextlib.suppress(OSError):
            os.close(handle)


__all__ = ["LOCK", "Lock", "lock"]
