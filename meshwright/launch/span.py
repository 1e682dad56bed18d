"""The ranks that this machine has in an attempt, and who decides how an attempt ends where there is one machine."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwright.launch.outcome import Outcome
from meshwright.launch.port import LOOPBACK
from meshwright.launchers.interfaces import loopback
from meshwright.scheduler.messages import RankState, Standing
from meshwright.scheduler.survival import Budget, Survival
from meshwright.scheduler.trust import Trust


@dataclass(frozen=True, slots=True)
class Span:
    """Ranks `first` to `first + nproc - 1` of `world`, on machine `place` of `places`. `attempt` counts from 0.
    `master`: where scripts meet that know torch alone; None: this attempt makes a store on the loopback address.
    `interface`: the network through which the other machines are reached. `address`: by which they reach this one.
    `nodes`: the names of all machines, in order; empty for one alone."""

    nproc: int
    world: int
    attempt: int = 0
    first: int = 0
    place: int = 0
    places: int = 1
    master: int | None = None
    interface: str = ""
    address: str = ""
    nodes: tuple[str, ...] = ()

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.nproc)

    def rank_env(self, local: int, port: int) -> dict[str, str]:
        """The environment variables of a rank, under the names that `torchrun` uses."""
        rank = str(self.first + local)
        return {
            "RANK": rank,
            "LOCAL_RANK": str(local),
            "ROLE_RANK": rank,
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.nproc),
            "ROLE_WORLD_SIZE": str(self.world),
            "GROUP_RANK": str(self.place),
            "GROUP_WORLD_SIZE": str(self.places),
            "ROLE_NAME": "rank",
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there: no rank makes one
        }


class Alone:
    """One machine: nobody else to wait for. `Member` (`membership.py`) is the same for one of several."""

    def __init__(self, nproc: int, restarts: int) -> None:
        self._nproc, self.budget, self.trust, self.place = nproc, Budget(restarts), Trust(), None
        self.job = uuid.uuid4().hex
        self._attempt, self._survival = -1, Survival.of(nproc)

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self) -> Span:
        """The ranks of this machine in the next attempt."""
        self._attempt, self._survival = self._attempt + 1, Survival.of(self._nproc)
        return Span(self._nproc, self._nproc, self._attempt, interface=loopback())

    def over(self) -> bool:
        """Return whether another machine has ended the attempt."""
        return False

    def grows(self) -> bool:
        """Return whether the attempt has ended for another machine to take part."""
        return False

    @property
    def standing(self) -> Standing:
        """Who takes part, where the job goes on without ranks that fail."""
        return self._survival.standing()

    def hear(self, states: Iterable[RankState]) -> Standing:
        """Who takes part, with what is known of the ranks now."""
        self._survival.hear(states, self.budget)
        return self.standing

    def undecided(self) -> bool:
        """Return whether it is not known yet how the job goes on."""
        return False

    def pause(self, seconds: float) -> None:
        """Wait for a time, or until there is something new."""
        time.sleep(seconds)

    def stopped(self, status: int) -> None:
        """Tell the others that the job has been asked to stop."""

    @property
    def away(self) -> Sequence[int]:
        """No machine can be lost."""
        return ()

    def present(self, nodes: Sequence[str]) -> Sequence[str]:
        """This machine is all."""
        return nodes

    def end(self, outcome: Outcome, *, final: bool = False) -> tuple[Outcome, bool]:
        """How the attempt has ended for all machines, and whether the job begins again. `final`: it cannot."""
        again = outcome.failure is not None and self.budget.left > 0 and not final
        self.budget.left -= again
        return outcome, again


__all__ = ["Alone", "Span"]
