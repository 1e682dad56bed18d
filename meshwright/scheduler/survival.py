"""Which ranks of a job go on when one fails, and which are started again: the rules, without processes or sockets.

On one machine the launcher knows all ranks and asks these rules itself; over several the scheduler does, to which
launchers report their ranks.

A rank that is started again *comes*: it is ready when it can take part, is in the next generation, and has joined when
it has the state. Until then it is no help to anybody.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from meshwright.scheduler.messages import RankState, Standing

NO_STEP = "has not come to an mw.train_step that can go on without a rank"
LOST = 137  # the status of a rank whose node is lost, as of a process that was killed
NEWS = 32  # the latest lines, of which launchers print those that are new


@dataclass
class Budget:
    """How often something that failed may be started again: a rank alone, or all of them."""

    left: int


class Survival(msgspec.Struct):
    """`world`: how many ranks began. `states`: of all that ever were. `failed`: the job cannot go on."""

    world: int
    ranks: tuple[int, ...]
    states: dict[int, RankState]
    number: int = 0
    version: int = 0
    ended: set[int] = msgspec.field(default_factory=set)
    coming: set[int] = msgspec.field(default_factory=set)
    lost: set[int] = msgspec.field(default_factory=set)
    away: set[int] = msgspec.field(default_factory=set)
    over: bool = False
    failed: bool = False
    said: int = 0
    news: list[str] = msgspec.field(default_factory=list)

    @classmethod
    def of(cls, world: int) -> Survival:
        """That of a job that begins."""
        return cls(world, tuple(range(world)), {rank: RankState(rank) for rank in range(world)})

    def standing(self) -> Standing:
        """Who takes part now."""
        lives = {rank: state.life for rank, state in self.states.items() if state.life}
        ended, coming, lost, away = (
            tuple(sorted(s)) for s in (self.ended, self.coming, self.lost, self.away)
        )
        return Standing(
            self.version, self.number, self.ranks, ended, lives, coming, lost, away,
            self.over, self.said, tuple(self.news),
        )  # fmt: skip

    def note(self, states: Iterable[RankState]) -> None:
        """Take in what is known of some ranks, of their latest life."""
        for state in states:
            if (known := self.states.get(state.rank)) is not None and known.life == state.life:
                self.states[state.rank] = state

    def hear(self, states: Iterable[RankState], budget: Budget) -> None:
        """Take in what is known of some ranks, and decide. `budget`: what is left of it."""
        self.note(states)
        if self.over:
            return
        joined = {rank for rank in self.coming if self.states[rank].joined}
        self.coming -= joined
        self.lost -= joined  # if it is lost once more, that is another loss
        self.version += bool(joined)
        gone = [r for r, s in self.states.items() if s.status and (r not in self.lost or r in self.coming)]
        self.ended |= {rank for rank in self.ranks if self.states[rank].status == 0}
        left = tuple(rank for rank in self.ranks if rank not in gone and rank not in self.ended)
        able = [rank for rank in left if rank not in self.coming]
        needed = [rank for rank in gone if rank not in self.coming]
        if not able or (needed and not self._may_go_on(able, needed[0], budget)):
            self.over, self.failed = True, bool(needed)
            self.version += 1
            return
        again = [rank for rank in gone if self._go_on_without(rank, budget)]
        ready = [rank for rank in self.coming if rank not in left and self._is_ready(rank)]
        if left != self.ranks or ready:
            # who comes stands last: rank 0 keeps what it has of rank 0
            self.number, self.ranks = self.number + 1, (*left, *ready)
            self.version += 1
        for rank in again:
            self.coming.add(rank)
            self.states[rank] = RankState(rank, self.states[rank].life + 1)

    def lose(self, ranks: Iterable[int], text: str, budget: Budget) -> None:
        """The node of some ranks is lost: what has not ended there is lost, and nobody there starts it again."""
        mine = set(ranks)
        self.away |= mine
        self.version += 1
        live = [self.states[r] for r in sorted(mine) if self.states[r].status is None]
        if live and not self.over:
            gone = [msgspec.structs.replace(state, status=LOST, text=text) for state in live]
            before = self.said
            self.hear(gone, budget)
            if self.said == before and not self.over:
                self._say(f"{text}; the others go on without {_named([state.rank for state in live])}")

    def comes(self, ranks: Iterable[int], node: str) -> None:
        """The ranks of a node are started, for the first time or again, while the others go on."""
        mine = sorted(ranks)
        for rank in mine:
            known = self.states.get(rank)
            self.states[rank] = RankState(rank, 0 if known is None else known.life + 1)
        self.away -= set(mine)
        self.coming |= set(mine)
        self.lost |= set(mine)
        self._say(f"{node} joins: {_named(mine)}")

    def _is_ready(self, rank: int) -> bool:
        state = self.states[rank]
        return state.ready and state.status is None

    def _may_go_on(self, able: list[int], lost: int, budget: Budget) -> bool:
        """Whether the ranks that are left can go on; else say why not."""
        unable = next((rank for rank in able if not self.states[rank].goes_on), None)
        if unable is None:
            return True
        reason = self.states[unable].reason or f"rank {unable} {NO_STEP}"
        then = "all start again, from the checkpoint" if budget.left else "--max-restarts starts none again"
        self._say(f"{self.states[lost].text}: the others cannot go on without it; {then}")
        self._say(f"why: {reason}")
        return False

    def _go_on_without(self, rank: int, budget: Budget) -> bool:
        """Go on without a rank; return whether it is started again."""
        self.lost.add(rank)
        self.coming.discard(rank)
        self.version += 1
        if rank in self.away:
            return False
        again = budget.left > 0
        budget.left -= again
        then = "it is started again" if again else "it is not started again (--max-restarts)"
        self._say(f"{self.states[rank].text}: the others go on; {then}")
        return again

    def _say(self, line: str) -> None:
        self.news = [*self.news, line][-NEWS:]
        self.said += 1
        self.version += 1


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


__all__ = ["LOST", "NO_STEP", "Budget", "Survival"]
