"""Pipelines as outer configurations: how many stages, over which levels of the cluster, under which schedule.

What a configuration makes of the seconds and bytes of one full model on the ranks that share a stage is derived by
formulas of the schedules (Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters*, 2021,
section 2.2; Qi et al., *Zero Bubble Pipeline Parallelism*, 2024, table 2): enough to rank, not to answer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from meshwright.core.mesh import prime_factors
from meshwright.cost.cluster import Cluster
from meshwright.search.budget import STAGES
from meshwright.search.planner import Evaluation

# Schedules that are looked at, each with so many stages of a rank; `interleaved` also with as many as there are layers.
SEARCHED = {"1f1b": (1,), "interleaved": (2, 4, 8), "zero_bubble": (1,), "zero_bubble_v": (2,), "gpipe": (1,)}
ZERO_BUBBLE = ("zero_bubble", "zero_bubble_v")


@dataclass(frozen=True)
class Schedule:
    """An order of actions by name. `chunks`: stages of a rank."""

    name: str
    chunks: int = 1

    def can_be(self, ranks: int, micro_batches: int) -> bool:
        """True if the schedule exists for these numbers and is worth trying. Halves of a single micro-batch win
        nothing."""
        if self.chunks > 1 and micro_batches < ranks:
            return False
        if self.name == "zero_bubble_v" and ranks * self.chunks * micro_batches > STAGES.raced_actions:
            return False
        return self.name not in ZERO_BUBBLE or micro_batches > 1

    def idle_share(self, ranks: int, micro_batches: int, halves: bool = True) -> float:
        """Seconds in which a rank has nothing to do, as a share of those in which it computes. `halves`: whether
        weights' halves of backward can wait; in layers that are computed again at once they cannot."""
        share = (ranks - 1) / (micro_batches * self.chunks)
        return share / 3 if halves and self.name in ZERO_BUBBLE else share

    def in_flight(self, ranks: int, micro_batches: int) -> float:
        """Micro-batches of which the first rank holds the activations of all its stages at once, at most."""
        if self.name == "gpipe":
            return float(micro_batches)
        if self.chunks == 1 or self.name == "zero_bubble_v":
            return float(min(ranks, micro_batches))
        return min(float(micro_batches), ranks * (1 + (ranks - 1) / (ranks * self.chunks)))

    def kept_bytes(self, whole: FullModel, ranks: int, micro_batches: int) -> float:
        """Bytes of activations of a full model that the rank with most has at once, were it alone. Where weights'
        halves of backward wait, the last rank has as many micro-batches under way as the first, and of each what they
        read."""
        each = max(whole.kept_bytes, whole.later_bytes) if self.name in ZERO_BUBBLE else whole.kept_bytes
        return each * self.in_flight(ranks, micro_batches)


@dataclass(frozen=True)
class Outer:
    """`taken`: how many ranks of each level of the cluster follow one another; the others share a stage."""

    taken: tuple[int, ...]
    schedule: Schedule

    @property
    def ranks(self) -> int:
        """How many ranks follow one another."""
        return math.prod(self.taken)

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return self.ranks * self.schedule.chunks

    def inside(self, cluster: Cluster) -> Cluster:
        """The part of a cluster that shares a stage."""
        levels = zip(cluster.levels, self.taken, strict=True)
        return replace(cluster, levels=tuple(replace(v, size=v.size // n) for v, n in levels))

    def message_seconds(self, cluster: Cluster, size_bytes: float) -> float:
        """Return the seconds of a message from a rank to the next, over the slowest of the levels between them."""
        over = [v for v, n in zip(cluster.levels, self.taken, strict=True) if n > 1]
        return max((cluster.message_seconds(v, size_bytes) for v in over), default=0.0)


def outers(cluster: Cluster, layers: int, schedules: Sequence[str] = tuple(SEARCHED)) -> Iterator[Outer]:
    """All configurations of at most as many stages as the model has layers; one stage is not among them."""
    ways = [_divisors(level.size) for level in cluster.levels]
    for taken in itertools.product(*ways):
        ranks = math.prod(taken)
        if ranks == 1:
            continue
        for name in schedules:
            most = {layers // ranks} if name == "interleaved" and layers // ranks > 1 else set[int]()
            for chunks in sorted({*SEARCHED.get(name, (1,)), *most}):
                if ranks * chunks <= layers:
                    yield Outer(taken, Schedule(name, chunks))


def unmixed(cluster: Cluster, found: Iterable[Outer]) -> list[Outer]:
    """Leave out configurations that take parts of two levels, where more of the outer one alone gives as many ranks
    that follow one another: messages between stages cross the same level, and the ranks that share a
    stage are spread over more of it."""
    every = [(outer, *_levels(cluster, outer)) for outer in found]
    plain = {(outer.ranks, first) for outer, first, mixed in every if not mixed}
    return [outer for outer, first, mixed in every if not mixed or (outer.ranks, first) not in plain]


def _levels(cluster: Cluster, outer: Outer) -> tuple[int, bool]:
    """Return the outermost level that is taken, and whether one inside it is though not all of it is."""
    taken = [(n, level.size) for n, level in zip(outer.taken, cluster.levels, strict=True)]
    first = next(number for number, (n, _) in enumerate(taken) if n > 1)
    inside = itertools.dropwhile(lambda each: each[0] == each[1], taken[first:])
    return first, any(n > 1 for n, _ in [*inside][1:])


@dataclass(frozen=True)
class FullModel:
    """One full model on the ranks of a stage: seconds of its step, bytes of states (weights, gradients, moments) and
    the largest of one parameter's, and of what a micro-batch keeps for backward. `sent`: bytes that a micro-batch sends
    from a stage to the next; `later`: about those that weights' halves of backward read, where they wait, and `queued`
    the seconds that they then cost in a micro-batch (None: none can wait)."""

    seconds: float
    states_bytes: float
    largest_bytes: float
    kept_bytes: float
    sent_bytes: float
    later_bytes: float = 0.0
    queued_seconds: float | None = None


def busy_seconds(
    seconds: float, queued_seconds: float | None, outer: Outer, micro_batches: int, uneven: float = 1.0
) -> float:
    """Seconds in which a rank of a pipeline computes, or waits for others, of those of a `FullModel`. `uneven`: those
    of the slowest rank over the mean."""
    halves = queued_seconds is not None
    if halves and outer.schedule.name in ZERO_BUBBLE:
        seconds += micro_batches * queued_seconds
    idle = outer.schedule.idle_share(outer.ranks, micro_batches, halves)
    return seconds / outer.ranks * (uneven + idle)


def step_seconds(
    whole: FullModel, outer: Outer, micro_batches: int, cluster: Cluster, uneven: float = 1.0
) -> float:
    """About the step of a model in stages."""
    message = outer.message_seconds(cluster, whole.sent_bytes)
    return pipelined_seconds(whole.seconds, whole.queued_seconds, outer, micro_batches, message, uneven)


def pipelined_seconds(
    seconds: float,
    queued_seconds: float | None,
    outer: Outer,
    micro_batches: int,
    message: float,
    uneven: float = 1.0,
) -> float:
    """The same from the seconds of a `FullModel` and those of a message."""
    around = 2 * (outer.stages - 1) * message  # the first micro-batch's way there and back
    busy = busy_seconds(seconds, queued_seconds, outer, micro_batches, uneven)
    waits = queued_seconds is not None
    return busy + around + _stalled_seconds(seconds, waits, outer, micro_batches, message)


def may_win(outer: Outer, seconds: float, micro_batches: int, message: float) -> bool:
    """False for `gpipe` where messages are light: it idles as long as `1f1b` and keeps more, and wins alone in that no
    rank waits for a round trip once all are busy."""
    forward = seconds / micro_batches / outer.ranks / 3
    return outer.schedule.name != "gpipe" or message >= STAGES.heavy_message * forward


def _stalled_seconds(seconds: float, waits: bool, outer: Outer, micro_batches: int, message: float) -> float:
    """About the seconds in which a rank waits for messages once all are busy. A round trip ends as many micro-batches
    later as ranks follow one another, which is as long as computing takes them: weights' halves that wait leave room in
    it (`waits`). Chunks of a rank come back to it after a forward for each backward: there is room for a message. Where
    all forwards go before all backwards, a message has the time of one of them."""
    ranks, chunks = outer.ranks, outer.schedule.chunks
    third = seconds / micro_batches / ranks / 3  # forward, and each half of backward, of a micro-batch
    if outer.schedule.name == "gpipe":
        return (micro_batches - 1) * (max(0.0, message - third) + max(0.0, message - 2 * third))
    if outer.schedule.name == "interleaved":
        return micro_batches * chunks * max(0.0, message - third / chunks)
    room = ranks * third if waits and outer.schedule.name in ZERO_BUBBLE else 0.0
    return max(0.0, micro_batches / ranks - 1) * max(0.0, 2 * (outer.stages - 1) * message - room)


def peak_bytes(whole: FullModel, outer: Outer, micro_batches: int) -> float:
    """About the peak of the rank that holds most, by sums alone: the first has most micro-batches in flight."""
    ranks = outer.ranks
    states = whole.states_bytes / ranks + whole.largest_bytes * (1 - 1 / ranks)
    return states + outer.schedule.kept_bytes(whole, ranks, micro_batches) / ranks


def simulated_peak_bytes(evaluation: Evaluation, whole: FullModel, outer: Outer, micro_batches: int) -> float:
    """The same by a simulation of the full model, at every instant: what is there once is on one rank, of what is in
    layers each has its share. A stage keeps what it received, too."""
    share = 1 / outer.ranks
    kept = evaluation.kept_bytes + outer.stages * whole.sent_bytes
    whole = replace(whole, kept_bytes=max(whole.kept_bytes, kept))
    more = (outer.schedule.kept_bytes(whole, outer.ranks, micro_batches) - whole.kept_bytes) * share
    first = max(once + share * layered for once, layered in evaluation.at_layers) + more
    return max(first, *(once + share * layered for once, layered in evaluation.at))


def _divisors(size: int) -> list[int]:
    found = {1}
    for prime in prime_factors(size):
        found |= {n * prime for n in found}
    return sorted(found)


__all__ = [
    "Outer",
    "Schedule",
    "FullModel",
    "busy_seconds",
    "may_win",
    "outers",
    "peak_bytes",
    "pipelined_seconds",
    "simulated_peak_bytes",
    "step_seconds",
    "unmixed",
]
