"""End every process of a job, also those that a rank started, also when the launcher itself was killed.

The processes are found by the run id that torch's agent puts into each rank's environment, which children inherit:
sessions and process groups of their own do not hide them. Run as ``python -I -S reaper.py RUN_ID FOLDER`` it waits
until its standard input ends, which the kernel does for it when the launcher is gone, and then sweeps, and removes what
the job has in the machine's memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROUNDS = 100  # sweeps before giving up on processes that the kernel cannot end (uninterruptible sleep)


def members(run_id: str) -> list[int]:
    """The ids of all living processes of a job, this one excepted. Empty where there is no /proc."""
    mark = b"TORCHELASTIC_RUN_ID=" + run_id.encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or not ours to read
            pid = int(entry.name)
            if pid != os.getpid() and mark in (entry / "environ").read_bytes():
                found.append(pid)
    return found


def sweep(run_id: str) -> int:
    """Kill what is left of a job until two looks in a row find nothing; the number of processes killed."""
    killed: set[int] = set()
    quiet = 0
    for _ in range(ROUNDS):
        found = members(run_id)
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        quiet = 0 if found else quiet + 1
        if quiet == 2:
            break
        time.sleep(0.02)
    return len(killed)


@contextlib.contextmanager
def guard(run_id: str, folder: Path) -> Iterator[None]:
    """End all processes of the job `run_id`, and remove its folder, when the context or this process ends, however that
    happens."""
    command = [sys.executable, "-I", "-S", __file__, run_id, str(folder)]
    # A session of its own: Ctrl-C in the terminal, or a kill of the launcher's process group, does not reach it.
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as warden:
        try:
            yield
        finally:
            sweep(run_id)
            assert warden.stdin is not None
            warden.stdin.close()


def main() -> None:
    run_id, folder = sys.argv[1:]
    sys.stdin.buffer.read()
    sweep(run_id)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
