"""Opens a path: a checkpoint of ours, a single safetensors file, or the folder of a Hugging Face model.

All three become an `Index`. Weights from elsewhere have no step, no optimizer and no checksums.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from msgspec import Struct

from meshwright.checkpoint.folder import newest
from meshwright.checkpoint.index import MODEL, NAME, Entry, FileNote, Index, Part, read_index
from meshwright.checkpoint.safetensors_io import ITEM_BYTES, read_head, same_bytes
from meshwright.core.typed import typed
from meshwright.errors import CheckpointError
from meshwright.redistribute.boxes import full_box

SUFFIX = ".safetensors"
ONE = "model.safetensors"
SPREAD = "model.safetensors.index.json"


class _Spread(Struct):
    weight_map: dict[str, str]


def kind_of(path: Path) -> str:
    """``file``, ``hugging face`` or ``sharded``."""
    if path.suffix == SUFFIX and not path.is_dir():
        return "file"
    return "hugging face" if (path / ONE).is_file() or (path / SPREAD).is_file() else "sharded"


def resolved(path: Path) -> Path:
    """Of a folder of checkpoints the newest; else the path itself. Raises CheckpointError where nothing is."""
    return newest(path) if kind_of(path) == "sharded" else path


def open_checkpoint(path: Path) -> Index:
    """Open what is there. Raises CheckpointError for what is damaged or not there."""
    match kind_of(path):
        case "file":
            if path.name.startswith("rank") and (path.parent / NAME).is_file():
                raise CheckpointError(
                    f"{path.name} is one rank's file of a checkpoint",
                    why=f"{path.parent.name} is the checkpoint, with {NAME}",
                    hint=f"step.load({str(path.parent)!r})",
                )
            return replace(_from_files(path.parent, [path.name]), one_file=True)
        case "hugging face":
            return _from_files(path, _files_of(path))
    return read_index(newest(path))


def _files_of(folder: Path) -> list[str]:
    """The files of a Hugging Face model."""
    if not (folder / SPREAD).is_file():
        return [ONE]
    try:
        files = set(typed(json.loads((folder / SPREAD).read_text("utf-8")), _Spread).weight_map.values())
        wrong = [name for name in files if Path(name).name != name or "\0" in name]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is no name of a file beside it")
    except (OSError, RecursionError, ValueError) as error:
        raise CheckpointError(f"{SPREAD} is damaged", why=f"{error!s:.400}", where=str(folder)) from None
    return sorted(files)


def _from_files(folder: Path, names: Iterable[str]) -> Index:
    tensors: dict[str, Entry] = {}
    files: dict[str, FileNote] = {}
    ties: dict[str, str] = {}
    for name in names:
        places, notes, length = read_head(folder / name)
        for key, place in places.items():
            box = full_box(place.shape)
            entry = Entry(place.dtype, place.shape, (Part(name, box, place.offset),) if box.numel else ())
            if not same_tensors(folder, entry, tensors.setdefault(MODEL + key, entry)):
                raise CheckpointError(
                    f"{key} is in two files, with different values",
                    why=f"one is {name}",
                    where=str(folder),
                )
        # `safetensors.torch.save_model` notes the further names of a tensor so.
        ties |= {alias: kept for alias, kept in notes.items() if kept in places and alias not in places}
        files[name] = FileNote((folder / name).stat().st_size, length)
    return Index(folder, tensors, files, ties=ties)


def same_tensors(folder: Path, one: Entry, other: Entry) -> bool:
    """Return whether two tensors of files are equal, byte for byte."""
    if one is other:
        return True
    if (one.dtype, one.shape, [p.box for p in one.parts]) != (
        other.dtype,
        other.shape,
        [p.box for p in other.parts],
    ):
        return False
    return all(
        same_bytes(
            (folder / a.file, a.offset), (folder / b.file, b.offset), a.box.numel * ITEM_BYTES[one.dtype]
        )
        for a, b in zip(one.parts, other.parts, strict=True)
    )


__all__ = ["ONE", "SPREAD", "SUFFIX", "kind_of", "open_checkpoint", "resolved", "same_tensors"]
