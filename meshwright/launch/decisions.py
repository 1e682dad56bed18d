"""Who takes part in an attempt over several machines, as the scheduler decides: this machine reports its ranks and gets
the answer; what changes elsewhere comes with other messages of the scheduler.

A scheduler that is away decides nothing: reports wait until it is back.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable

from meshwright.errors import LaunchError
from meshwright.scheduler import messages as m
from meshwright.scheduler.client import Client, Place

AGAIN_SECONDS = 0.2  # before a report that did not arrive is sent again
PATIENCE_SECONDS = 1.0
AWAY_SECONDS = 60.0  # for a scheduler that is away when no rank is left here


class Decisions:
    """Within a ``with`` block. `own`: the ranks of this machine. `standing`: at the beginning. `news`: notified of each
    change."""

    def __init__(
        self,
        place: Place,
        node: str,
        attempt: int,
        own: range,
        standing: m.Standing,
        news: threading.Condition,
    ) -> None:
        self.standing = self._given = standing
        self._node, self._attempt, self._own, self._news = node, attempt, own, news
        self._client = Client(place, PATIENCE_SECONDS)
        self._states: tuple[m.RankState, ...] = ()
        self._told: tuple[m.RankState, ...] = ()
        self._since = time.monotonic()  # when there was last nothing to report
        self._changed, self._over = threading.Event(), False
        self._thread = threading.Thread(target=self._tell, name="tells of ranks", daemon=True)

    def __enter__(self) -> Decisions:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._changed.set()

    @property
    def excluded(self) -> bool:
        """The others go on without this machine, which they took for lost."""
        return any(rank in self._own for rank in self.standing.away)

    @property
    def undecided(self) -> bool:
        """Whether the scheduler has not heard of what has happened here, and may yet, or `hear` has not returned its
        latest answer."""
        if self._given is not self.standing:
            return True
        return self._told != self._states and time.monotonic() - self._since < AWAY_SECONDS

    def hear(self, states: Iterable[m.RankState]) -> m.Standing:
        """Who takes part, as far as it is known. `states`: of the ranks here."""
        states = tuple(states)
        if states != self._states:
            if self._told == self._states:
                self._since = time.monotonic()
            self._states = states
            self._changed.set()
        self._given = self.standing
        return self._given

    def heard(self, standing: m.Standing | None) -> None:
        """The scheduler has said who takes part."""
        with self._news:
            if standing is not None and standing.version > self.standing.version:
                self.standing = standing
            self._news.notify_all()

    def _tell(self) -> None:
        while not self._over:
            self._changed.wait()
            self._changed.clear()
            states = self._states
            while states and self._told != states and not self._over:
                with contextlib.suppress(LaunchError):
                    self.heard(self._client.ask(m.Ranks(self._node, self._attempt, states), m.Standing))
                    self._told = states
                    break
                time.sleep(AGAIN_SECONDS)
                states = self._states
        self._client.close()


__all__ = ["Decisions"]
