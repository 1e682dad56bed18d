"""The cache of keys and values: between calls in shards, and inside a program as tensors that come and go.

Slot ``n`` of the cache is token ``n`` of a sequence that is padded on the left; slots behind the last token are free.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from meshwright.core.layout import TensorLayout, dim_axes
from meshwright.errors import RunError
from meshwright.runtime.forward import LocalForward
from meshwright.runtime.local_batch import Piece

SHORTEST = 16  # tokens to which the shortest prompts are padded
SLOTS = 2  # the dim of keys and values that counts tokens: [batch, heads, slots, width]


def padded_length(count: int) -> int:
    """The length to which so many tokens are padded: a power of two, or one and a half of one."""
    length = SHORTEST
    while length < count:
        length = length * 3 // 2 if length & (length - 1) == 0 else length * 4 // 3
    return length


def names(layers: int) -> list[str]:
    """The tensors of a cache, in the order in which programs give them."""
    return [f"{what}.{number}" for what in ("keys", "values") for number in range(layers)]


@dataclass
class RankCache:
    """The part of the key-value cache that a rank holds between calls. transformers' loop only queries its number of
    tokens.

    `ahead`: the greatest number of tokens to come. `before`: slots of padding; `length`: tokens; `slots`: those of the
    programs that read the cache. `source`: the program that computed `parts`, which have `layouts`.
    """

    ahead: int
    before: int = 0
    length: int = 0
    slots: int = 0
    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    layouts: dict[str, TensorLayout] = field(default_factory=dict)
    source: LocalForward | None = None
    is_compileable = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens so far, of which the loop gives only those that follow."""
        return self.length

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Beams are refused."""
        raise RunError(
            "beam search does not work with a sharded cache", hint="num_beams=1: greedy or sampled"
        )

    def make_room(self) -> int:
        """The slot of the next token; where all are taken there are more from now on."""
        place = self.before + self.length
        if place >= self.slots:
            self.slots = padded_length(place + max(self.ahead, 1))
        return place

    def take(self, results: Mapping[str, torch.Tensor], source: LocalForward, count: int) -> None:
        """Go on with what a program gave after so many more tokens. Its labels are `out1` and so on, in order."""
        for name, label in zip(names(len(results) // 2), results, strict=True):
            self.parts[name], self.layouts[name] = results[label], source.layouts[label]
        if self.source is not None:
            self.ahead -= count
        self.source, self.length = source, self.length + count
        self.slots = self.layouts["keys.0"].shape[SLOTS]

    def read_by(self, piece: Piece) -> torch.Tensor:
        """The part of one of its tensors that a program reads. Collective where that is another part than the one that
        was given."""
        name = piece.entry.target
        x, layout = self.parts[name], self.layouts[name]
        room = (0, 0, 0, piece.layout.shape[SLOTS] - layout.shape[SLOTS])
        if _alike(layout, piece.layout):
            return F.pad(x, room) if any(room) else x
        assert self.source is not None
        return piece.take(F.pad(self.source.gathered(x, layout), room)).contiguous()


def _alike(one: TensorLayout, other: TensorLayout) -> bool:
    """Return whether two tensors are distributed in the same way, whatever their numbers of slots."""
    if one.partial or any(dim_axes(layout.dims[SLOTS]) for layout in (one, other)):
        return False
    return all(a == b for n, (a, b) in enumerate(zip(one.dims, other.dims, strict=True)) if n != SLOTS)


# ---------------------------------------------------------------- inside a program


@functools.cache
def _layer_class() -> type:
    from transformers.cache_utils import CacheLayerMixin

    class Slots(CacheLayerMixin):
        """Keys and values of one layer: those of a prompt as they come, or the old ones with that of one token put in
        its slot. Nothing is written in place."""

        def __init__(self, old: tuple[torch.Tensor, torch.Tensor] | None, here: torch.Tensor | None) -> None:
            super().__init__()
            self.old, self.here, self.is_initialized = old, here, True

        def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
            pass

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            self.keys, self.values = key_states, value_states
            if self.old is not None and self.here is not None:
                self.keys = torch.where(self.here, key_states, self.old[0])
                self.values = torch.where(self.here, value_states, self.old[1])
            return self.keys, self.values

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return query_length if self.here is None else self.here.shape[SLOTS], 0

        def get_seq_length(self) -> int:
            return 0  # positions and masks are inputs

        def get_max_length(self) -> int:
            return -1

    return Slots


def layers_of(batch: Mapping[str, Any], count: int) -> list[Any]:
    """The layers of a cache for a program's inputs: empty ones for a prompt."""
    kind = _layer_class()
    if "keys" not in batch:
        return [kind(None, None) for _ in range(count)]
    return [kind(old, batch["here"]) for old in zip(batch["keys"], batch["values"], strict=True)]


__all__ = ["SLOTS", "RankCache", "layers_of", "names", "padded_length"]
