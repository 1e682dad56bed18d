"""Which samples an epoch takes, and in which order: equal on all ranks, and that of a plain loader on one device.

The order of an epoch is drawn at once and kept as one tensor. So a position within it is a number, whatever the ranks
and workers are, and going on from there reads nothing twice.
"""

from __future__ import annotations

import base64
import copy
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from meshwright.errors import BatchError, RunError

Sizes = list[int]  # of the batches of an epoch
POSITION = {  # kind of a loader → what its position has
    "samples": ("epoch", "samples", "random", "order", "seed"),
    "batches": ("epoch", "batches"),
}


class Order:
    """Draws the order of one epoch after the other. `generators` are all that its randomness comes from, if it has
    any; where a sampler draws otherwise, `hidden` says so."""

    def __init__(
        self,
        sampler: Iterable[Any],
        base: torch.Generator | None,
        batches: bool = False,
        persistent: bool = False,
    ) -> None:
        """`base`: what a plain loader draws the seed of its workers from when it starts them: in each epoch, or in the
        first if they are `persistent`. `batches`: the sampler gives lists of samples, one for each batch."""
        self.sampler, self.base, self.batches, self.persistent = sampler, base, batches, persistent
        own = getattr(sampler, "generator", None)
        found = [g for g in (base, own) if isinstance(g, torch.Generator)]
        self.generators: Sequence[torch.Generator] = list({id(g): g for g in found}.values())
        self.hidden = not isinstance(sampler, SequentialSampler) and not isinstance(own, torch.Generator)
        self._before = self._states()

    def _states(self) -> list[torch.Tensor]:
        return [g.get_state() for g in self.generators]

    def draw(self, epoch: int) -> tuple[torch.Tensor, Sizes]:
        """The samples of the next epoch, which has this number, and the sizes of its batches where the sampler says
        them."""
        self._before = self._states()
        # As a plain loader draws it, so that the sampler's draws are its draws.
        if self.base is not None and not (self.persistent and epoch):
            torch.empty((), dtype=torch.int64).random_(generator=self.base)
        drawn = list(self.sampler)
        sizes = [len(b) for b in drawn] if self.batches else []
        flat = [i for batch in drawn for i in batch] if self.batches else drawn
        if not all(isinstance(i, int) for i in flat):
            raise BatchError(
                f"the sampler gives {next(i for i in flat if not isinstance(i, int))!r}",
                why="ranks read samples by their number in the dataset",
            )
        return torch.tensor(flat, dtype=torch.int64), sizes

    def mark(self, drawn: torch.Tensor) -> str:
        """Hash the order of samples: the generators' states before it, or the order itself."""
        told = [s.numpy().tobytes() for s in self._before]
        told += [drawn.numpy().tobytes()] if self.hidden else []
        return hashlib.sha256(b"".join([str(len(drawn)).encode(), *told])).hexdigest()[:16]

    def state(self, at_start: bool) -> list[str]:
        """The generators' states as text, before the epoch that has been drawn or now."""
        states = self._states() if at_start else self._before
        return [base64.b64encode(s.numpy().tobytes()).decode() for s in states]

    def restore(self, state: Sequence[str]) -> None:
        """Go back to where `state` was written. Raises RunError for a state of another kind of order."""
        if len(state) != len(self.generators):
            raise RunError(
                "the position was saved for another order of samples",
                why=f"it has {len(state)} random states, this loader has {len(self.generators)}",
                hint="the same sampler, shuffle= and generator as when it was saved",
            )
        for generator, text in zip(self.generators, state, strict=True):
            found = bytearray(base64.b64decode(text))
            generator.set_state(torch.frombuffer(found, dtype=torch.uint8).clone())


def _drawing_from(sampler: Any, generator: torch.Generator) -> Any:
    """A copy of a sampler that draws from a generator."""
    fresh = copy.copy(sampler)
    fresh.generator = generator
    return fresh


def order_of_loader(loader: DataLoader[Any], seed: int) -> Order:
    """The order of a loader of torch. Raises BatchError for a sampler that gives a rank its share itself.

    Where it shuffles by torch's global random state, `seed` takes its place: ranks' global states differ soon.
    """
    outer = loader.batch_sampler
    plain = type(outer) is BatchSampler
    sampler = outer.sampler if plain and isinstance(outer, BatchSampler) else outer
    inner = getattr(sampler, "sampler", sampler)
    if isinstance(sampler, DistributedSampler) or isinstance(inner, DistributedSampler):
        raise BatchError(
            "the loader has a DistributedSampler",
            why="it gives each rank every n-th sample, and shard_loader takes each rank's part of what it gives",
            hint="a loader as on one device: DataLoader(dataset, batch_size, shuffle=True)",
        )
    assert sampler is not None
    if isinstance(sampler, SequentialSampler):
        return Order(sampler, None)
    if plain and getattr(sampler, "generator", sampler) is None:
        sampler = _drawing_from(sampler, loader.generator or torch.Generator().manual_seed(seed))
    return Order(sampler, loader.generator, not plain, loader.persistent_workers)


def order_of_dataset(dataset: Any, shuffle: bool, seed: int) -> Order:
    """The order of ``DataLoader(dataset, shuffle=shuffle, generator=torch.Generator().manual_seed(seed))``."""
    if not shuffle:
        return Order(SequentialSampler(dataset), None)
    generator = torch.Generator().manual_seed(seed)
    return Order(RandomSampler(dataset, generator=generator), generator)


def check_state(state: Mapping[str, Any], kind: str) -> None:
    """Raise RunError unless a saved position is one of this kind of loader."""
    if not isinstance(state, Mapping) or state.get("kind") != kind:
        found = state.get("kind") if isinstance(state, Mapping) else type(state).__name__
        raise RunError(
            f"the position is one of {found!r}, this loader reads {kind!r}",
            hint="pass load_state_dict what state_dict of such a loader returned",
        )
    lacks = [name for name in POSITION[kind] if name not in state]
    if lacks:
        raise RunError(
            f"the position has no {lacks[0]!r}",
            why=f"it has {', '.join(map(str, state))}",
            hint="pass load_state_dict what state_dict of such a loader returned, unchanged",
        )


__all__ = ["Order", "check_state", "order_of_dataset", "order_of_loader"]
