"""Where the processes of a job find its parameter servers: in a folder of one machine, or by the scheduler of several.

What a folder holds for one machine, the scheduler's keys hold for several.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from meshwright.scheduler.client import FILE, Place
from meshwright.servers.by_scheduler import ByScheduler
from meshwright.servers.in_folder import InFolder
from meshwright.servers.places import BY_HAND, LAUNCHER, MACHINES, PREFIX, Meeting


def meeting(folder: Path) -> Meeting:
    """The meeting that a launcher has made in a folder."""
    return ByScheduler(folder) if (folder / FILE).exists() else InFolder(folder)


def meeting_by_hand(place: Place, servers: int) -> Path:
    """A folder for a process that no launcher has started; it is removed when this process ends. `servers`: how many
    others start, each on a machine of its own as far as anybody knows; 0: as many as there are now."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))  # only this user can open it
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / LAUNCHER).write_text(str(os.getpid()))
    place.write(folder / FILE)
    (folder / MACHINES).write_text(str(max(servers, 1)))
    (folder / BY_HAND).touch()
    return folder


__all__ = ["meeting", "meeting_by_hand"]
