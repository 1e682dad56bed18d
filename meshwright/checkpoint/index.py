"""`checkpoint.json`: the tensors of a checkpoint, the boxes they consist of, and all state that is not a tensor.

The first line has the version and a checksum of the rest, which distinguishes a newer version from a damaged file. Each
tensor takes one line. Every format is an `Index` once it is opened.
"""

from __future__ import annotations

import functools
import json
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from dataclasses import field as default
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from msgspec import Meta, Struct, field

from meshwright.checkpoint.safetensors_io import DAMAGED, ITEM_BYTES, Place, crc_of, damaged, read_into
from meshwright.core.typed import Count, typed
from meshwright.errors import CheckpointError, DamagedError
from meshwright.redistribute.boxes import Box, full_box

VERSION = 1
NAME = "checkpoint.json"
PLAN = "plan.json"
MODEL = "model."  # before the names of parameters and buffers
STATE = "optim.state."  # before `parameter.key`, for what an optimizer keeps of a parameter
Position = tuple[int, tuple[tuple[int, int], ...]]
RANDOM = "random."  # before `rank.generator`
# numpy lacks some dtypes
ELEMENTS = {
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
    8: np.uint64,
    16: np.complex128,
}


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor, and where its bytes are."""

    file: str
    box: Box
    offset: int
    crc: int | None = None


@dataclass(frozen=True)
class Entry:
    """A tensor: its dtype as safetensors names it, its full shape, its boxes. Boxes do not overlap."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def size_bytes(self) -> int:
        """The bytes of the full tensor."""
        return int(np.prod(self.shape, dtype=np.int64)) * ITEM_BYTES[self.dtype]

    @functools.cached_property
    def _bounds(self) -> tuple[np.ndarray, np.ndarray]:
        size = len(self.parts), len(self.shape)
        start = np.array([p.box.start for p in self.parts], dtype=np.int64).reshape(size)
        return start, start + np.array([p.box.shape for p in self.parts], dtype=np.int64).reshape(size)

    def meeting(self, box: Box) -> Iterable[tuple[int, Box]]:
        """The numbers of the parts that have elements of a box, each with those."""
        start, stop = self._bounds
        low = np.array(box.start, dtype=np.int64)
        high = low + np.array(box.shape, dtype=np.int64)
        for number in np.flatnonzero(((start < high) & (stop > low)).all(axis=1)).tolist():
            common = self.parts[number].box.meets(box)
            if common is not None:
                yield number, common

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class FileNote:
    """The length of a file, and the length and checksum of its header if known."""

    size_bytes: int
    head_bytes: int = 0
    head_crc: int | None = None


@dataclass(frozen=True)
class Index:
    """An opened checkpoint. `ties`: further name → name under which a tensor is there. `optimizer` is None where none
    was saved; `data` is what the user gave. `temporary`: buffers that a model makes anew, so other formats lack them.
    `one_file`: it is a safetensors file, whatever else is in its folder. `samples`: by stream of parameter servers, the
    first sample that nobody has had, and ranges before it that are not trained. The rest is 0 for weights that come
    from elsewhere."""

    folder: Path
    tensors: Mapping[str, Entry]
    files: Mapping[str, FileNote]
    step: int = 0
    seed: int | None = None
    world: int = 0
    ties: Mapping[str, str] = default(default_factory=dict)
    optimizer: Mapping[str, Any] | None = None
    data: Any = None
    made_by: str = ""
    temporary: frozenset[str] = frozenset()
    one_file: bool = False
    samples: Mapping[str, Position] = default(default_factory=dict)

    @property
    def path(self) -> Path:
        """The path that was opened: a folder, or a single file."""
        return self.folder / next(iter(self.files)) if self.one_file else self.folder

    @property
    def model(self) -> dict[str, Entry]:
        """The parameters and buffers by their names in the model."""
        return {n[len(MODEL) :]: e for n, e in self.tensors.items() if n.startswith(MODEL)}

    def check_files(self) -> None:
        """Raise CheckpointError for a file that is missing, has another length or a damaged header."""
        for name, note in self.files.items():
            path = self.folder / name
            try:
                size = path.stat().st_size
            except OSError as error:
                raise DamagedError(
                    f"the checkpoint lacks {name}",
                    why=error.strerror or "",
                    where=str(self.folder),
                    hint=DAMAGED,
                ) from None
            if size != note.size_bytes:
                raise DamagedError(
                    f"{name} is truncated" if size < note.size_bytes else f"something was added to {name}",
                    why=f"it has {size:,} bytes, {note.size_bytes:,} were written",
                    where=str(path),
                    hint=DAMAGED,
                )
            if note.head_crc is not None and crc_of(path, note.head_bytes) != note.head_crc:
                raise DamagedError(
                    f"{name} is damaged",
                    why="the checksum of its header differs",
                    where=str(path),
                    hint=DAMAGED,
                )

    def check(self, name: str, part: Part) -> None:
        """Raise CheckpointError for a part whose checksum is another, or which cannot be read."""
        if part.crc is not None:
            size = part.box.numel * ITEM_BYTES[self.tensors[name].dtype]
            found = crc_of(self.folder / part.file, size, part.offset)
            if found != part.crc:
                raise damaged(self.folder / part.file, name, part.offset, size, found, part.crc)

    def read(self, name: str, part: Part, wanted: Box) -> tuple[np.ndarray, Box]:
        """The elements of a part, as numbers of the same size, and the box that they are: all of the part where it has
        a checksum, else those of its rows that are wanted. Raises CheckpointError for damaged ones."""
        dtype, box, offset = self.tensors[name].dtype, part.box, part.offset
        if part.crc is None and box.shape:
            row = ITEM_BYTES[dtype] * math.prod(box.shape[1:])
            offset += (wanted.start[0] - box.start[0]) * row
            box = Box((wanted.start[0], *box.start[1:]), (wanted.shape[0], *box.shape[1:]))
        values = np.empty(box.shape, dtype=ELEMENTS[ITEM_BYTES[dtype]])
        place = Place(dtype, box.shape, offset, part.crc)
        read_into(self.folder / part.file, name, place, values.reshape(-1).data.cast("B"))
        return values, box

    def full(self, name: str, box: Box | None = None) -> np.ndarray:
        """A tensor put together, or a box of it, as numbers of the size of its elements."""
        entry = self.tensors[name]
        box = full_box(entry.shape) if box is None else box
        found: np.ndarray | None = None
        for number, common in entry.meeting(box):
            values, there = self.read(name, entry.parts[number], common)
            if there == box:
                return values
            found = np.empty(box.shape, dtype=values.dtype) if found is None else found
            found[common.within(box)] = values[common.within(there)]
            del values  # before the next one is read
        if found is None:
            found = np.empty(box.shape, dtype=ELEMENTS[ITEM_BYTES[entry.dtype]])
            assert not found.size, f"parts of {name} are missing"
        return found


def leads_away(path: Path) -> bool:
    """Return whether a name in a folder is a link to somewhere else."""
    return path.is_symlink() and path.resolve().parent != path.parent.resolve()


def key_of(name: str, shape: tuple[int, ...], box: Box) -> str:
    """The name in its file of a part of a tensor: the tensor's own for all of it, else ``name[0:16,8:24]``."""
    if box.shape == shape:
        return name
    return f"{name}[{','.join(f'{s}:{s + n}' for s, n in zip(box.start, box.shape, strict=True))}]"


# ---------------------------------------------------------------- text


def to_text(index: Index) -> str:
    """The text of `checkpoint.json`."""
    files = list(index.files)
    numbers = {name: n for n, name in enumerate(files)}
    head = {
        "made by": index.made_by,
        "step": index.step,
        "seed": index.seed,
        "ranks": index.world,
        "files": {n: [f.size_bytes, f.head_bytes, f.head_crc] for n, f in index.files.items()},
        "ties": dict(index.ties),
        "temporary": sorted(index.temporary),
        "data": index.data,
        **({"samples": index.samples} if index.samples else {}),
    }
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in head.items()]
    if index.optimizer is not None:
        parts = {k: v for k, v in index.optimizer.items() if k != "parameters"}
        inside = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in parts.items()]
        inside.append(_block("parameters", index.optimizer["parameters"]))
        lines.append('"optimizer": {\n' + ",\n".join(inside) + "\n}")
    tensors = {
        name: {
            "dtype": e.dtype,
            "shape": list(e.shape),
            "parts": [
                [numbers[p.file], list(p.box.start), list(p.box.shape), p.offset, p.crc] for p in e.parts
            ],
        }
        for name, e in index.tensors.items()
    }
    lines.append(_block("tensors", tensors))
    rest = ",\n".join(lines) + "\n}\n"
    return f'{{"meshwright checkpoint": {VERSION}, "crc32": "{zlib.crc32(rest.encode()):08x}",\n{rest}'


def _block(name: str, entries: Mapping[str, Any]) -> str:
    lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in entries.items())
    return f"{json.dumps(name)}: {{\n{lines}\n}}"


def read_index(folder: Path) -> Index:
    """Open the checkpoint in a folder. Raises CheckpointError for a damaged index, or one of a newer version."""
    path = folder / NAME
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"the checkpoint's {NAME} cannot be read", why=str(error), where=str(path)
        ) from None
    first, _, rest = text.partition("\n")
    try:
        head = typed(json.loads(first.rstrip().rstrip(",") + "}"), _Head)
        version, crc = head.version, head.crc32
    except (RecursionError, ValueError):
        raise _damaged(path, "its first line has no version") from None
    if version != VERSION:
        raise CheckpointError(
            f"the checkpoint has version {version}",
            why=f"this Meshwright reads version {VERSION}",
            where=str(path),
            hint="load it with the Meshwright that wrote it, or a newer one",
        )
    found = f"{zlib.crc32(rest.encode()):08x}"
    if found != crc:
        raise _damaged(path, f"its checksum is {found}, {crc} was written")
    try:
        index = _index(folder, json.loads("{" + rest))
    except (RecursionError, ValueError) as error:
        raise _damaged(path, f"it does not parse: {error!s:.400}") from None
    for name in (NAME, *index.files):
        if leads_away(folder / name):
            raise CheckpointError(
                f"{name} is a link to {str((folder / name).resolve())!r}",
                why="a checkpoint is read only from its own folder",
                where=str(folder),
                hint="copy the file itself into the folder: cp -L",
            )
    return index


def _damaged(path: Path, why: str) -> DamagedError:
    return DamagedError(f"{NAME} is damaged or truncated", why=why, where=str(path), hint=DAMAGED)


if TYPE_CHECKING:
    DtypeName = str
else:  # msgspec takes a Literal of names that are listed elsewhere; a type checker does not
    DtypeName = Literal[tuple(ITEM_BYTES)]


class _Head(Struct):
    version: int = field(name="meshwright checkpoint")
    crc32: str


class _Tensor(Struct):
    dtype: DtypeName
    shape: tuple[Count, ...]
    parts: list[tuple[Count, tuple[Count, ...], tuple[Count, ...], Count, Count | None]]


class _Parameter(Struct):
    options: Count
    tensors: list[str]
    values: dict[str, Any]


class _Optimizer(Struct):
    name: str = field(name="class")
    options: list[dict[str, Any]]
    parameters: dict[str, _Parameter]
    groups: list[Count] = []


class _Data(Struct):
    """The rest of the file, as JSON has it."""

    made_by: str = field(name="made by")
    step: Count
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None
    ranks: Count
    files: dict[str, tuple[Count, Count, Count | None]]
    ties: dict[str, str]
    temporary: list[str]
    data: Any
    tensors: dict[str, _Tensor]
    optimizer: _Optimizer | None = None
    samples: dict[str, tuple[Count, tuple[tuple[Count, Count], ...]]] = {}


def _index(folder: Path, plain: dict[str, Any]) -> Index:
    """The index of plain data. Raises ValueError for what is no such, or speaks of what is not there."""
    data = typed(plain, _Data)
    files = list(data.files)
    if wrong := [name for name in files if Path(name).name != name or name == ".." or "\0" in name]:
        raise ValueError(f"{wrong[0]!r} is no name of a file beside it")

    def entry(name: str, tensor: _Tensor) -> Entry:
        parts = []
        for number, start, shape, offset, crc in tensor.parts:
            box = Box(start, shape)
            there = number < len(files) and len(start) == len(shape) == len(tensor.shape)
            if not there or any(s + n > most for s, n, most in zip(start, shape, tensor.shape, strict=True)):
                raise ValueError(f"{name} is {list(tensor.shape)}, and has no part {[number, start, shape]}")
            if offset + box.numel * ITEM_BYTES[tensor.dtype] > data.files[files[number]][0]:
                raise ValueError(f"{files[number]} ends before the part of {name} from byte {offset:,}")
            parts.append(Part(files[number], box, offset, crc))
        if math.prod(tensor.shape) >= 1 << 58:
            raise ValueError(f"{name} is {list(tensor.shape)}, more than any file has")
        return Entry(tensor.dtype, tensor.shape, tuple(parts))

    if data.optimizer is not None:
        if max(data.optimizer.groups, default=-1) >= len(data.optimizer.options):
            raise ValueError(f"groups have options that are not there: {data.optimizer.groups}")
        for name, told in data.optimizer.parameters.items():
            lacks = [key for key in told.tensors if f"{STATE}{name}.{key}" not in data.tensors]
            if lacks or told.options >= len(data.optimizer.options):
                raise ValueError(f"{name} has states or options that are not there: {(*lacks, told.options)}")
    return Index(
        folder,
        {name: entry(name, tensor) for name, tensor in data.tensors.items()},
        {name: FileNote(*note) for name, note in data.files.items()},
        data.step,
        data.seed,
        data.ranks,
        data.ties,
        plain.get("optimizer"),
        data.data,
        data.made_by,
        frozenset(data.temporary),
        samples=data.samples,
    )


__all__ = [
    "MODEL",
    "NAME",
    "PLAN",
    "RANDOM",
    "STATE",
    "Entry",
    "FileNote",
    "Index",
    "Part",
    "key_of",
    "leads_away",
    "read_index",
    "to_text",
]
