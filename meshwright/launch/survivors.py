"""A job that goes on without the ranks that failed: who takes part now, and who is started again.

See `meshwright.heartbeat.generation` for the file that ranks read, and `meshwright.train.survive` for what they do.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from meshwright.errors import LaunchError
from meshwright.heartbeat import RAISED, generation
from meshwright.heartbeat.generation import GOES_ON, JOINED, READY, RESTARTS, Generation
from meshwright.launch import failure
from meshwright.launch.failure import RankEnd
from meshwright.launch.ranks import Ranks
from meshwright.launch.span import Budget

NO_STEP = "has not come to an mw.train_step that can go on without a rank"


class Survivors:
    """The ranks of an attempt that go on without one another.

    A rank that is started again *comes*: it says READY when it could take part, is in the next generation, and says
    JOINED when it has the state. Until then it is no help to anybody."""

    def __init__(self, folder: Path, ranks: Ranks, count: int, budget: Budget) -> None:
        self.folder, self.ranks, self.budget, self.count = folder, ranks, budget, count
        self.now = Generation(0, tuple(range(count)))
        self.survived: set[int] = set()  # ranks whose end is made up for
        self._coming: set[int] = set()
        self._ended: set[int] = set()  # with exit code 0
        generation.write(folder, self.now)

    def over(self) -> bool:
        """Look at the ranks; return whether the attempt is over: nobody with the state of the job is left."""
        joined = {rank for rank in self._coming if self._said(rank, JOINED)}
        self._coming -= joined
        self.survived -= joined  # if it is lost once more, that is another loss
        running = set(self.ranks.running())
        failed = {e.rank: e for e in self.ranks.failures()}
        ends = {
            rank: end for rank, end in failed.items() if rank not in self.survived or rank in self._coming
        }
        # who raised is on its way out, which may take long
        lost = [rank for rank in ends if rank not in running or self.ranks.raised(rank)]
        self._ended |= {r for r in self.now.ranks if r not in running and r not in failed}
        left = tuple(r for r in self.now.ranks if r not in lost and r not in self._ended)
        able = [rank for rank in left if rank not in self._coming]
        if not able:
            return True
        if any(rank not in self._coming for rank in lost) and not self._may_go_on(able, ends[lost[0]]):
            return True
        again = [rank for rank in lost if self._survive(rank, ends[rank])]
        ready = [rank for rank in self._coming & running if rank not in left and self._said(rank, READY)]
        if left != self.now.ranks or ready:
            for rank in ready:
                self._forget(rank, READY, RAISED)
            # who comes stands last: rank 0 keeps what it has of rank 0
            self.now = Generation(self.now.number + 1, (*left, *ready), tuple(sorted(self._ended)))
            generation.write(self.folder, self.now)
        for rank in again:  # which shall not find itself in the generation that it was lost in
            self._coming.add(rank)
            self.ranks.start_again(rank)
        return False

    def _may_go_on(self, able: list[int], end: RankEnd) -> bool:
        """Whether the ranks that are left can go on; else say why not."""
        unable = next((rank for rank in able if not self._said(rank, GOES_ON)), None)
        if unable is None:
            return True
        path = self.folder / f"rank{unable}{RESTARTS}"
        reason = path.read_text("utf-8") if path.exists() else f"rank {unable} {NO_STEP}"
        then = (
            "all start again, from the checkpoint" if self.budget.left else "--max-restarts starts none again"
        )
        print(f"{self._named(end)}: the others cannot go on without it; {then}", file=sys.stderr)
        print(f"why: {reason}", file=sys.stderr, flush=True)
        return False

    def _survive(self, rank: int, end: RankEnd) -> bool:
        """Go on without a rank; return whether it is started again."""
        self.survived.add(rank)
        self._coming.discard(rank)
        again = self.budget.left > 0
        self.budget.left -= again
        then = "it is started again" if again else "it is not started again (--max-restarts)"
        print(f"{self._named(end)}: the others go on; {then}", file=sys.stderr, flush=True)
        self.ranks.end(rank)
        self._forget(rank, READY, RAISED, GOES_ON, JOINED)
        return again

    def _named(self, end: RankEnd) -> str:
        if self.ranks.raised(end.rank):
            end = replace(end, exit_code=1)
        error: LaunchError = failure.explain(end, [end], self.count)
        return error.what

    def _said(self, rank: int, word: str) -> bool:
        return (self.folder / f"rank{rank}{word}").exists()

    def _forget(self, rank: int, *words: str) -> None:
        for word in words:
            (self.folder / f"rank{rank}{word}").unlink(missing_ok=True)


__all__ = ["Survivors"]
