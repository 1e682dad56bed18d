"""A loader over an iterable of full batches, of which each rank keeps its shard."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from meshwright.capture.pytree import leaves, literals
from meshwright.data.order import check_state
from meshwright.data.reading import parts_of, reading_of
from meshwright.data.repeats import watched
from meshwright.data.sharded_loader import KEEP, ShardedLoader, fills_of, place_of, read
from meshwright.errors import BatchError
from meshwright.runtime.local_batch import LocalBatch
from meshwright.runtime.step import LocalStep


class StreamLoader(ShardedLoader):
    """Loads full batches: every rank reads all of them and keeps its shard."""

    def __init__(self, source: Iterable[Any], local: LocalStep, last: str | None) -> None:
        self.source: Any = source
        self.local, self.last = local, last
        self.epoch, self._taken, self._skip = 0, 0, 0
        self.reading = reading_of(local.batches, local.world.rank, by_sample=False)
        self.batch_size = self.reading.batch_size
        self.fill = fills_of(local, self.batch_size) if last == "pad" else {}
        self._given: tuple[LocalBatch, dict[str, torch.Tensor]] | None = None  # the last batch, and all of it
        self._last: Any = None  # so, too, also one that is no shard
        self._counts = False  # positions are numbers of batches, whatever the source says

    def follow(self, local: LocalStep) -> None:
        """From now on keep this rank's shard for another step, that of the ranks that are left."""
        self.local = local
        self.reading = reading_of(local.batches, local.world.rank, by_sample=False)

    @contextlib.contextmanager
    def rewound(self, batch: Any) -> Iterator[None]:
        """Within it the position is that before a batch, if it is the last that was given out: by number, since a
        source has read on."""
        taken = self._taken
        self._counts = True
        self._taken -= batch is not None and batch is self._last
        try:
            yield
        finally:
            self._taken, self._counts = taken, False

    def again(self, batch: LocalBatch) -> LocalBatch | None:
        """What the step of now reads of the last batch that was given out; None for another one."""
        if self._given is None or self._given[0] is not batch:
            return None
        return replace(
            parts_of(self.reading, self._given[1]),
            samples=batch.samples,
            place=batch.place,
            plain=batch.plain,
        )

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Any]:
        found = read(self.source)
        if self.epoch == 0 and self.local.world.rank == 0:  # once, and by one rank: all of them read the same
            found = watched(found, self.source)
        for number, batch in enumerate(found):
            if number < self._skip:
                continue
            held = dict(leaves(batch))
            if self.last == KEEP and any(
                tuple(held[e.path].shape) != e.shape for e in self.reading.inputs if e.path in held
            ):
                self._taken += 1
                self._last = None if self.local.asks else batch
                yield batch
                continue
            filled = self._filled(held)
            if filled is None:
                continue
            samples, held = filled
            place = functools.partial(place_of, f"batch {self._taken} of epoch {self.epoch}", held)
            self._taken += 1
            plain = tuple(literals(batch))
            found = replace(parts_of(self.reading, held), samples=samples, place=place, plain=plain)
            if not self.local.asks:
                self._given, self._last = (found, held), found
            yield found
        self.epoch, self._taken, self._skip = self.epoch + 1, 0, 0

    def _filled(self, held: dict[str, torch.Tensor]) -> tuple[int, dict[str, torch.Tensor]] | None:
        """The batch with its number of samples, filled up where it is too small; None for one that is left out."""
        rows = {x.shape[0] for x in held.values() if x.dim()}
        size, few = self.batch_size, min(rows, default=0)
        if len(rows) != 1 or few >= size:
            return size, held
        if self.last is None:
            raise BatchError(
                f"batch {self._taken} of epoch {self.epoch} has {few} samples, the step takes {size}",
                why="a step is one program of fixed shapes",
                hint='last="drop" leaves it out, last="pad" fills it up with samples that the loss ignores',
            )
        if self.last == "drop":
            return None
        made = {path: torch.cat([x, x[:1].expand(size - few, *x.shape[1:])]) for path, x in held.items()}
        for path, value in self.fill.items():
            if path in made:
                made[path][few:] = value
        return few, made

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is: by the source's own state where it has one, else by the number of batches."""
        state: dict[str, Any] = {"kind": "batches", "epoch": self.epoch, "batches": self._taken}
        if hasattr(self.source, "state_dict") and not self._counts:
            state["source"] = self.source.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. A source without a state is read from its start, and what was taken is left out."""
        check_state(state, "batches")
        self.epoch, self._taken, self._skip = int(state["epoch"]), int(state["batches"]), 0
        if "source" in state and hasattr(self.source, "load_state_dict"):
            self.source.load_state_dict(state["source"])
        else:
            self._skip = self._taken
