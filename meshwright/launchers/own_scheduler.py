"""Ranks on several machines that a launcher of somebody else's started: rank 0 starts a scheduler, at which all meet.

They need one secret: that of the environment, else a key of the user's own in the home folder, which clusters share
between their machines. Without either the user has to say that anybody may take part.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import tempfile
import time
from pathlib import Path

from meshwright.errors import LaunchError
from meshwright.launchers.environment import Launched
from meshwright.launchers.start_scheduler import start_scheduler, why_ended
from meshwright.scheduler import messages as m
from meshwright.scheduler.client import Client, Place
from meshwright.scheduler.trust import INSECURE, SECRET, SECRET_FILE, Trust, find_secret

SHARED_SECONDS = 60.0  # until a file that one machine has written is seen on all
LOOK_SECONDS = 0.2
_scheduler: list[subprocess.Popen[bytes]] = []


def place_of(mine: Launched, seconds: float) -> Place | None:
    """Where the ranks of this job meet, once they can; None where anybody may take part, as the user has said. Raises
    LaunchError without a secret, for one that is wrong, and when nobody listens within some seconds."""
    secret = _secret(mine)
    if not secret:
        return None
    place = Place(mine.address, mine.port, Trust(secret))
    if mine.rank == 0 and not _scheduler:
        _start(mine, secret)
        place = Place("localhost", mine.port, Trust(secret))
    client = Client(place, patience=seconds)
    client.ask(m.Count(), m.Number)
    client.close()
    return place


def _start(mine: Launched, secret: str) -> None:
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        log = Path(folder) / "scheduler.log"
        # at all addresses: a machine may know its own name as a loopback address
        process = start_scheduler({"host": "", "port": mine.port, "world": mine.world}, secret, log)
        if process.poll() is not None:
            hint = f"MASTER_PORT=PORT in the environment of all ranks; {INSECURE}=1 needs no scheduler"
            raise LaunchError(why_ended(log), hint=hint)
        _scheduler.append(process)


def _secret(mine: Launched) -> str:
    """The secret of the job; empty where the user has said that there is none."""
    if os.environ.get(SECRET) or os.environ.get(SECRET_FILE):
        return find_secret(None, make=mine.rank == 0)
    if os.environ.get(INSECURE) == "1":
        return ""
    path = own_key()
    if mine.rank == 0 and not path.exists():
        _make(path)
    end = time.monotonic() + SHARED_SECONDS
    while not path.exists():
        if time.monotonic() > end:
            raise _lacking(
                f"{path} is not there: rank 0 has made it on its machine, whose home folder is another one"
            )
        time.sleep(LOOK_SECONDS)
    return find_secret(path, make=False)


def own_key() -> Path:
    """The key of this user."""
    config = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(config) / "meshwright" / "key"


def _make(path: Path) -> None:
    """Write the key at once, so that nobody reads half of it; another job may have been quicker."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, new = tempfile.mkstemp(dir=path.parent)  # which only this user can open
        with os.fdopen(handle, "w") as out:
            out.write(secrets.token_urlsafe(32) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(new, path)
        Path(new).unlink()
    except OSError as error:
        raise _lacking(f"{path} cannot be written: {error.strerror or error}") from None


def _lacking(why: str) -> LaunchError:
    return LaunchError(
        "several machines, and no secret",
        why=why,
        hint=f"{SECRET}=$(openssl rand -hex 32), exported before srun or mpirun -x {SECRET}, or {SECRET_FILE}=FILE; in "
        f"a network that nobody else reaches: {INSECURE}=1",
    )


__all__ = ["own_key", "place_of"]
