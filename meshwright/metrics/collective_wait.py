"""How long a rank waits for others: the seconds in which it does nothing but a collective or a message."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from meshwright.core.collectives import REGISTERED
from meshwright.runtime.communicator import Communicator

BLOCKING = (*REGISTERED, "broadcast")
STARTS = (*(kind.start for kind in REGISTERED.values()), "send_start", "receive_start")


class _Timed:
    """A collective under way, whose wait is timed."""

    def __init__(self, work: Any, watch: Waiting) -> None:
        self._work, self._watch = work, watch

    def wait(self) -> Any:
        """Its result."""
        return self._watch.timed(self._work.wait)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class Waiting:
    """Adds up the seconds in which the processor waits in some communicators. What runs beside compute does not count,
    so this is what communication costs a step. On a GPU collectives are waited for by its stream: look at a trace.
    """

    def __init__(self, *comms: Communicator) -> None:
        self.seconds, self._comms = 0.0, comms
        self._inside = threading.local()
        for comm in comms:
            for name in BLOCKING:
                setattr(comm, name, functools.partial(self.timed, getattr(comm, name)))
            for name in STARTS:
                if hasattr(comm, name):  # a rank alone sends no messages
                    setattr(comm, name, self._started(getattr(comm, name)))

    def timed(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call it; the outermost call of a thread counts."""
        if getattr(self._inside, "now", False):
            return function(*args, **kwargs)
        self._inside.now = True
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - began
            self._inside.now = False

    def _started(self, start: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(start)
        def started(*args: Any, **kwargs: Any) -> Any:
            return _Timed(self.timed(start, *args, **kwargs), self)

        return started

    def end(self) -> None:
        """The communicators are as they were."""
        for comm in self._comms:
            for name in (*BLOCKING, *STARTS):
                vars(comm).pop(name, None)
