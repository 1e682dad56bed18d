"""The ranks that this machine has in an attempt, and who decides how an attempt ends where there is one machine."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.launch.outcome import Outcome
from meshwright.launch.port import LOOPBACK
from meshwright.launchers.interfaces import loopback
from meshwright.scheduler.trust import Trust


@dataclass(frozen=True, slots=True)
class Span:
    """Ranks `first` to `first + nproc - 1` of `world`, on machine `place` of `places`. `attempt` counts from 0.
    `master`: where scripts meet that know torch alone; None: this attempt makes a store on the loopback address.
    `interface`: the network through which the other machines are reached. `address`: by which they reach this one."""

    nproc: int
    world: int
    attempt: int = 0
    first: int = 0
    place: int = 0
    places: int = 1
    master: int | None = None
    interface: str = ""
    address: str = ""

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


@dataclass
class Budget:
    """How often something that failed may be started again: a rank alone, or all of them."""

    left: int


class Alone:
    """One machine: nobody else to wait for. `Member` (`membership.py`) is the same for one of several."""

    def __init__(self, nproc: int, restarts: int) -> None:
        self._nproc, self.budget, self.trust, self.place = nproc, Budget(restarts), Trust(), None
        self._attempt = -1

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self) -> Span:
        """The ranks of this machine in the next attempt."""
        self._attempt += 1
        return Span(self._nproc, self._nproc, self._attempt, interface=loopback())

    def over(self) -> bool:
        """Return whether another machine has ended the attempt."""
        return False

    def grows(self) -> bool:
        """Return whether the attempt has ended for another machine to take part."""
        return False

    def stopped(self, status: int) -> None:
        """Tell the others that the job has been asked to stop."""

    def end(self, outcome: Outcome) -> tuple[Outcome, bool]:
        """How the attempt has ended for all machines, and whether the job begins again."""
        again = outcome.failure is not None and self.budget.left > 0
        self.budget.left -= again
        return outcome, again


__all__ = ["Alone", "Budget", "Span"]
