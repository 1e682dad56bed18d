"""The folder of ``--server-state`` as launchers see it: whose it is, and whether this job may use it."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from meshwright.errors import LaunchError, path_from

OWNER = "job.json"
HINT = "--server-state with a folder that you own"
RESUMES = "step.save and step.resume in the script"
BOOT = Path("/proc/sys/kernel/random/boot_id")


class Owner(msgspec.Struct, frozen=True):
    """The `job` that writes in a folder; on one machine by `servers`, numbered from 0. `launches`: how often a launcher
    went on from it; `boot`: of this machine."""

    job: str
    servers: int
    launches: int = 0
    boot: str = ""


def made(state: Path) -> Path:
    """The folder, which is there. Raises LaunchError."""
    state = path_from(state, f"--server-state {state}", LaunchError, HINT)
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise LaunchError(f"cannot write to {state}", why=error.strerror or str(error), hint=HINT) from None
    return state


@contextlib.contextmanager
def locked(state: Path | None) -> Iterator[None]:
    """Keep other launchers of this machine out. Raises LaunchError if one is in."""
    if state is None:
        yield
        return
    with (state / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise LaunchError(
                f"--server-state {state} belongs to a job that runs",
                why="two jobs would write over each other",
                hint="another folder; meshwright run --add-to newest adds workers to that job",
            ) from None
        yield


def claim(state: Path, job: str, servers: int, *, alone: bool) -> None:
    """Write down whose folder it is. `alone`: the job has one machine. Raises LaunchError."""
    check(state, job, alone=alone)
    owner = _owner(state)
    if owner is None or owner.job != job:
        _write(state, Owner(job, servers, boot=_boot()))


def check(state: Path, job: str, *, alone: bool = False) -> None:
    """Raise LaunchError for a folder in which the servers of another job have written."""
    owner = _owner(state)
    if (owner is not None and owner.job == job) or not (written := _written(state)):
        return
    last = time.strftime("%Y-%m-%d %H:%M", time.localtime(max(path.stat().st_mtime for path in written)))
    why = "servers go on from this folder as long as their launcher runs"
    new = f"delete the folder, or name another one; a new job resumes from a checkpoint: {RESUMES}"
    raise LaunchError(
        f"--server-state {state} has the values of another job, last written at {last}",
        why=why if alone else f"{why}; no later job can",
        hint=f"the same command with --resume-state goes on from these values. Else {new}" if alone else new,
    )


def go_on(state: Path) -> Owner:
    """Go on from what the servers of an earlier launcher have written. Raises LaunchError."""
    owner = _owner(state)
    if owner is None or not _written(state):
        raise LaunchError(
            f"--resume-state: --server-state {state} has nothing to go on from",
            why="no server has written there",
            hint="leave out --resume-state",
        )
    if owner.boot != _boot():
        raise LaunchError(
            f"--resume-state: the machine was started again since --server-state {state} was written",
            why="the last requests may be missing on its disk, of each server others",
            hint=f"delete the folder; a new job resumes from a checkpoint: {RESUMES}",
        )
    names = {path.parent.name for path in _written(state)}
    count = max(owner.servers, *(int(name) + 1 for name in names))
    if lost := [number for number in range(count) if str(number) not in names]:
        raise LaunchError(
            f"--resume-state: --server-state {state} lacks server {lost[0]} of {count}",
            why="its values would be those of the beginning",
            hint=f"delete the folder; a new job resumes from a checkpoint: {RESUMES}",
        )
    owner = Owner(owner.job, count, owner.launches + 1, owner.boot)
    _write(state, owner)
    return owner


def _written(state: Path) -> list[Path]:
    return [*state.glob("[0-9]*/*.log"), *state.glob("[0-9]*/*.safetensors")]


def _owner(state: Path) -> Owner | None:
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((state / OWNER).read_bytes(), type=Owner)
    return None


def _write(state: Path, owner: Owner) -> None:
    part = state / f"{OWNER}.part"
    part.write_bytes(msgspec.json.encode(owner))
    part.rename(state / OWNER)


def _boot() -> str:
    with contextlib.suppress(OSError):
        return BOOT.read_text().strip()
    return ""


__all__ = ["Owner", "check", "claim", "go_on", "locked", "made"]
