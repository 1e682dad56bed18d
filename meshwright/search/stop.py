"""When a search ends early: its time is up, the user pressed Ctrl-C, or the progress callback asked for it.

Nothing is raised. Loops look at a `Stop` between two pieces of work and return what they have.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Stop:
    """Whether a search should end now, which it does only once something that fits is known (`arm`).

    `seconds`: the time limit, from `begin` on. `interrupted`: the user or the callback asked for the end. `over`: the
    search was ended early.
    """

    seconds: float = math.inf
    interrupted: bool = False
    over: bool = False
    _armed: bool = False
    _ends: float = math.inf

    def begin(self) -> None:
        """Start the clock, unless it runs."""
        if self._ends == math.inf:
            self._ends = time.monotonic() + self.seconds

    def arm(self) -> None:
        """Something that fits is known."""
        self._armed = True

    def disarm(self) -> None:
        """Another search begins, or what was known is no answer after all."""
        self._armed = False

    def now(self, known: bool = False) -> bool:
        """Whether to end. `known`: something that may be the answer is at hand, though the search has not seen it."""
        if not (known or self._armed):
            return False
        if not self.interrupted and time.monotonic() < self._ends:
            return False
        self.over = True
        return True

    @contextmanager
    def on_ctrl_c(self) -> Iterator[None]:
        """Within, the first Ctrl-C asks for the end; a second one interrupts, as it did before."""
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(before):
            yield  # only the main thread hears signals
            return

        def heard(number: int, frame: FrameType | None) -> None:
            if self.interrupted:
                before(number, frame)
            self.interrupted = True

        signal.signal(signal.SIGINT, heard)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def never() -> bool:
    """For a search that nothing ends early."""
    return False


__all__ = ["Stop", "never"]
