"""`shard_loader`: the batches of a step, of which each rank reads its part."""

from __future__ import annotations

import abc
import functools
import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from meshwright import heartbeat
from meshwright.capture.pytree import leaves, literals
from meshwright.data.checks import KEPT, check_batches, check_options, check_order, wrong_options
from meshwright.data.order import check_state, order_of_dataset, order_of_loader
from meshwright.data.padding import fills, fills_forward
from meshwright.data.reading import Collate, Failed, Item, Reading, Samples, kinds_of, parts_of, reading_of
from meshwright.data.repeats import watched
from meshwright.errors import BatchError, RunError
from meshwright.runtime.agreement import checksum, named
from meshwright.runtime.gather_texts import gather_texts
from meshwright.runtime.local_batch import LocalBatch
from meshwright.runtime.step import LocalStep
from meshwright.train import TrainStep

# torchdata 0.11 calls what torch 2.13 has taken the use of, whenever a loader is made.
warnings.filterwarnings("ignore", message="'set_vital' is deprecated", category=UserWarning)

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


def _local_step(step: Any) -> LocalStep:
    """What a step runs on this rank; one of simulated ranks is that itself."""
    return getattr(step, "local", step)


def shard_loader(
    source: Any,
    step: TrainStep | LocalStep,
    *,
    shuffle: bool | None = None,
    last: str | None = None,
    seed: int = 0,
    sample_seeds: bool = True,
    whole: bool = False,
    **options: Any,
) -> ShardedLoader:
    """Load the batches of a step so that each rank reads only its shard: ``for batch in mw.shard_loader(dataset,
    step)``.

    `source`: a `torch.utils.data.DataLoader` as it would be on one device; a dataset with ``len`` and numbered samples
    (with `shuffle` and the `options` of a DataLoader; the batch size is the step's); or any iterable of full batches,
    of which each rank keeps its shard. Samples are stacked along dim 0 of every input; of a sample, a rank keeps what
    its layout of the other dims needs. A dataset may have ``read_part(index, boxes)``, which reads no more than that:
    `boxes` maps the path of an input to (start, length), or indices, or None for all, along each dim of a sample.

    The order is that of one device: for a DataLoader that of its generator, for a dataset that of
    ``torch.Generator().manual_seed(seed)``.

    `last`: a smaller last batch is left out (``"drop"``) or filled up with samples that the loss ignores (``"pad"``; in
    a forward pass, ``batch.samples`` is the number of real rows). By default a training step takes it as it is, read by
    all ranks, and a forward step refuses such a dataset.

    `whole`: every rank reads full batches, in the same order, and the step takes its shard; for batches of changing
    shapes, such as sentences that ``collate_fn`` pads to the longest.

    `sample_seeds`: random augmentation of a sample is drawn from `seed`, the epoch and its number, so that it is the
    same whichever rank reads it.

    Collective: all ranks call it, with equal arguments. Raises BatchError and RunError, on all ranks where they differ.
    """
    local = _local_step(step)
    switches = {"shuffle": shuffle, "sample_seeds": sample_seeds, "whole": whole}
    check_options(local, last, seed, switches, options)
    follows = isinstance(step, TrainStep) and step.takes_other_shapes
    if whole and not follows:
        raise BatchError(
            "whole=True for a step of one shape",
            why="full batches are only needed if their shapes change; a forward step has one program",
            hint="leave out whole=True, or give it the training step",
        )
    rest = KEEP if follows else None
    if isinstance(source, DataLoader):
        given = [name for name, value in (("shuffle", shuffle), *options.items()) if value is not None]
        if given:
            raise BatchError(
                f"{given[0]}= beside a DataLoader",
                why="the loader says it already",
                hint=f"DataLoader(…, {given[0]}=…)",
            )
        if isinstance(source.dataset, IterableDataset) or source.batch_sampler is None:
            return _Stream(_stateful(source), local, last or rest)
        kept = {name: getattr(source, name) for name in KEPT}
        collate = None if _is_default(source) else source.collate_fn
        last = last or ("drop" if source.drop_last else rest)
        size = source.batch_size
        return _Numbered(source.dataset, local, last, seed, sample_seeds, kept, collate, source, size, whole)
    if isinstance(source, IterableDataset) or not hasattr(source, "__getitem__"):
        if not isinstance(source, Iterable):
            raise BatchError(
                f"{type(source).__name__} is neither a loader nor a dataset",
                why="it has no samples by number, and cannot be iterated over",
                hint="a DataLoader, a dataset with __len__ and __getitem__, or an iterable of full batches",
            )
        check_order(source, shuffle)
        if isinstance(source, IterableDataset):
            size = reading_of(local.batches, 0).batch_size
            try:
                source = StatefulDataLoader(source, batch_size=size, **options)
            except (ValueError, TypeError) as error:
                raise wrong_options(options, error) from None
        return _Stream(source, local, last or rest)
    if isinstance(source, list | tuple) and not isinstance(source, Dataset):
        check_order(source, shuffle)
        if not follows:
            check_batches(source, local)
        return _Stream(source, local, last or rest)
    options = dict(options)
    collate = options.pop("collate_fn", None)
    order = bool(shuffle)
    return _Numbered(source, local, last or rest, seed, sample_seeds, options, collate, order, None, whole)


def _is_default(loader: DataLoader[Any]) -> bool:
    return loader.collate_fn is torch.utils.data.default_collate


def _stateful(loader: DataLoader[Any]) -> Any:
    """The same loader of a stream, with a state."""
    if isinstance(loader, StatefulDataLoader) or not isinstance(loader.dataset, IterableDataset):
        return loader
    kept = {name: getattr(loader, name) for name in KEPT}
    more = {"collate_fn": loader.collate_fn, "drop_last": loader.drop_last}
    return StatefulDataLoader(loader.dataset, batch_size=loader.batch_size, **more, **kept)


class _Numbered(ShardedLoader):
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
            self.fill = _fills(local, self.batch_size)
        shuffle = f"shuffle={order}" if isinstance(order, bool) else type(order.sampler).__name__
        told = f"{len(dataset)} samples, {shuffle}, seed {seed}, batches of {self.batch_size}, last={last!r}"
        if isinstance(order, bool):
            self.order = order_of_dataset(dataset, order, seed)
        else:
            # Where a loader has no generator of its own, rank 0's global state says how it shuffles.
            drawn = int(torch.randint(2**31, ()).item()) if order.generator is None else 0
            drawn = int(gather_texts(local.world, local.rank.device, str(drawn))[0])
            self.order = order_of_loader(order, drawn)
        reads = len(dataset) and len(self.reading.rows)
        kinds = kinds_of(Samples(dataset, {}, sample_seeds)[Item(0, seed)][1]) if reads else {}
        found = self._agree(
            {"dataset": told, **{f"sample 0's {path!r}": kind for path, kind in kinds.items()}}
        )
        if collate is None:
            _check_names(local, found)
        self._drawn: torch.Tensor | None = None
        self._indices = _Indices(self.reading, seed, whole, keeps=last == KEEP)
        try:
            self._loader = DataLoader(
                Samples(dataset, self.reading.boxes, sample_seeds),
                batch_sampler=self._indices,
                collate_fn=Collate(self.reading, collate, self.fill),
                # or it would draw from the state of everything else
                generator=torch.Generator().manual_seed(seed),
                **options,
            )
        except (ValueError, TypeError) as error:
            raise wrong_options(options, error) from None
        self._begin()

    def _agree(self, told: Mapping[str, str]) -> list[Mapping[str, str]]:
        """Exchange values between all ranks. Raises BatchError on all of them if they differ in datasets or samples."""
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
        drawn, sizes = self.order.draw()
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
        self._indices.begin(self._drawn, self._taken, self._end, self.epoch)
        for batch in _read(self._loader):
            if isinstance(batch, Failed):
                raise BatchError(batch.what, why=batch.why, where=batch.where, hint=batch.hint)
            samples = min(self.batch_size, self._end - self._taken)
            place = f"samples {self._taken} to {self._taken + samples - 1} of epoch {self.epoch}"
            self._taken += samples
            part = isinstance(batch, LocalBatch)
            yield replace(batch, samples=samples, place=place) if part else batch
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


def _read(source: Iterable[Any]) -> Iterator[Any]:
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


def _fills(local: Any, size: int) -> dict[str, int]:
    graph, factors = local.parts.resharded.graph, local.parts.factors
    return fills(graph, factors) if isinstance(local, LocalStep) else fills_forward(graph, factors, size)


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


def _place(number: str, held: Mapping[str, torch.Tensor]) -> str:
    """Which batch of a stream one is, with what is in it. Ranks ask for that in a few of their steps only."""
    here = ", ".join(f"{path} {checksum(x)}" for path, x in held.items() if x.device.type == "cpu")
    return f"{number} ({here})"


class _Stream(ShardedLoader):
    """Loads full batches: every rank reads all of them and keeps its shard."""

    def __init__(self, source: Iterable[Any], local: LocalStep, last: str | None) -> None:
        self.source: Any = source
        self.local, self.last = local, last
        self.epoch, self._taken, self._skip = 0, 0, 0
        self.reading = reading_of(local.batches, local.world.rank, by_sample=False)
        self.batch_size = self.reading.batch_size
        self.fill = _fills(local, self.batch_size) if last == "pad" else {}

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Any]:
        found = _read(self.source)
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
                yield batch
                continue
            filled = self._filled(held)
            if filled is None:
                continue
            samples, held = filled
            place = functools.partial(_place, f"batch {self._taken} of epoch {self.epoch}", held)
            self._taken += 1
            plain = tuple(literals(batch))
            yield replace(parts_of(self.reading, held), samples=samples, place=place, plain=plain)
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
        if hasattr(self.source, "state_dict"):
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
