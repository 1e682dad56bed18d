"""Workers that train shares of one batch: none goes on without the others, and all are given the same batch.

A worker that ends after as many steps as the others have pushed is done. Where another one has pushed a step that it
has not, this step's gradient is that of a part of the batch: the step is not applied, and whoever asks for more hears
why.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.errors import BatchError, ServerError
from meshwright.servers.clocks import Clocks

SAME = (
    "step(batch) takes the global batch, the same on all workers, of which each trains its share; "
    "mw.parameter_server(…) takes a batch of each worker's own"
)


@dataclass
class Shares:
    """`workers`: how many share each batch; 0 where each has batches of its own, and may come and go. `batches`: by
    step, what workers have said of theirs, in JSON: name → value; dropped once all have said the same."""

    workers: int = 0
    batches: dict[int, dict[int, str]] = field(default_factory=dict)

    def tell(self, clock: int, worker: int, batches: str) -> None:
        """Keep what a worker says of its batches with the push of a step; empty if it says nothing."""
        if not self.workers or not batches:
            return
        told = self.batches.setdefault(clock, {})
        told[worker] = batches
        if len(told) == self.workers and not _differ(told):
            del self.batches[clock]

    def complete(self, clock: int, pushes: int) -> bool:
        """Whether the pushes of a step are those of all shares of one batch."""
        return not self.workers or (pushes == self.workers and not _differ(self.batches.get(clock, {})))

    def check(self, clocks: Clocks, steps: int) -> None:
        """Before something that needs `steps` pushes of each worker: raise ServerError where a worker has left with
        fewer, BatchError where workers were given different batches."""
        if not self.workers:
            return
        for clock, told in sorted(self.batches.items()):
            if _differ(told):
                raise _different(clock + 1, told)
        if clocks.left:
            worker = min(clocks.left, key=lambda w: (clocks.left[w], w))
            if clocks.left[worker] < steps or clocks.expected:
                raise _ended(worker, clocks.left[worker])


def _differ(told: Mapping[int, str]) -> bool:
    return len(set(told.values())) > 1


def _ended(worker: int, steps: int) -> ServerError:
    return ServerError(
        f"worker {worker} ended before step {steps + 1}, which the others train",
        why=f"it has made {steps} steps; each worker trains its share of every batch, and without one the update would "
        "be that of a part of the batch",
        hint="all workers make the same number of steps; mw.parameter_server(…) lets workers come and go",
    )


def _different(step: int, told: Mapping[int, str]) -> BatchError:
    """The error for a step in which batches differ. `told`: by worker, name → value of its batch."""
    words: dict[int, dict[str, str]] = {worker: json.loads(told[worker]) for worker in sorted(told)}
    for what in dict.fromkeys(name for word in words.values() for name in word):
        workers: dict[str, list[str]] = {}
        for worker, word in words.items():
            workers.setdefault(word.get(what, "nothing"), []).append(str(worker))
        if len(workers) > 1:
            shown = "; ".join(f"{said} on worker {', '.join(who[:8])}" for said, who in workers.items())
            return BatchError(f"{what} of step {step} differs between workers", why=shown, hint=SAME)
    return BatchError(f"batches differ between workers in step {step}", hint=SAME)


__all__ = ["Shares"]
