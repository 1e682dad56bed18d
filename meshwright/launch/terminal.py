"""Show rank 0 on the terminal while it runs, byte for byte, so that progress bars draw as if it ran alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

POLL_SECONDS = 0.04  # a little faster than the eye, and than rich's ten pictures a second
SHOW_CURSOR = b"\x1b[?25h"
RESET = b"\x1b[0m"


def shown_env() -> dict[str, str]:
    """Return environment variables that describe the terminal to rank 0, whose own output is a file."""
    if not sys.stdout.isatty():
        return {}
    size = shutil.get_terminal_size()
    colour = {} if os.environ.get("NO_COLOR") else {"FORCE_COLOR": "1"}
    # TTY_COMPATIBLE: rich (from 14) then moves the cursor, which FORCE_COLOR alone need not allow
    return {"COLUMNS": str(size.columns), "LINES": str(size.lines), "TTY_COMPATIBLE": "1", **colour}


@contextlib.contextmanager
def shown(log: Path) -> Iterator[None]:
    """Copy what is appended to `log` to standard output until the block ends, then the rest of it."""
    out = sys.stdout.buffer
    stop = threading.Event()
    start = log.stat().st_size if log.exists() else 0
    last = [b"\n"]

    def copy(source: BinaryIO) -> None:
        while chunk := source.read(1 << 16):
            out.write(chunk)
            last[0] = chunk[-1:]
        out.flush()

    def follow() -> None:
        while not log.exists() and not stop.is_set():
            stop.wait(POLL_SECONDS)
        if not log.exists():
            return
        try:
            with log.open("rb", buffering=0) as source:
                source.seek(start)
                while not stop.is_set():
                    copy(source)
                    stop.wait(POLL_SECONDS)
                copy(source)
        except BrokenPipeError:
            # Nobody reads any more (`| head`): the job goes on, its logs have it all.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    sys.stdout.flush()
    thread = threading.Thread(target=follow, name="rank 0 to terminal", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        with contextlib.suppress(BrokenPipeError):
            if sys.stdout.isatty():  # a rank that was killed leaves the cursor as its progress bar had it
                out.write(RESET + SHOW_CURSOR)
            if last[0] not in (b"\n", b"\r"):
                out.write(b"\n")
            out.flush()
