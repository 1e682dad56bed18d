"""Random events in a row over machines of which the others go on: ranks and machines that are killed and come back, the
scheduler, the network and a slow machine.

    python -m bench recovery --random 30 [--machines 3] [--seed 5]

Each machine has a rank, and the first one the scheduler's process as well. An event comes at a random moment after the
job has gone on from the last one; ranks that were lost need not be back by then. Somebody who has the state of the job
is left, always. In the end all have to take part again, with the losses of one device at each of their steps and equal
weights, and no step may have been done once more.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.machines import Machine, machines
from bench.recovery_job import Job
from bench.recovery_lines import Line, furthest, latest, redone

SILENT_SECONDS = 5  # after which the scheduler takes a machine for lost
AHEAD_STEPS = 3  # after which the job has gone on
MOST_APART = 1e-9  # of losses: a sample too many or half a gradient is seen from 1e-2 on
LONG_SECONDS = 3600.0
ALONE = [Machine("127.0.0.1")]


@dataclass
class Breaker:
    """Breaks something now and then. `told`: what it has broken."""

    job: Job
    chance: random.Random
    told: list[str] = field(default_factory=list)

    def able(self) -> list[int]:
        """The ranks that have the state of the job: those that are as far as any, and still there."""
        last = {rank: latest(self.job.folder, rank) for rank in range(self.job.ranks)}
        top = max((line.step for line in last.values() if line is not None), default=0)
        return [r for r, n in last.items() if n is not None and n.step >= top - 1 and self._lives(r, n)]

    def _lives(self, rank: int, line: Line) -> bool:
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{line.pid}/stat").read_text().rpartition(")")[2].split()[0]
            return line.pid == self.job.pid(rank) and state not in "ZX"
        return False

    def goes_on(self, ranks: int) -> None:
        """Wait until so many ranks have done some more steps."""
        top = self._top()
        self.job.until(
            lambda: len(self.able()) >= ranks and self._top() >= top + AHEAD_STEPS, f"{ranks} ranks go on"
        )

    def _top(self) -> int:
        lines = (latest(self.job.folder, rank) for rank in range(self.job.ranks))
        return max((line.step for line in lines if line is not None), default=0)

    def break_something(self) -> None:
        """One event, once two ranks can be done without one another."""
        self.goes_on(2)
        time.sleep(self.chance.uniform(0.0, 1.0))
        able = self.able()
        coming = [rank for rank in range(self.job.ranks) if rank not in able]
        name = self.chance.choice(("coming", *EVENTS) if coming else tuple(EVENTS))
        victims = coming if name == "coming" else able
        if len(able) < 2 or (name == "two ranks" and len(able) < 3):
            return self.break_something()
        self.told.append(name)
        (EVENTS | {"coming": machine})[name](self, self.chance.sample(victims, len(victims)))
        return None

    def kill(self, rank: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.job.pid(rank), signal.SIGKILL)

    def wait(self, most: float) -> None:
        time.sleep(self.chance.uniform(0.0, most))


# ---- events: each gets the ranks that it may disturb, in a random order


def rank(breaker: Breaker, ranks: list[int]) -> None:
    breaker.kill(ranks[0])


def two_ranks(breaker: Breaker, ranks: list[int]) -> None:
    for each in ranks[:2]:
        breaker.kill(each)


def machine(breaker: Breaker, ranks: list[int]) -> None:
    breaker.job.kill(ranks[0])
    breaker.wait(4.0)
    breaker.job.start(ranks[0])


def scheduler(breaker: Breaker, ranks: list[int]) -> None:
    breaker.job.kill(-1)
    breaker.wait(4.0)
    breaker.job.schedule()


def scheduler_and_rank(breaker: Breaker, ranks: list[int]) -> None:
    breaker.job.kill(-1)
    breaker.kill(ranks[0])
    breaker.wait(4.0)
    breaker.job.schedule()


def network(breaker: Breaker, ranks: list[int]) -> None:
    """The scheduler does not wait as long as the longest interruption lasts."""
    with breaker.job.places[ranks[0]].unreachable():
        breaker.wait(2.0 * SILENT_SECONDS)


def slow(breaker: Breaker, ranks: list[int]) -> None:
    end = time.monotonic() + breaker.chance.uniform(2.0, 6.0)
    while time.monotonic() < end:
        for number, seconds in ((signal.SIGSTOP, 0.4), (signal.SIGCONT, 0.1)):
            os.kill(breaker.job.pid(ranks[0]), number)
            time.sleep(seconds)


EVENTS: dict[str, Callable[[Breaker, list[int]], None]] = {
    "rank": rank,
    "two ranks": two_ranks,
    "machine": machine,
    "scheduler": scheduler,
    "scheduler and rank": scheduler_and_rank,
    "network": network,
    "slow": slow,
}


@dataclass(frozen=True)
class Result:
    """`apart`: the largest relative difference of a loss from one device's. `redone`: steps done once more. `weights`:
    how many different ones ranks have in the end."""

    told: tuple[str, ...]
    seconds: float
    steps: int
    apart: float
    redone: int
    weights: int
    joined: int

    @property
    def well(self) -> bool:
        return self.apart <= MOST_APART and not self.redone and self.weights == 1

    def __str__(self) -> str:
        counted = ", ".join(f"{name} {count}" for name, count in sorted(Counter(self.told).items()))
        return (
            f"{len(self.told)} events in {self.seconds:.0f} s ({counted}): {self.steps} steps, {self.redone} of them "
            f"done once more; {self.joined} processes joined;\nall losses are one device's to {self.apart:.0e}; "
            + ("weights equal on all ranks" if self.weights == 1 else "weights DIFFER")
        )


def disturbed(folder: Path, events: int, count: int, seed: int) -> Result:
    """Run a job with so many events, and the same one undisturbed on one device."""
    options = ("--on-failure", "continue", "--max-restarts", 4 * events)
    began = time.monotonic()
    with (
        machines(count) as places,
        contextlib.closing(
            Job(
                folder / "disturbed",
                places,
                options,
                ("replicas",),
                count,
                count,
                scheduler=("--node-time-out", SILENT_SECONDS),
            )
        ) as job,
    ):
        job.warm()
        breaker = Breaker(job, random.Random(seed))
        for _ in range(events):
            breaker.break_something()
            print(f"{time.monotonic() - began:6.1f} s  {breaker.told[-1]}", flush=True)
        breaker.goes_on(count)
        seconds = time.monotonic() - began
        last = job.end()
    with contextlib.closing(Job(folder / "alone", ALONE, (), ("replicas",), 1)) as calm:
        calm.end(last, seconds=LONG_SECONDS)
    lines = job.lines()
    weights = {path.read_text() for path in job.folder.glob("weights*")}
    apart = furthest(lines, calm.lines())
    joined = len({line.pid for line in lines}) - count
    return Result(tuple(breaker.told), seconds, last, apart, redone(lines), len(weights), joined)


__all__ = ["EVENTS", "Result", "disturbed"]
