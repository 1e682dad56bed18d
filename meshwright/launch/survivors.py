"""The ranks of this machine in a job that goes on without those that fail: what is known of them, and what becomes of
them.

`meshwright.scheduler.survival` has the rules, `meshwright.heartbeat.generation` the file that ranks read, and
`meshwright.train.survive` what they do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import msgspec

from meshwright.heartbeat import RAISED, generation
from meshwright.heartbeat.generation import GOES_ON, JOINED, READY, RESTARTS, Generation
from meshwright.launch import failure
from meshwright.launch.failure import RankEnd
from meshwright.launch.ranks import Ranks
from meshwright.scheduler.messages import RankState, Standing


class Decides(Protocol):
    """Who decides which ranks take part: `Alone`, or the scheduler (`Member`)."""

    @property
    def standing(self) -> Standing:
        """Who takes part when the attempt begins."""
        ...

    def hear(self, states: Iterable[RankState]) -> Standing:
        """Who takes part now. `states`: of the ranks of this machine."""
        ...


class Survivors:
    """`numbers`: the ranks of this machine, of `world`. `folder`: in which they say what they can. `hung`: those that
    were ended since they hang, and what was found."""

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        numbers: Sequence[int],
        world: int,
        decides: Decides,
        hung: MutableMapping[int, str] | None = None,
    ) -> None:
        self.folder, self.ranks, self.numbers, self.world = folder, ranks, numbers, world
        self._decides, standing = decides, decides.standing
        self._hung = {} if hung is None else hung
        self.now = _generation(standing)
        self.lost: set[int] = set(standing.lost) & set(numbers)  # ranks whose end is made up for
        self._said = standing.said
        self._lives = {rank: standing.lives.get(rank, 0) for rank in numbers}
        self._ends: dict[int, RankState] = {}  # of ranks that have ended
        self._left: set[int] = set()  # ranks that are not started again
        self._logs: dict[int, Path] = {}  # of ranks that have failed, until it is said where they are
        self.said_where = False  # so the logs are to be kept
        generation.write(folder, self.now)

    def over(self) -> bool:
        """Look at the ranks; return whether the attempt is over: nobody with the state of the job is left."""
        standing = self._decides.hear(self._states())
        for line in standing.news[len(standing.news) - max(0, standing.said - self._said) :]:
            print(line, file=sys.stderr, flush=True)
        self._said = max(self._said, standing.said)
        self.lost = set(standing.lost) & set(self.numbers)
        for rank in self.lost - set(standing.coming) - self._left:
            self._left.add(rank)
            self._say_where(rank)
            self._end(rank)
        again = [rank for rank in self.numbers if standing.lives.get(rank, 0) > self._lives[rank]]
        for rank in again:
            self._say_where(rank)
            self._end(rank)
        if standing.number > self.now.number:
            self.now = _generation(standing)
            generation.write(self.folder, self.now)
        for rank in again:  # which shall not find itself in the generation that it was lost in
            self._lives[rank] = standing.lives[rank]
            self._ends.pop(rank, None)
            self.ranks.start_again(rank)
        return standing.over

    def _states(self) -> list[RankState]:
        running, failed = set(self.ranks.running()), {e.rank: e for e in self.ranks.failures()}
        for rank in self.numbers:
            raised = self.ranks.raised(rank)  # it is on its way out, which may take long
            if rank not in self._ends and (rank not in running or raised):
                end = failed.get(rank)
                status, text = (0, "") if end is None else self._ended(end, raised)
                self._ends[rank] = msgspec.structs.replace(self._words(rank), status=status, text=text)
        return [self._ends.get(rank) or self._words(rank) for rank in self.numbers]

    def _ended(self, end: RankEnd, raised: bool) -> tuple[int, str]:
        end = replace(end, exit_code=1) if raised else end
        self._logs[end.rank] = end.log
        return end.status, self._hung.pop(end.rank, None) or failure.explain(end, [end], self.world).what

    def _say_where(self, rank: int) -> None:
        if (log := self._logs.pop(rank, None)) is not None:
            self.said_where = True
            print(f"  where: log {log}", file=sys.stderr, flush=True)

    def _words(self, rank: int) -> RankState:
        """What a rank that runs has said of itself."""
        goes_on, ready, joined = (self._said_by(rank, word) for word in (GOES_ON, READY, JOINED))
        path = self.folder / f"rank{rank}{RESTARTS}"
        reason = "" if goes_on or not path.exists() else path.read_text("utf-8")
        return RankState(rank, self._lives[rank], None, "", goes_on, reason, ready, joined)

    def _said_by(self, rank: int, word: str) -> bool:
        return (self.folder / f"rank{rank}{word}").exists()

    def _end(self, rank: int) -> None:
        """End what is left of a rank that is lost, and forget what it said."""
        self.ranks.end(rank)
        for word in (READY, RAISED, GOES_ON, JOINED):
            (self.folder / f"rank{rank}{word}").unlink(missing_ok=True)


def _generation(standing: Standing) -> Generation:
    return Generation(standing.number, standing.ranks, standing.ended)


__all__ = ["Survivors"]
