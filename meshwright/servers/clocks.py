"""Clocks of workers, and how old a value may be that one of them reads.

A worker's clock counts the pushes that were accepted. With a bound of `s`, a worker at clock `c` reads only when all
workers have reached `c - s`, so it sees every push that is more than `s` behind its own (stale synchronous parallel, Ho
et al., 2013). With 0 all are in step, without a bound nobody waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Clocks:
    """`bound`: None for no bound. `expected`: workers without which nobody begins. `of`: accepted pushes by worker;
    those that left are in `left`."""

    bound: int | None
    expected: int = 0
    of: dict[int, int] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)

    def least(self) -> int:
        """The clock of the slowest worker."""
        return min(self.of.values(), default=max(self.left.values(), default=0))

    def may_read(self, clock: int) -> bool:
        """Whether values are new enough for a worker that has done `clock` pushes."""
        return not self.expected and (self.bound is None or self.least() >= clock - self.bound)

    def applies(self, number: int) -> bool:
        """Whether pushes of a round can be applied: in step, when all workers have sent theirs; else as they come."""
        return self.bound != 0 or self.least() > number

    def join(self, worker: int, clock: int) -> None:
        self.of[worker] = clock
        self.left.pop(worker, None)
        if len(self.of) >= self.expected:
            self.expected = 0

    def leave(self, worker: int) -> None:
        """Nobody waits for this worker any more."""
        if worker in self.of:
            self.left[worker] = self.of.pop(worker)


__all__ = ["Clocks"]
