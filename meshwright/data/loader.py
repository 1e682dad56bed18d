"""`shard_loader`: the batches of a step, of which each rank reads its part."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from meshwright.data.checks import KEPT, check_batches, check_options, check_order, wrong_options
from meshwright.data.numbered_loader import NumberedLoader
from meshwright.data.reading import reading_of
from meshwright.data.sharded_loader import KEEP, ShardedLoader
from meshwright.data.stream_loader import StreamLoader
from meshwright.errors import BatchError
from meshwright.runtime.step import LocalStep
from meshwright.train import TrainStep

# torchdata 0.11 calls what torch 2.13 has taken the use of, whenever a loader is made.
warnings.filterwarnings("ignore", message="'set_vital' is deprecated", category=UserWarning)


def _local_step(step: Any) -> LocalStep:
    """Return the local step of a training or forward step; a local step is returned itself."""
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

    Every rank calls it with equal arguments. Samples are read in the order of one device: that of the DataLoader's
    generator, or that of ``torch.Generator().manual_seed(seed)`` for a dataset.

    Args:
        source: A `torch.utils.data.DataLoader` as on one device (its batch size is the global one); or a dataset with
            ``len`` and numbered samples, with `options`; or an iterable of full batches, of which each rank keeps its
            shard. A dataset may have a method ``read_part(index, boxes)`` that reads only part of a sample: `boxes`
            maps each input to (start, length), indices, or None for all, along each dim.
        step: A training step or a forward step.
        shuffle: Shuffle a dataset anew in each pass.
        last: ``"drop"`` leaves out a smaller last batch, ``"pad"`` fills it up with samples that the loss ignores
            (``batch.samples`` is the number of real ones). By default a training step takes it as a batch of another
            shape, and a forward step raises an error.
        seed: Seed of the order of a dataset, and of random augmentation.
        sample_seeds: Draw the random augmentation of a sample from `seed`, the epoch and its number, so that it does
            not depend on the rank that reads it.
        options: Options of a DataLoader for a dataset, such as ``num_workers=4``.

    With `whole` every rank reads full batches and the step takes its shard: for batches of changing shapes.

    Raises BatchError or RunError on all ranks.
    """
    made = _made(source, step, shuffle, last, seed, sample_seeds, whole, options)
    if isinstance(step, TrainStep) and step.survival is not None:
        step.survival.takes_in(made)
    return made


def _made(
    source: Any,
    step: TrainStep | LocalStep,
    shuffle: bool | None,
    last: str | None,
    seed: int,
    sample_seeds: bool,
    whole: bool,
    options: dict[str, Any],
) -> ShardedLoader:
    """The loader of a kind of source."""
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
                f"{given[0]}= together with a DataLoader",
                why="the DataLoader has this option already",
                hint=f"DataLoader(…, {given[0]}=…)",
            )
        if isinstance(source.dataset, IterableDataset) or source.batch_sampler is None:
            return StreamLoader(_stateful(source), local, last or rest)
        kept = {name: getattr(source, name) for name in KEPT}
        collate = None if _is_default(source) else source.collate_fn
        last = last or ("drop" if source.drop_last else rest)
        size = source.batch_size
        return NumberedLoader(
            source.dataset, local, last, seed, sample_seeds, kept, collate, source, size, whole
        )
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
        return StreamLoader(source, local, last or rest)
    if isinstance(source, list | tuple) and not isinstance(source, Dataset):
        check_order(source, shuffle)
        if not follows:
            check_batches(source, local)
        return StreamLoader(source, local, last or rest)
    options = dict(options)
    collate = options.pop("collate_fn", None)
    order = bool(shuffle)
    return NumberedLoader(
        source, local, last or rest, seed, sample_seeds, options, collate, order, None, whole
    )


def _is_default(loader: DataLoader[Any]) -> bool:
    return loader.collate_fn is torch.utils.data.default_collate


def _stateful(loader: DataLoader[Any]) -> Any:
    """The same loader of a stream, with a state."""
    if isinstance(loader, StatefulDataLoader) or not isinstance(loader.dataset, IterableDataset):
        return loader
    kept = {name: getattr(loader, name) for name in KEPT}
    more = {"collate_fn": loader.collate_fn, "drop_last": loader.drop_last}
    return StatefulDataLoader(loader.dataset, batch_size=loader.batch_size, **more, **kept)
