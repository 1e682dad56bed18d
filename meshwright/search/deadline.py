"""A time limit of a search: what Ctrl-C does, by the clock.

It strikes once, between two pieces of work, and not before something is there to be answered.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


class TimeIsUp(KeyboardInterrupt):
    """The time that a search was given is over."""


@dataclass
class Deadline:
    """`seconds` from the first question on. `armed`: something that fits is there; `over`: it has struck."""

    seconds: float = math.inf
    armed: bool = False
    over: bool = False
    _ends: float = math.inf

    def begin(self) -> None:
        """Start the clock, unless it runs."""
        if self._ends == math.inf:
            self._ends = time.monotonic() + self.seconds

    def arm(self) -> None:
        """Something is there that may be answered."""
        self.armed = True

    def check(self) -> None:
        """Raise TimeIsUp where time is up and there is an answer, for the first time."""
        if self.armed and not self.over and time.monotonic() >= self._ends:
            self.over = True
            raise TimeIsUp


__all__ = ["Deadline", "TimeIsUp"]
