"""The folder in this machine's memory that outlives its ranks: made when a rank wants it, gone with the launcher.

On several machines others send copies there, and fetch what was lost elsewhere (`meshwright.scheduler.copies`). No port
is open before a rank asks for it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import msgspec

from meshwright.scheduler.copies import FOUND, WANTED, CopyServer, Found
from meshwright.scheduler.trust import Trust

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "meshwright-copies-"


def memory_folder(run_id: str) -> Path:
    """The folder of a job in the memory of its machine, or, where there is no such file system, among the temporary
    ones. `reaper` removes it, too, where the launcher was killed."""
    usable = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)
    return (SHARED_MEMORY if usable else Path(tempfile.gettempdir())) / f"{PREFIX}{run_id}"


class Keeper:
    """The folder of one launcher, within a ``with`` block. `trust`: of the job."""

    def __init__(self, run_id: str, trust: Trust) -> None:
        self.folder, self._trust = memory_folder(run_id), trust
        self._stack = contextlib.ExitStack()
        self._found: Found | None = None

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def look(self, records: Path, address: str) -> None:
        """Tell the ranks of an attempt where the folder is, if one wants to know. `address`: by which other machines
        reach this one; empty where there are none."""
        if not (records / WANTED).exists() or (records / FOUND).exists():
            return
        if self._found is None:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            self._found = Found(str(self.folder))
            if address:
                server = self._stack.enter_context(CopyServer(self.folder, self._trust, address))
                self._found = Found(str(self.folder), address, server.port)
        beside = records / f"{FOUND}.new"
        beside.write_bytes(msgspec.json.encode(self._found))
        beside.replace(records / FOUND)


__all__ = ["Keeper", "memory_folder"]
