"""Safetensors files written and read part by part, each with its checksum: nothing holds a file in memory.

(The `safetensors` package writes a file from all of its tensors at once, and reads one without checking it. The format
is its own: eight bytes that say how long the header is, the header as JSON, the tensors behind one another.)
"""

from __future__ import annotations

import errno
import json
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import Struct

from meshwright import heartbeat
from meshwright.core.typed import Count, typed
from meshwright.errors import CheckpointError, DamagedError

ITEM_BYTES = {
    "F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8, "C128": 16,
}  # fmt: skip
HEAD_LIMIT = 1 << 30  # no header is so long: what says so is no safetensors file
STEP_BYTES = 1 << 20  # what is read at once where only a checksum is wanted
DAMAGED = "load another checkpoint, or save this one again"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One to be written: `data` gives its bytes when their turn comes."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    data: Callable[[], Any]

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a tensor in a file: `offset` from the start of the file, its length in bytes, its checksum if
    known."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    crc: int | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Written:
    """A file as it was written: how long it and its header are, the header's checksum, and where its tensors are."""

    size_bytes: int
    head_bytes: int
    head_crc: int
    places: dict[str, Place]


def write(path: Path, tensors: Sequence[Tensor], notes: Mapping[str, str] | None = None) -> Written:
    """Write a file, one tensor after the other, to the disk itself. `notes`: words for the header.

    Raises CheckpointError where the disk is full or the file cannot be; what was begun is removed then.
    """
    lead, places = lead_of(tensors, notes), dict[str, Place]()
    try:
        with path.open("wb") as file:
            file.write(lead)
            offset = len(lead)
            for tensor in tensors:
                data = memoryview(tensor.data()).cast("B")
                assert len(data) == tensor.size_bytes, tensor.key
                file.write(data)
                places[tensor.key] = Place(tensor.dtype, tensor.shape, offset, zlib.crc32(data))
                offset += len(data)
                del data
                heartbeat.alive()
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        path.unlink(missing_ok=True)
        raise cannot_write(path, error) from None
    return Written(offset, len(lead), zlib.crc32(lead), places)


def lead_of(tensors: Sequence[Tensor], notes: Mapping[str, str] | None = None) -> bytes:
    """The beginning of a file, before its tensors."""
    head: dict[str, Any] = {"__metadata__": dict(notes)} if notes else {}
    end = 0
    for tensor in tensors:
        head[tensor.key] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.size_bytes],
        }
        end += tensor.size_bytes
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors lie as their elements ask for
    return len(text).to_bytes(8, "little") + text


def cannot_write(path: Path, error: OSError) -> CheckpointError:
    """The error of a file that could not be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    hint = (
        "make room and save again; the checkpoint before is as it was"
        if full
        else "a folder that you may write to"
    )
    return CheckpointError(
        f"a part of a checkpoint could not be written: {path.name}",
        why=error.strerror or str(error),
        where=str(path.parent),
        hint=hint,
    )


class _Entry(Struct):
    """Of a tensor, in the header."""

    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]


def read_head(path: Path) -> tuple[dict[str, Place], dict[str, str], int]:
    """Read the tensors of a safetensors file, the metadata in its header, and the length of the header.

    Raises CheckpointError for other or truncated files.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, HEAD_LIMIT):
                raise ValueError(f"{size:,} bytes, of which the header would take {length + 8:,}")
            head = typed(json.loads(file.read(length)), dict[str, Any])
        notes = typed(head.pop("__metadata__", {}), dict[str, str])
        places, end = {}, 0
        for key, entry in sorted(typed(head, dict[str, _Entry]).items(), key=lambda e: e[1].data_offsets):
            start, stop = entry.data_offsets
            place = Place(entry.dtype, entry.shape, 8 + length + start)
            if place.dtype not in ITEM_BYTES:
                raise ValueError(f"{key!r} has the dtype {place.dtype!r}, which is not known here")
            if start != end or stop - start != place.size_bytes:
                raise ValueError(f"{key!r} does not lie where the header says")
            places[key], end = place, stop
    except OSError as error:
        raise _cannot_read(path, error) from None
    except (RecursionError, ValueError) as error:
        raise DamagedError(
            f"{path.name} is not a safetensors file, or is truncated",
            why=f"{error!s:.400}",
            where=str(path),
            hint=DAMAGED,
        ) from None
    if 8 + length + end != size:
        raise DamagedError(
            f"{path.name} has {size:,} bytes, its header describes {8 + length + end:,}",
            why="it is truncated, or something was appended"
            if size < 8 + length + end
            else "something was added",
            where=str(path),
            hint=DAMAGED,
        )
    return places, notes, 8 + length


def crc_of(path: Path, length: int, offset: int = 0) -> int:
    """The checksum of some bytes of a file. Raises CheckpointError where it cannot be read."""
    found = 0
    try:
        with path.open("rb") as file:
            file.seek(offset)
            while length and (data := file.read(min(length, STEP_BYTES))):
                found, length = zlib.crc32(data, found), length - len(data)
    except OSError as error:
        raise _cannot_read(path, error) from None
    heartbeat.alive()
    return found


def same_bytes(one: tuple[Path, int], other: tuple[Path, int], length: int) -> bool:
    """Return whether bytes at two places in files are equal. Raises CheckpointError if they cannot be read."""
    try:
        with one[0].open("rb") as first, other[0].open("rb") as second:
            first.seek(one[1])
            second.seek(other[1])
            for start in range(0, length, STEP_BYTES):
                size = min(STEP_BYTES, length - start)
                if first.read(size) != second.read(size):
                    return False
    except OSError as error:
        raise _cannot_read(one[0], error) from None
    return True


def damaged(path: Path, name: str, offset: int, size: int, found: int, written: int) -> DamagedError:
    """The error of a tensor whose bytes are not those that were written."""
    return DamagedError(
        f"{name} in {path.name} is damaged",
        why=f"its checksum is {found:08x}, {written:08x} was written",
        where=f"{path}, {size:,} bytes from byte {offset:,}",
        hint=DAMAGED,
    )


def _cannot_read(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path.name} cannot be read", why=error.strerror or str(error), where=str(path.parent)
    )


def read_into(path: Path, name: str, place: Place, memory: memoryview) -> None:
    """Read a tensor's bytes. Raises CheckpointError where they are not there, or are not those that were written."""
    try:
        with path.open("rb") as file:
            file.seek(place.offset)
            count = 0
            while count < len(memory) and (more := file.readinto(memory[count:])):
                count += more
    except OSError as error:
        raise _cannot_read(path, error) from None
    if count != len(memory):
        raise DamagedError(
            f"{path.name} is truncated", why=f"it ends within {name}", where=str(path), hint=DAMAGED
        )
    if place.crc is not None and (found := zlib.crc32(memory)) != place.crc:
        raise damaged(path, name, place.offset, len(memory), found, place.crc)
    heartbeat.alive()


__all__ = [
    "ITEM_BYTES",
    "Place",
    "Tensor",
    "Written",
    "cannot_write",
    "crc_of",
    "damaged",
    "lead_of",
    "read_head",
    "read_into",
    "same_bytes",
    "write",
]
