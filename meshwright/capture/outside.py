"""Record calls of the user's code to the outside of torch: clocks, system random numbers, files, input, the process.

They are recognised by the built-in function that runs, whatever name the code uses. Python's profile function sees
them. It is off within calls of torch, where a capture spends most of its time.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import linecache
import os
import random
import socket
import sys
import time
import types
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from meshwright.capture.reads import is_library

CLOCKS = [
    vars(time)[n + suffix]
    for n in ("time", "perf_counter", "monotonic", "process_time", "thread_time", "clock_gettime")
    for suffix in ("", "_ns")
    if hasattr(time, n + suffix)
]
CLOCKS += [time.localtime, time.gmtime, time.ctime, time.asctime, time.strftime]
CLOCKS += [datetime.datetime.now, datetime.datetime.utcnow, datetime.datetime.today, datetime.date.today]
SOURCES = [os.urandom, *(vars(uuid)[n] for n in ("_generate_time_safe",) if vars(uuid).get(n))]
FILES = [io.open, os.open, os.stat, os.listdir, os.scandir]
KINDS: dict[Any, str] = {
    **dict.fromkeys(CLOCKS, "clock"),
    **dict.fromkeys(SOURCES, "source"),
    **dict.fromkeys(FILES, "file"),
    input: "input",
    os.getpid: "process",
    os.getppid: "process",
    socket.gethostname: "process",
}
GLOBAL = random.random.__self__
SOCKETS = (socket.socket, socket.SocketType)
# What calls them for the user's code. Other libraries have clocks and files of their own: a log has the time.
ON_BEHALF = {
    *(
        "random",
        "secrets",
        "uuid",
        "pathlib",
        "datetime",
        "os",
        "posixpath",
        "genericpath",
        "socket",
        "http",
        "urllib",
    ),
    *(
        "numpy",
        "tempfile",
        "gzip",
        "zipfile",
        "glob",
        "requests",
        "urllib3",
        "torch.serialization",
        "safetensors",
    ),
}


class OutsideCalls:
    """Records calls of the user's code to the outside, with file and line.

    `generators`: random generators whose draws are recorded, beside that of Python's module `random`.
    """

    def __init__(self, generators: Iterable[Any] = ()) -> None:
        self._generators = {id(GLOBAL), *map(id, generators)}
        self.found: list[tuple[str, str, int]] = []
        self._on = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Record calls within the context, unless something else profiles the process."""
        if sys.getprofile() is not None:
            yield
            return
        self._on = True
        sys.setprofile(self._seen)
        try:
            yield
        finally:
            self._on = False
            sys.setprofile(None)

    def aside(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call torch without recording."""
        with self.paused():
            return call(*args, **kwargs)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing within the context, which runs no code of the user."""
        if self._on:
            sys.setprofile(None)
        try:
            yield
        finally:
            if self._on:
                sys.setprofile(self._seen)

    def _seen(self, frame: types.FrameType, event: str, called: Any) -> None:
        if event != "c_call":
            return
        what = KINDS.get(called)
        if what is None:
            holder = getattr(called, "__self__", None)
            what = "draw" if id(holder) in self._generators else "network"
            if what == "network" and not isinstance(holder, SOCKETS):
                return
        user = _user_of(frame)
        if user is not None:
            self.found.append((what, user.f_code.co_filename, user.f_lineno))


def _user_of(frame: types.FrameType | None) -> types.FrameType | None:
    """Return the user's frame that makes a call, directly or through a library."""
    while frame is not None and is_library(frame.f_code.co_filename):
        name = frame.f_globals.get("__name__", "")
        if name not in ON_BEHALF and name.partition(".")[0] not in ON_BEHALF:
            return None
        frame = frame.f_back
    return frame


def line_of(file: str, line: int) -> str:
    """Return a place in the user's code as text."""
    return f"{Path(file).name}:{line}  {linecache.getline(file, line).strip()}"


__all__ = ["OutsideCalls", "line_of"]
