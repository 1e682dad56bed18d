"""A loader over a dataset with indices: each rank reads only the samples of its shard."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from meshwright.data.checks import wrong_options
from meshwright.data.order import check_state, order_of_dataset, order_of_loader
from meshwright.data.reading import Collate, Failed, Item, Reading, Samples, kinds_of, reading_of
from meshwright.data.sharded_loader import KEEP, ShardedLoader, fills_of, read
from meshwright.errors import BatchError, RunError
from meshwright.runtime.agreement import named
from meshwright.runtime.gather_texts import gather_texts
from meshwright.runtime.local_batch import LocalBatch
from meshwright.runtime.step import LocalStep


class NumberedLoader(ShardedLoader):
    """Of a dataset whose samples have numbers: a rank reads those of its rows."""

    def __init__(
        self,
        dataset: Any,
        local: LocalStep,
        last: str | None,
        seed: int,
        sample_seeds: bool,
        options: Mapping[str, Any],
        collate: Any,
        order: DataLoader[Any] | bool,
        batch_size: int | None = None,
        whole: bool = False,
    ) -> None:
        self.dataset, self.local, self.seed = dataset, local, seed
        self.epoch, self._taken = 0, 0  # samples of this epoch that were given out
        self.reading = reading_of(local.batches, local.world.rank)
        self.batch_size = self.reading.batch_size
        if batch_size not in (None, self.batch_size):
            raise BatchError(
                f"the loader makes batches of {batch_size}, the step takes {self.batch_size}",
                why="a loader makes the global batch, that of all ranks",
                hint=f"DataLoader(dataset, batch_size={self.batch_size})",
            )
        self.last, self.fill = last, dict[str, int]()
        if last == "pad":
            self.fill = fills_of(local, self.batch_size)
        shuffle = f"shuffle={order}" if isinstance(order, bool) else type(order.sampler).__name__
        told = f"{len(dataset)} samples, {shuffle}, seed {seed}, batches of {self.batch_size}, last={last!r}"
        if isinstance(order, bool):
            self.order = order_of_dataset(dataset, order, seed)
        else:
            # Where a loader has no generator of its own, rank 0's global state says how it shuffles.
            drawn = int(torch.randint(2**31, ()).item()) if order.generator is None else 0
            seeds = gather_texts(local.world, local.rank.device, str(drawn)) if local.asks else [str(seed)]
            drawn = int(seeds[0])
            self.order = order_of_loader(order, drawn)
        reads = len(dataset) and len(self.reading.rows)
        kinds = kinds_of(Samples(dataset, {}, sample_seeds)[Item(0, seed)][1]) if reads else {}
        found = self._agree(
            {"dataset": told, **{f"sample 0's {path!r}": kind for path, kind in kinds.items()}}
        )
        if collate is None:
            _check_names(local, found)
        self._drawn: torch.Tensor | None = None
        self._sample_seeds, self._whole, self._collate, self._options = sample_seeds, whole, collate, options
        self._given = (0, 0, self.epoch, self._drawn)  # of the last batch: its samples, epoch and order
        self._last: Any = None  # that batch, where it may be asked for again
        self._read_for(local)
        self._begin()

    def _read_for(self, local: LocalStep) -> None:
        """Make the loader of what this rank reads."""
        reading = self.reading = reading_of(local.batches, local.world.rank)
        self._indices = _Indices(reading, self.seed, self._whole, keeps=self.last == KEEP)
        self._samples = Samples(self.dataset, reading.boxes, self._sample_seeds)
        self._put_together = Collate(reading, self._collate, self.fill)
        try:
            self._loader = DataLoader(
                self._samples,
                batch_sampler=self._indices,
                collate_fn=self._put_together,
                # or it would draw from the state of everything else
                generator=torch.Generator().manual_seed(self.seed),
                **self._options,
            )
        except (ValueError, TypeError) as error:
            raise wrong_options(self._options, error) from None

    def follow(self, local: LocalStep) -> None:
        """From now on read this rank's part for another step, that of the ranks that are left."""
        self.local = local
        self._read_for(local)

    @contextlib.contextmanager
    def rewound(self, batch: Any) -> Iterator[None]:
        """Within it the position is that before a batch, if it is the last that was given out."""
        taken = self._taken
        if batch is not None and batch is self._last:
            self._taken = self._given[0]
        try:
            yield
        finally:
            self._taken = taken

    def again(self, batch: LocalBatch) -> LocalBatch | None:
        """What the step of now reads of the last batch that was given out; None for another one."""
        start, samples, epoch, drawn = self._given
        place = self._place(start, samples, epoch)
        if drawn is None or batch.place != place:
            return None
        indices = _Indices(self.reading, self.seed)
        indices.begin(drawn, start, start + samples, epoch)
        found = self._put_together([self._samples[item] for item in next(iter(indices))])
        return self._checked(found, samples, place)

    def _place(self, start: int, samples: int, epoch: int) -> str:
        return f"samples {start} to {start + samples - 1} of epoch {epoch}"

    def _checked(self, batch: Any, samples: int, place: str) -> Any:
        """A batch that could be read, with what it is. Raises BatchError for another."""
        if isinstance(batch, Failed):
            raise BatchError(batch.what, why=batch.why, where=batch.where, hint=batch.hint)
        return replace(batch, samples=samples, place=place) if isinstance(batch, LocalBatch) else batch

    def _agree(self, told: Mapping[str, str]) -> list[Mapping[str, str]]:
        """Exchange values between all ranks. Raises BatchError on all of them if they differ in datasets or samples."""
        if not self.local.asks:
            return [told]
        found = gather_texts(self.local.world, self.local.rank.device, told)
        for what in dict.fromkeys(k for each in found for k in each):
            ranks: dict[str, list[int]] = {}
            for rank, each in enumerate(found):
                if what in each:
                    ranks.setdefault(each[what], []).append(rank)
            if len(ranks) > 1:
                shown = "; ".join(f"{kind} on {named(members)}" for kind, members in ranks.items())
                raise BatchError(
                    f"{what} differs between ranks",
                    why=shown,
                    hint="every rank opens the same dataset, with the same arguments",
                )
        return found

    def _begin(self) -> None:
        """Draw the order of this epoch, equal on all ranks."""
        drawn, sizes = self.order.draw(self.epoch)
        self._agree({f"the order of samples of epoch {self.epoch}": self.order.mark(drawn)})
        if not 0 <= self._taken <= len(drawn):
            raise RunError(
                f"the position is after {self._taken} samples, an epoch has {len(drawn)}",
                hint="the dataset that was read when the position was saved",
            )
        left = (len(drawn) - self._taken) % self.batch_size
        if any(n != self.batch_size for n in sizes[: -1 if len(drawn) % self.batch_size else None]):
            raise BatchError(
                f"the batch sampler makes batches of {min(sizes)} to {max(sizes)} samples",
                why=f"the step takes {self.batch_size}",
            )
        if left and self.last is None:
            raise BatchError(
                f"{len(drawn) - self._taken} samples leave {left} for the last batch, the step takes {self.batch_size}",
                why=(
                    "" if not self._taken else f"{self._taken} of {len(drawn)} were taken in other batches; "
                )
                + "a step is one program of fixed shapes",
                hint='last="drop" leaves them out, last="pad" fills up with samples that the loss ignores',
            )
        if not len(drawn) or (self.last == "drop" and len(drawn) < self.batch_size):
            raise BatchError(
                f"{len(drawn)} samples make no batch of {self.batch_size}",
                why="there would be nothing to train on"
                + (': last="drop" leaves them out' if len(drawn) else ""),
                hint='last="pad", or an example batch of fewer rows'
                if len(drawn)
                else "a dataset with samples",
            )
        self._drawn, self._size = drawn, len(drawn)
        self._end = len(drawn) - left if self.last not in ("pad", KEEP) else len(drawn)

    def __len__(self) -> int:
        up = self.last in ("pad", KEEP)
        return -(-self._size // self.batch_size) if up else self._size // self.batch_size

    def __iter__(self) -> Iterator[Any]:
        if self._drawn is None:
            self._begin()
        assert self._drawn is not None
        before = None
        while before is not self.reading and (before is None or self._taken < self._end):
            before = self.reading  # until it changes: then this rank reads on for other ranks
            self._indices.begin(self._drawn, self._taken, self._end, self.epoch)
            for batch in read(self._loader):
                if before is not self.reading:
                    break
                samples = min(self.batch_size, self._end - self._taken)
                self._given = self._taken, samples, self.epoch, self._drawn
                found = self._checked(batch, samples, self._place(self._taken, samples, self.epoch))
                self._last = None if self.local.asks else found
                self._taken += samples
                yield found
        self.epoch, self._taken, self._drawn = self.epoch + 1, 0, None

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is, as plain data (numbers and texts): the same on all ranks."""
        random = self.order.state(at_start=self._drawn is None)
        mark = "" if self._drawn is None else self.order.mark(self._drawn)
        return {
            "kind": "samples",
            "epoch": self.epoch,
            "samples": self._taken,
            "random": random,
            "order": mark,
            "seed": self.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there: the next iteration gives what is left of that epoch. Raises RunError for a position that
        belongs to another order of samples. Collective."""
        check_state(state, "samples")
        self.order.restore(state["random"])
        self.epoch, self._taken, self._drawn = int(state["epoch"]), int(state["samples"]), None
        self.seed = self._indices.seed = int(state["seed"])
        self._begin()
        assert self._drawn is not None
        if state["order"] and self.order.mark(self._drawn) != state["order"]:
            raise BatchError(
                "the samples come in another order than when the position was saved",
                why=f"{self._taken} of {len(self._drawn)} were taken; going on would repeat some and skip others",
                hint="the same dataset and sampler; a sampler of your own draws from a `generator` attribute",
            )


def _check_names(local: LocalStep, told: Sequence[Mapping[str, str]]) -> None:
    """Raise BatchError, on all ranks, where samples lack an input of the step."""
    names = {what for each in told for what in each if what.startswith("sample 0's ")}
    lack = [e.target for e in local.batches.entries if f"sample 0's {e.target!r}" not in names]
    if names and lack:
        has = ", ".join(sorted(n.removeprefix("sample 0's ") for n in names))
        raise BatchError(
            f"sample 0 has no {lack[0]!r}",
            why=f"it has {has}; the step was built for a batch with "
            + ", ".join(repr(e.target) for e in local.batches.entries),
            hint="samples have the structure of the example batch; collate_fn= can give it to them",
        )


class _Indices:
    """The batch sampler of a rank's loader: the samples that it reads of each batch of an epoch, from a position on."""

    def __init__(self, reading: Reading, seed: int, whole: bool = False, keeps: bool = False) -> None:
        """`whole`: every rank reads all of each batch; with `keeps` of a last one that is too small."""
        self.reading, self.seed, self.whole, self.keeps = reading, seed, whole, keeps
        self.begin(torch.zeros(0, dtype=torch.int64), 0, 0, 0)

    def begin(self, drawn: torch.Tensor, taken: int, end: int, epoch: int) -> None:
        """Go through the samples of an epoch from `taken` up to `end`."""
        self.drawn, self.taken, self.end, self.epoch = drawn, taken, end, epoch

    def __len__(self) -> int:
        return len(range(self.taken, self.end, self.reading.batch_size))

    def __iter__(self) -> Iterator[list[Item]]:
        size, rows = self.reading.batch_size, torch.from_numpy(self.reading.rows)
        for start in range(self.taken, self.end, size):
            if self.whole or (self.keeps and start + size > self.end):
                indices = self.drawn[start : min(start + size, self.end)].tolist()
                yield [Item(i, self._seed(i), whole=True) for i in indices]
                continue
            places = start + rows
            fills = places >= len(self.drawn)
            # What fills a batch up is its first sample once more: nothing that the model has never seen.
            indices = self.drawn[torch.where(fills, start, places)].tolist()
            yield [Item(i, self._seed(i), f) for i, f in zip(indices, fills.tolist(), strict=True)]

    def _seed(self, index: int) -> int:
        told = f"{self.seed}/{self.epoch}/{index}".encode()
        return int.from_bytes(hashlib.blake2b(told, digest_size=7).digest(), "little")
