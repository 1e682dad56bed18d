"""The common base of all loaders of a rank: their state, and how they read."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from meshwright import heartbeat
from meshwright.data.padding import fills, fills_forward
from meshwright.runtime.agreement import checksum
from meshwright.runtime.local_batch import LocalBatch
from meshwright.runtime.step import LocalStep

READING = "reading a batch"
KEEP = "keep"  # a last batch as it is


class ShardedLoader(abc.ABC):
    """The loader that `mw.shard_loader` returns: each iteration over it yields the batches of one epoch.

    `len` counts the batches of an epoch, `epoch` the completed epochs. `state_dict` records the position, in samples
    that the steps so far have taken; `load_state_dict` resumes from it under any plan and any number of ranks.
    """

    epoch: int
    batch_size: int

    def __repr__(self) -> str:
        try:
            count = f"{len(self)} batches"
        except TypeError:  # of a stream without a length
            count = "batches"
        return f"<{count} of {self.batch_size}, in epoch {self.epoch}>"

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def __iter__(self) -> Iterator[Any]: ...

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Where the loader is, as plain data: the same on all ranks."""

    @abc.abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there: the next iteration gives what is left of that epoch."""

    @abc.abstractmethod
    def follow(self, local: LocalStep) -> None:
        """From now on read this rank's part for another step, that of the ranks that are left."""

    @abc.abstractmethod
    def rewound(self, batch: Any) -> contextlib.AbstractContextManager[None]:
        """Within it the position is that before a batch, if it is the last that was given out."""

    @abc.abstractmethod
    def again(self, batch: LocalBatch) -> LocalBatch | None:
        """What the step of now reads of the last batch that was given out; None for another one."""


def read(source: Iterable[Any]) -> Iterator[Any]:
    """Iterate over a source; the heartbeat record of this rank shows when it is waited for."""
    with heartbeat.during(READING):
        found = iter(source)
    while True:
        try:
            with heartbeat.during(READING):
                batch = next(found)
        except StopIteration:
            return
        yield batch


def fills_of(local: Any, size: int) -> dict[str, int]:
    graph, factors = local.parts.resharded.graph, local.parts.factors
    return fills(graph, factors) if isinstance(local, LocalStep) else fills_forward(graph, factors, size)


def place_of(number: str, held: Mapping[str, torch.Tensor]) -> str:
    """Which batch of a stream one is, with what is in it. Ranks ask for that in a few of their steps only."""
    here = ", ".join(f"{path} {checksum(x)}" for path, x in held.items() if x.device.type == "cpu")
    return f"{number} ({here})"
