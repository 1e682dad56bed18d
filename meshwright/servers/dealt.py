"""The samples that servers deal to a worker, shuffled."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from meshwright.core.type_guards import is_whole
from meshwright.errors import ServerError
from meshwright.servers.of_job import SHARES
from meshwright.servers.worker import Worker

EPOCHS = 1 << 20  # between the seeds of two orders of samples


def dealt(worker: Worker, count: int, batch: int, epochs: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield indices [n] of `count` samples, at most `batch`, each index once an epoch over all workers together. Raises
    ServerError where this worker has asked for all of them before."""
    stream = f"{count} samples, seed {seed}"
    known, order = -1, torch.empty(0)
    while some := worker.deal(stream, batch, count, count * epochs):
        epoch, first = divmod(some.start, count)
        if epoch != known:
            generator = torch.Generator().manual_seed(seed * EPOCHS + epoch)
            known, order = epoch, torch.randperm(count, generator=generator)
        yield order[first : first + len(some)]
    if known < 0 and worker.drained.get(stream, 0) >= epochs:
        raise ServerError(
            f"samples({count}, …, epochs={epochs}) has no more samples",
            why="all of them were dealt before: epochs= counts the epochs of the job, not of this call",
            hint="for epoch in range(epochs): for indices in step.samples(…, epochs=epoch + 1): …",
        )
    worker.drained[stream] = epochs


def check_samples(shares: bool, **numbers: object) -> None:
    """Raise ServerError for numbers that are none, and where workers train `shares` of one batch."""
    if shares:
        raise ServerError(
            "samples(…) deals each worker samples of its own",
            why=SHARES,
            hint="mw.parameter_server(…), or batches of a DataLoader that are the same on all workers",
        )
    for name, value in numbers.items():
        if not is_whole(value) or value < 1:
            raise ServerError(f"samples(…) has {name}={value!r}", why="it is a number from 1")


__all__ = ["check_samples", "dealt"]
