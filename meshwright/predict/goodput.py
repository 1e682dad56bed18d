"""How much of a job's time trains, when ranks fail: a simulation of each way to survive, and closed forms beside it.

Three tiers, by what happens after a failure: *restart* ends all ranks and goes on from the newest checkpoint; *replan*
goes on with the ranks that are left, from copies in neighbours' memory; *continue* goes on with the data-parallel
replicas that are left. Of the failures a share ends everything, whatever the tier: then all restart. Failures are
independent, at a constant rate for each rank. *Goodput* is the time that lasting steps would have taken on all ranks,
over the time that passed.

Sources: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 1974; J. T. Daly, A higher
order estimate of the optimum checkpoint interval for restart dumps, FGCS 2006; rates: The Llama 3 Herd of Models, 2024,
section 3.3.4 and table 5 (419 unexpected interruptions in 54 days on 16,384 H100, 54 of them software bugs).
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass
from typing import Literal

Tier = Literal["continue", "replan", "restart"]
TIERS: tuple[Tier, ...] = ("continue", "replan", "restart")
DAY_SECONDS = 86_400.0
LLAMA_INTERRUPTIONS, LLAMA_DAYS, LLAMA_RANKS, LLAMA_SOFTWARE = 419, 54.0, 16_384, 54


@dataclass(frozen=True, slots=True)
class Failures:
    """Interruptions of a job. `per_rank_s`: of one rank in a second. `fatal`: the share that ends all ranks."""

    per_rank_s: float = LLAMA_INTERRUPTIONS / (LLAMA_DAYS * DAY_SECONDS * LLAMA_RANKS)
    fatal: float = LLAMA_SOFTWARE / LLAMA_INTERRUPTIONS


@dataclass(frozen=True, slots=True)
class Running:
    """A job and its seconds: a step, a save (while steps stand still), a restart, a stall until those that are left go
    on or others join, and the repair of what was lost. `replicas`: of the data; `node_ranks`: lost together.
    `copy_share`: of a step, for copies to neighbours (tier replan)."""

    ranks: int
    replicas: int
    node_ranks: int = 8
    step: float = 10.0
    save: float = 10.0
    restart: float = 300.0
    replan: float = 30.0
    going_on: float = 10.0
    repair: float = 7200.0
    copy_share: float = 0.0

    def units(self, tier: Tier) -> int:
        """In how many pieces the job can lose capacity: replicas, nodes, or none."""
        return {"continue": self.replicas, "replan": max(1, self.ranks // self.node_ranks), "restart": 1}[
            tier
        ]

    def stall(self, tier: Tier) -> float:
        """Seconds without progress after a failure that is survived: half a step is done again."""
        return (self.replan if tier == "replan" else self.going_on) + self.step / 2


@dataclass(frozen=True, slots=True)
class Goodput:
    """Of one tier: the simulated goodput, the closed form beside it, and the seconds from save to save that are best
    (infinite where nothing needs a checkpoint), with Young's approximation."""

    tier: Tier
    simulated: float
    predicted: float
    interval: float
    young: float


def fatal_rate(job: Running, failures: Failures, tier: Tier) -> float:
    """Failures in a second after which a tier goes on from a checkpoint."""
    return failures.per_rank_s * job.ranks * (1.0 if _alone(job, tier) else failures.fatal)


def young_interval(save: float, rate: float) -> float:
    """Young's first-order interval: sqrt(2 · save / rate)."""
    return math.sqrt(2 * save / rate) if rate else math.inf


def best_interval(save: float, rate: float) -> float:
    """The seconds of work between saves that make the time per work least, exactly for failures at a constant rate:
    where its derivative is zero, (1 - t·rate) · exp((t + save) · rate) = 1."""
    if not rate:
        return math.inf
    low, high = 0.0, 1.0  # of t · rate
    for _ in range(200):
        middle = (low + high) / 2
        if (1 - middle) * math.exp(middle + save * rate) > 1:
            low = middle
        else:
            high = middle
    return high / rate


def with_restarts(interval: float, save: float, restart: float, rate: float) -> float:
    """Work over time with a save every so many seconds of work, where failures come at a constant rate, in saves and
    in restarts too (Daly 2006, equation 13):
    interval · rate / (exp(restart · rate) · (exp((interval + save) · rate) - 1)).
    """
    if not rate:
        return 1.0 if math.isinf(interval) else interval / (interval + save)
    return interval * rate / (math.exp(restart * rate) * math.expm1((interval + save) * rate))


def predicted(job: Running, failures: Failures, tier: Tier, interval: float) -> float:
    """The closed form: restarts for the fatal failures; for the others the chance that no stall is under way, and the
    share of units that are there (each fails, and is away for the repair)."""
    fatal = fatal_rate(job, failures, tier)
    found = with_restarts(interval, job.save, job.restart, fatal)
    if _alone(job, tier):
        return found
    units = job.units(tier)
    rate = failures.per_rank_s * job.ranks * (1 - failures.fatal) / units  # of a unit
    there = 1 / (1 + rate * job.repair)
    calm = math.exp(-2 * rate * units * there * job.stall(tier))  # it fails, and later it comes back
    return found * calm * there / (1 + (job.copy_share if tier == "replan" else 0.0))


def simulate(
    job: Running, failures: Failures, tier: Tier, interval: float, days: float = 540.0, seed: int = 0
) -> float:
    """Goodput of `days` of simulated time, failure by failure."""
    return _Clock(job, failures, tier, interval, random.Random(seed)).run(days * DAY_SECONDS)


def goodput(job: Running, failures: Failures, tier: Tier, days: float = 540.0) -> Goodput:
    """Simulate a tier with the interval of checkpoints that is best for it."""
    rate = fatal_rate(job, failures, tier)
    interval = best_interval(job.save, rate)
    found = simulate(job, failures, tier, interval, days)
    return Goodput(
        tier, found, predicted(job, failures, tier, interval), interval, young_interval(job.save, rate)
    )


def _alone(job: Running, tier: Tier) -> bool:
    """Return whether no rank is left to continue."""
    return tier == "restart" or job.units(tier) < 2


class _Clock:
    """A job from event to event. `done`: seconds of work on all ranks, `saved`: those that are in a checkpoint."""

    def __init__(
        self, job: Running, failures: Failures, tier: Tier, interval: float, chance: random.Random
    ) -> None:
        self.job, self.chance, self.interval = job, chance, interval
        self.tier: Tier = tier
        self.alone, self.units = _alone(job, tier), job.units(tier)
        self.rate, self.fatal = failures.per_rank_s * job.ranks, failures.fatal
        self.missing: list[float] = []  # when each lost unit is back
        self.now = self.resume = self.done = self.saved = 0.0
        self.since_save = 0.0  # seconds of working time
        self.slower = 1 + (job.copy_share if tier == "replan" else 0.0)

    def run(self, seconds: float) -> float:
        while self.now < seconds:
            after = self.now + self.chance.expovariate(self.rate)
            while self.missing and self.missing[0] <= after:
                self._work(min(self.missing[0], seconds))
                heapq.heappop(self.missing)
                self._stall(self.job.stall(self.tier))
            self._work(min(after, seconds))
            if self.now < seconds:
                self._fail()
        return self.done / self.now

    def _fail(self) -> None:
        if self.alone or self.chance.random() < self.fatal:
            self._restart()
        elif self.chance.random() * self.units >= len(self.missing):  # else it was away already
            heapq.heappush(self.missing, self.now + self.job.repair)
            if len(self.missing) == self.units:
                self._restart()
                self.missing.clear()
            else:
                self._stall(self.job.stall(self.tier))

    def _restart(self) -> None:
        self.done, self.since_save = self.saved, 0.0
        self._stall(self.job.restart)

    def _stall(self, seconds: float) -> None:
        self.resume = max(self.resume, self.now + seconds)

    def _work(self, until: float) -> None:
        """Train and save from now on, or from when the stall is over."""
        left = until - max(self.now, self.resume)
        self.now = max(self.now, until)
        speed = (1 - len(self.missing) / self.units) / self.slower
        while left > 0:
            work = min(left, self.interval - self.since_save) if self.since_save < self.interval else 0.0
            self.done += work * speed
            self.since_save += work
            left -= work
            if self.since_save < self.interval:
                return
            save = min(left, self.interval + self.job.save - self.since_save)
            self.since_save += save
            left -= save
            if self.since_save >= self.interval + self.job.save - 1e-9:
                self.saved, self.since_save = self.done, 0.0
            elif left <= 0:
                return


__all__ = ["TIERS", "Failures", "Goodput", "Running", "best_interval", "goodput", "predicted", "simulate"]
