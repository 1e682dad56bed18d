"""What one rank has of a checkpoint: the parts of tensors that it writes, and a record of everything else."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.checkpoint.index import RANDOM, key_of
from meshwright.checkpoint.ownership import own_pieces
from meshwright.checkpoint.rng import random_state
from meshwright.checkpoint.step_state import SAFE_NAMES, model_items, optimizer_values, state_items
from meshwright.checkpoint.user_data import to_plain
from meshwright.errors import CheckpointError
from meshwright.redistribute.boxes import Box, full_box
from meshwright.runtime.step import LocalStep


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor, as this rank holds it. `key`: its name in the file; `dtype` as safetensors names it."""

    key: str
    dtype: str
    box: Box
    tensor: torch.Tensor


def collected(step: LocalStep, data: Any, temporary: Collection[str]) -> tuple[list[Part], dict[str, Any]]:
    """All that a rank writes, and the record of the rest, as JSON has it. `data`: of the script. `temporary`: buffers
    that the model makes anew. Raises CheckpointError for what no checkpoint can hold."""
    place = 0 if step.pipe is None else step.pipe.comm.place
    parts: list[Part] = []
    boxes: dict[str, list[Any]] = {}
    empty: dict[str, list[Any]] = {}

    def add(name: str, part: torch.Tensor, shape: tuple[int, ...], box: Box) -> None:
        if part.dtype not in SAFE_NAMES:
            raise CheckpointError(f"{name} is {part.dtype}, which safetensors does not have")
        key = key_of(name, shape, box)
        parts.append(Part(key, SAFE_NAMES[part.dtype], box, part))
        boxes[key] = [name, list(shape), list(box.start), list(box.shape)]

    for item in (*model_items(step), *state_items(step)):
        if place not in item.places:
            continue
        size, rank = item.tensor.element_size(), step.rank.comm.rank
        outer = full_box(tuple(item.tensor.shape))
        for piece in own_pieces(item.name, item.layout, size, step.mesh, rank, place, item.places):
            add(item.name, item.tensor[piece.here.within(outer)], item.layout.shape, piece.box)
        if not full_box(item.layout.shape).numel:
            empty[item.name] = [SAFE_NAMES[item.tensor.dtype], list(item.layout.shape)]
    for kind, state in random_state(step.rank.device).items():
        add(f"{RANDOM}{step.world.rank}.{kind}", state, tuple(state.shape), full_box(tuple(state.shape)))
    note = {
        "boxes": boxes,
        "empty": empty,
        "optimizer": optimizer_values(step),
        "data": to_plain(data, "data"),
        "step": step.rank.step,
        "seed": step.rank.seed,
        "temporary": sorted(temporary),
    }
    return parts, note


def bytes_of(part: torch.Tensor) -> memoryview:
    """The elements of a tensor as they stand in a file."""
    return part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


__all__ = ["Part", "bytes_of", "collected"]
