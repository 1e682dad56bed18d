"""When a search ends early: its time is up, the user pressed Ctrl-C, or the progress callback asked for it.

Loops look at a `Stop` between two pieces of work and return what they have. A time limit is kept beside them
(`search/deadline.py`), with the best that was offered by then.
"""

from __future__ import annotations

import functools
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any


@dataclass
class Stop:
    """Decides when a search ends early, which it does only once something that fits is known (`arm`).

    `seconds`: the time limit, from `begin` on; `ends`: that instant of `time.monotonic`; `asked`: when the user or the
    callback asked for the end (`interrupt`). `over`: the search was ended early. `offered` makes the best answer so
    far. `stage`: what the search does now. `keeps`: of how many answers it remembers, quickest first, with the seconds
    of their step, what makes them (`seen`).
    """

    seconds: float = math.inf
    over: bool = False
    offered: Callable[[], Any] | None = None
    stage: str = ""
    keeps: int = 0
    seen: list[tuple[float, Callable[[], Any]]] = field(default_factory=list)
    ends: float = math.inf
    asked: float = math.inf
    _armed: bool = False
    _offered_seconds: float = math.inf
    _parts: int = 0
    _answers: list[Callable[[Any], Any]] = field(default_factory=list)

    def begin(self) -> None:
        """Start the clock, unless it runs."""
        if self.ends == math.inf:
            self.ends = time.monotonic() + self.seconds

    @property
    def interrupted(self) -> bool:
        """Whether the user or the callback asked for the end."""
        return self.asked < math.inf

    def interrupt(self) -> None:
        """Ask for the end."""
        self.asked = min(self.asked, time.monotonic())

    def arm(self) -> None:
        """Something that fits is known."""
        self._armed = True

    def offer(self, seconds: float, found: object) -> None:
        """Something that fits is known, of a step of so many seconds: the answer if nothing quicker follows in time."""
        self._armed = True
        if self._parts:
            return
        made = functools.partial(_passed, found, tuple(reversed(self._answers)))
        if seconds < self._offered_seconds:
            self._offered_seconds, self.offered = seconds, made
        if self.keeps:
            self.seen = sorted([*self.seen, (seconds, made)], key=lambda one: one[0])[: self.keeps]

    @contextmanager
    def answered_by(self, answer: Callable[[Any], Any]) -> Iterator[None]:
        """Within, `answer` makes what is asked for of what is offered; the innermost goes first."""
        self._answers.append(answer)
        try:
            yield
        finally:
            self._answers.pop()

    def disarm(self) -> None:
        """Another search begins, or what was known is no answer after all."""
        self._armed = False
        self._offered_seconds, self.offered = math.inf, None
        self.seen = []

    @contextmanager
    def of_a_part(self) -> Iterator[None]:
        """Within, a part of the answer is searched: what fits there is offered to nobody."""
        self._parts += 1
        try:
            yield
        finally:
            self._parts -= 1

    def now(self, known: bool = False) -> bool:
        """True if the search should end. `known`: a possible answer is at hand, though the search has not seen it."""
        if not (known or self._armed):
            return False
        if not self.interrupted and time.monotonic() < self.ends:
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
            self.interrupt()

        signal.signal(signal.SIGINT, heard)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def _passed(found: Any, answers: tuple[Callable[[Any], Any], ...]) -> Any:
    return functools.reduce(lambda made, answer: answer(made), answers, found)


def never() -> bool:
    """For a search that nothing ends early."""
    return False


__all__ = ["Stop", "never"]
