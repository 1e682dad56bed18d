"""Reading what a rank holds of a tensor out of the parts that a checkpoint has of it, a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from meshwright.checkpoint.index import Index, Part
from meshwright.checkpoint.safetensors_io import ITEM_BYTES
from meshwright.checkpoint.step_state import DTYPES
from meshwright.errors import DamagedError
from meshwright.redistribute.boxes import Box, HeldBox, full_box

ROWS_BYTES = 16 << 20  # of a part that are in memory beside the tensor that they are read into


def met(index: Index, name: str, held: Sequence[HeldBox]) -> dict[int, list[tuple[Box, Box, Box]]]:
    """The parts of a tensor that have what is held of it: number of the part → common box, the box that is held, and
    where that lies in the tensor of who holds it. Raises DamagedError where some of it is in no part."""
    entry = index.tensors[name]
    wanted: dict[int, list[tuple[Box, Box, Box]]] = {}
    count = 0
    for mine in held:
        for number, common in entry.meeting(mine.box):
            wanted.setdefault(number, []).append((common, mine.box, mine.here))
            count += common.numel
    if count != sum(mine.box.numel for mine in held):
        raise DamagedError(f"the checkpoint has only parts of {name}", where=str(index.path))
    return wanted


def check_met(index: Index, name: str, held: Sequence[HeldBox]) -> None:
    """Raise CheckpointError for a part of what is held that is damaged or not there."""
    for number in met(index, name, held):
        index.check(name, index.tensors[name].parts[number])


def fill(index: Index, name: str, into: torch.Tensor, held: Sequence[HeldBox]) -> None:
    """Read what is held of a tensor, whose parts are known to be sound. Values take the dtype of `into`."""
    entry = index.tensors[name]
    dtype, outer = DTYPES[entry.dtype], full_box(tuple(into.shape))
    for number, targets in met(index, name, held).items():
        part = replace(entry.parts[number], crc=None)  # so that some of its rows can be read
        for rows in _rows(_around([common for common, _, _ in targets]), part, entry.dtype):
            numbers, box = index.read(name, part, rows)
            values = torch.from_numpy(numbers.reshape(-1)).view(dtype).view(box.shape)
            for whole_common, there, here in targets:
                common = whole_common.meets(box)
                if common is None:
                    continue
                moved = zip(common.start, there.start, here.start, strict=True)
                place = Box(tuple(c - t + h for c, t, h in moved), common.shape)
                into[place.within(outer)].copy_(values[common.within(box)])
            del numbers, values  # before the next rows are read


def read_box(index: Index, name: str, box: Box) -> torch.Tensor:
    """A box of a tensor whose parts are known to be sound."""
    found = torch.empty(box.shape, dtype=DTYPES[index.tensors[name].dtype])
    fill(index, name, found, [HeldBox(box, full_box(box.shape), frozenset())])
    return found


def _rows(box: Box, part: Part, dtype: str) -> Iterator[Box]:
    """A box of a part, a few of its rows at a time."""
    if not box.shape:
        yield box
        return
    row_bytes = max(part.box.numel // part.box.shape[0] * ITEM_BYTES[dtype], 1)
    count = max(ROWS_BYTES // row_bytes, 1)
    for first in range(0, box.shape[0], count):
        size = min(count, box.shape[0] - first)
        yield Box((box.start[0] + first, *box.start[1:]), (size, *box.shape[1:]))


def _around(boxes: Sequence[Box]) -> Box:
    """The smallest box that has all of some."""
    start = tuple(min(n) for n in zip(*(b.start for b in boxes), strict=True))
    ends = zip(*((s + n for s, n in zip(b.start, b.shape, strict=True)) for b in boxes), strict=True)
    return Box(start, tuple(max(e) - s for s, e in zip(start, ends, strict=True)))


__all__ = ["check_met", "fill", "met", "read_box"]
