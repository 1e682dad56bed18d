"""From one format to another: checkpoints of ours, one safetensors file, the folder of a Hugging Face model.

One tensor at a time, in the host's memory, without torch: the most that is held is the largest tensor and a part of it.
What is made is written beside its name and renamed at the end.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import meshwright
from meshwright.checkpoint.folder import commit, synced, write_atomically
from meshwright.checkpoint.index import MODEL, NAME, PLAN, Entry, FileNote, Index, Part, key_of, to_text
from meshwright.checkpoint.ownership import parts_of
from meshwright.checkpoint.safetensors_io import ITEM_BYTES, Tensor, cannot_write, write
from meshwright.checkpoint.sources import ONE, SPREAD, SUFFIX, kind_of, open_checkpoint
from meshwright.errors import CheckpointError, a_type
from meshwright.redistribute.boxes import Box, full_box

KINDS = ("sharded", "file", "hugging face")
FILE_BYTES = 5_000_000_000  # of a Hugging Face model, as its own tools split it
CONFIG = "config.json"
Told = Callable[[str], None]  # called with the name of each tensor as its turn comes


@dataclass(frozen=True)
class Converted:
    """The result of a conversion: kinds, tensors, bytes, files, and what the new format cannot hold."""

    source: str
    target: str
    tensors: int
    size_bytes: int
    files: tuple[str, ...]
    left_out: tuple[str, ...]


def convert(
    source: Path,
    target: Path,
    *,
    to: str = "",
    config: Path | None = None,
    file_bytes: int = FILE_BYTES,
    told: Told = lambda _: None,
) -> Converted:
    """Write what is in `source` as `target`, which must not be there yet.

    `to` is one of `KINDS`; without it a name that ends in ``.safetensors`` is a file, what was a checkpoint of ours
    becomes a Hugging Face folder, and all else a checkpoint of ours. `config`: the ``config.json`` of a Hugging Face
    model; without it that beside the source. Raises CheckpointError."""
    came = kind_of(source)
    if config is not None:
        _check_config(config)
    to = to or ("file" if target.suffix == SUFFIX else "hugging face" if came == "sharded" else "sharded")
    if to not in KINDS:
        raise CheckpointError(f"{to!r} is not a checkpoint format", why="formats: " + ", ".join(KINDS))
    if target.exists():
        raise CheckpointError(
            f"{str(target)!r} exists already",
            why="nothing is overwritten",
            hint="another name, or remove it first",
        )
    index = open_checkpoint(source)
    index.check_files()
    config = config or next(iter([index.folder / CONFIG] if (index.folder / CONFIG).is_file() else []), None)
    beside = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if to == "file":
            made = _to_file(index, beside, target.name, told)
            beside.replace(target)
            synced(target.parent)
        else:
            beside.mkdir()
            made = (_to_sharded if to == "sharded" else _to_hugging_face)(index, beside, file_bytes, told)
            where = beside if to != "sharded" else next(p for p in beside.iterdir() if p.is_dir())
            if config is not None:
                shutil.copyfile(config, where / CONFIG)
            synced(beside)
            beside.rename(target)
            synced(target.parent)
    except OSError as error:
        raise cannot_write(target, error) from None
    finally:
        if beside.is_dir():
            shutil.rmtree(beside, ignore_errors=True)
        else:
            beside.unlink(missing_ok=True)
    names = list(index.tensors) if to == "sharded" else _weights(index)
    size = sum(index.tensors[n].size_bytes for n in names)
    return Converted(came, to, len(names), size, made, _left_out(index, to, config))


def _check_config(path: Path) -> None:
    """Raise CheckpointError for what is not a configuration of a Hugging Face model."""
    try:
        found, why = json.loads(path.read_text("utf-8")), ""
        why = "" if isinstance(found, dict) else f"it is JSON, but {a_type(found)} and no object"
    except OSError as error:
        why = error.strerror or str(error)
    except (RecursionError, ValueError) as error:  # no text, or no JSON
        why = str(error)
    if why:
        raise CheckpointError(
            f"{str(path)!r} is not a configuration of a Hugging Face model",
            why=why,
            hint="the config.json that was saved with the weights, or model.config.to_json_file(…)",
        )


def _weights(index: Index) -> list[str]:
    """The tensors that other formats have."""
    return [n for n in index.tensors if n.startswith(MODEL) and n[len(MODEL) :] not in index.temporary]


def _left_out(index: Index, to: str, config: Path | None) -> tuple[str, ...]:
    found = []
    if to != "sharded":
        found += ["the optimizer's states"] if index.optimizer is not None else []
        found += [f"the count of {index.step} steps"] if index.step else []
        found += ["what stands as data"] if index.data is not None else []
        found += [f"{len(index.temporary)} buffers that the model makes anew"] if index.temporary else []
    if to == "hugging face" and config is None:
        found.append(f"a {CONFIG}, without which no model is built from the folder")
    return tuple(found)


def _bytes(index: Index, name: str, box: Box | None, told: Told) -> memoryview:
    told(name)
    return index.full(name, box).reshape(-1).data.cast("B")


def _plain(index: Index, names: Sequence[str], told: Told) -> list[Tensor]:
    """List the model's tensors, unsharded, by their names in the model."""
    entries = ((n, index.tensors[n]) for n in names)
    return [
        Tensor(n[len(MODEL) :], e.dtype, e.shape, functools.partial(_bytes, index, n, None, told))
        for n, e in entries
    ]


def _ties(index: Index) -> dict[str, str]:
    """As `safetensors.torch.save_model` notes them, and `load_model` reads."""
    return {"format": "pt", **index.ties}


def _to_file(index: Index, path: Path, name: str, told: Told) -> tuple[str, ...]:
    write(path, _plain(index, _weights(index), told), _ties(index))
    return (name,)


def _to_hugging_face(index: Index, folder: Path, file_bytes: int, told: Told) -> tuple[str, ...]:
    groups = list(_groups(index, file_bytes))
    if len(groups) == 1:
        write(folder / ONE, _plain(index, groups[0], told), _ties(index))
        return (ONE,)
    files = [f"model-{n:05d}-of-{len(groups):05d}{SUFFIX}" for n in range(1, len(groups) + 1)]
    for file, names in zip(files, groups, strict=True):
        write(folder / file, _plain(index, names, told), {"format": "pt"})
    where = {n[len(MODEL) :]: file for file, names in zip(files, groups, strict=True) for n in names}
    total = sum(index.tensors[n].size_bytes for names in groups for n in names)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2)
    write_atomically(folder / SPREAD, text + "\n")
    return (*files, SPREAD)


def _groups(index: Index, file_bytes: int) -> Iterator[list[str]]:
    """The weights in files of about a size, in the order of their names."""
    group: list[str] = []
    size = 0
    for name in _weights(index):
        more = index.tensors[name].size_bytes
        if group and size + more > file_bytes:
            yield group
            group, size = [], 0
        group.append(name)
        size += more
    yield group


def _to_sharded(index: Index, folder: Path, file_bytes: int, told: Told) -> tuple[str, ...]:
    """One file, in parts that many ranks may read; everything that the source has."""
    del file_bytes
    tensors: list[Tensor] = []
    boxes: list[tuple[str, Box]] = []
    for name, entry in index.tensors.items():
        for box in parts_of(full_box(entry.shape), ITEM_BYTES[entry.dtype]):
            data = functools.partial(_bytes, index, name, box, told)
            tensors.append(Tensor(key_of(name, entry.shape, box), entry.dtype, box.shape, data))
            boxes.append((name, box))
    temporary, final = folder / ".new", folder / f"step-{index.step:08d}"
    temporary.mkdir()
    file = "rank00000" + SUFFIX
    written = write(temporary / file, tensors, {"format": "pt"})
    parts: dict[str, list[Part]] = {name: [] for name in index.tensors}
    for tensor, (name, box) in zip(tensors, boxes, strict=True):
        place = written.places[tensor.key]
        parts[name].append(Part(file, box, place.offset, place.crc))
    note = FileNote(written.size_bytes, written.head_bytes, written.head_crc)
    made = Index(
        final,
        {name: Entry(e.dtype, e.shape, tuple(parts[name])) for name, e in index.tensors.items()},
        {file: note},
        index.step,
        index.seed,
        index.world,
        index.ties,
        index.optimizer,
        index.data,
        index.made_by or f"meshwright {meshwright.__version__} convert",
        index.temporary,
    )
    if (index.folder / PLAN).is_file():
        shutil.copyfile(index.folder / PLAN, temporary / PLAN)
    write_atomically(temporary / NAME, to_text(made))
    commit(temporary, final)
    return (f"{final.name}{os.sep}{file}",)


__all__ = ["FILE_BYTES", "KINDS", "Converted", "convert"]
