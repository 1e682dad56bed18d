"""A folder of checkpoints: one subfolder each, written under a temporary name and renamed when complete.

    ckpt/latest                     the name of the newest complete checkpoint
    ckpt/step-00000200/             checkpoint.json, plan.json, rank00000.safetensors, …
    ckpt/.saving-step-00000300-…/   one that is being written, or whose writer was killed
    ckpt/.lock                      the job that saves here

A process killed at any moment leaves as the newest either the previous checkpoint or the new one, complete.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from meshwright.checkpoint.index import NAME, leads_away
from meshwright.checkpoint.lock import Lock, lock
from meshwright.checkpoint.safetensors_io import cannot_write
from meshwright.errors import CheckpointError, path_from

LATEST = "latest"
UNFINISHED = ".saving-"
PREFIX = "step-"


def as_path(path: str | Path) -> Path:
    """Convert a path given by the user. Raises CheckpointError if it is not a path."""
    return path_from(
        path,
        f"the path of a checkpoint is {path!r:.80}",
        CheckpointError,
        'a folder of checkpoints such as "ckpt"; step.load takes one of them, a .safetensors file and a '
        "Hugging Face folder too",
    )


def newest(path: Path) -> Path:
    """The folder of the checkpoint that a path means: itself, or the newest of those in it. Raises CheckpointError."""
    if (path / NAME).is_file():
        return path
    named = _named(path)
    if named is not None and (named / NAME).is_file():
        return named
    found = complete_checkpoints(path)
    if found:
        return found[0]
    begun = [p.name for p in path.glob(f"{UNFINISHED}*")] if path.is_dir() else []
    raise CheckpointError(
        f"there is no checkpoint in {str(path)!r}",
        why="it does not exist"
        if not path.exists()
        else "it is a file"
        if not path.is_dir()
        else f"a save was begun there and not finished: {begun[0]}"
        if begun
        else f"neither it nor a folder {PREFIX}… in it has a {NAME}",
        hint="a folder of checkpoints, a .safetensors file, or the folder of a Hugging Face model; "
        "pickles (.pt, .bin) are not read"
        if path.exists() and not path.is_dir()
        else "step.save(path) writes one",
    )


def _named(path: Path) -> Path | None:
    """The folder that is named as the newest; None where none is. Raises CheckpointError for one that is elsewhere."""
    try:
        name = (path / LATEST).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    if name and (name in (".", "..") or Path(name).name != name or "\0" in name or leads_away(path / name)):
        raise CheckpointError(
            f"{LATEST} names {name[:200]!r}, which is not in the folder",
            why="a checkpoint is loaded only from inside the given path",
            where=str(path / LATEST),
            hint=f"step.load with the path of the checkpoint itself, or write the name of a folder {PREFIX}… there",
        )
    return path / name if name else None


def complete_checkpoints(path: Path) -> list[Path]:
    """List the complete checkpoints of a folder, the newest first. Links out of the folder are skipped."""
    there = path.glob(f"{PREFIX}*") if path.is_dir() else ()
    found = (p for p in there if (p / NAME).is_file() and not leads_away(p))
    return sorted(found, key=lambda p: ((p / NAME).stat().st_mtime_ns, p.name), reverse=True)


def in_turn(path: Path) -> list[Path]:
    """List the complete checkpoints of a folder: the one named by ``latest`` first, then the newest. For the path of a
    single checkpoint, list that one. Raises CheckpointError if the path exists and is not a folder."""
    if (path.exists() and not path.is_dir()) or (path / NAME).is_file():
        return [newest(path)]
    found = complete_checkpoints(path)
    named = _named(path)
    first = named if named in found else found[0] if found else None
    return sorted(found, key=lambda p: p != first)


def passed_over(path: Path, chosen: Path) -> list[str]:
    """Explain each newer checkpoint of a folder that is incomplete, and therefore passed over in favour of `chosen`."""
    if not path.is_dir() or (path / NAME).is_file():
        return []
    found, taken = [], f"{chosen.name} is taken" if chosen != path else "training begins anew"
    named = _named(path)
    if named is not None and not (named / NAME).is_file():
        lacks = f"has no {NAME}" if named.is_dir() else "is not there"
        found.append(f"{path / LATEST} names {named.name!r}, which {lacks}: {taken}")
    for folder in sorted(path.glob(f"{PREFIX}*")):
        newer = folder != named and (chosen == path or folder.name > chosen.name)
        if newer and leads_away(folder):
            found.append(f"{folder} is a link out of {path}: {taken}")
        elif newer and folder.is_dir() and not (folder / NAME).is_file():
            found.append(f"{folder} has no {NAME}, so it is incomplete: {taken}")
    return found


def own(path: Path) -> Lock:
    """Make a folder of checkpoints if it is not there, and keep other jobs from saving into it as long as the result is
    held. Raises CheckpointError."""
    if (path / NAME).is_file():
        raise CheckpointError(
            f"{str(path)!r} is a checkpoint itself",
            why=f"it has a {NAME}; checkpoints are saved as folders {PREFIX}… in the given folder",
            hint=f"step.save({str(path.parent)!r})",
        )
    if path.exists() and not path.is_dir():
        raise CheckpointError(
            f"{str(path)!r} is a file",
            why="a checkpoint is a folder in the given folder",
            hint="step.save('checkpoints')",
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from None
    return lock(path)


def begin(path: Path, step: int, word: str) -> tuple[Path, Path]:
    """Make the folder in which a checkpoint is written, in a folder that this job owns; its name and the one that it
    gets at the end.

    What killed saves have left is removed. `word` tells this save from any other. Raises CheckpointError."""
    final = path / f"{PREFIX}{step:08d}"
    number = 1
    while final.exists():  # the same step once more
        number += 1
        final = path / f"{PREFIX}{step:08d}.{number}"
    temporary = path / f"{UNFINISHED}{final.name}-{word}"
    try:
        for left in path.glob(f"{UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)
        temporary.mkdir()
    except OSError as error:
        raise cannot_write(temporary, error) from None
    return temporary, final


def write_atomically(path: Path, text: str, *, lasts: bool = True) -> None:
    """Write a small file atomically. With `lasts` False the file need not reach the disk, as nothing reads it before
    the checkpoint is complete. Raises OSError."""
    beside = path.with_name(f".{path.name}.new")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            if lasts:
                file.flush()
                os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def commit(temporary: Path, final: Path) -> None:
    """Give a complete checkpoint its final name and make it the newest. Raises OSError.

    If only the second rename reaches the disk, `newest` takes the previous checkpoint."""
    synced(temporary)
    temporary.rename(final)
    write_atomically(final.parent / LATEST, f"{final.name}\n")
    synced(final.parent)


def synced(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def prune(path: Path, keep: int | None) -> None:
    """Remove all but the newest checkpoints of a folder. None keeps all."""
    for old in _beyond(path, keep):
        # Without its index it is no checkpoint any more, so one that is removed by half is not taken for one.
        with contextlib.suppress(OSError):
            (old / NAME).unlink()
        shutil.rmtree(old, ignore_errors=True)


def _beyond(path: Path, keep: int | None) -> Iterator[Path]:
    if keep is not None:
        yield from complete_checkpoints(path)[keep:]


__all__ = [
    "LATEST",
    "UNFINISHED",
    "as_path",
    "begin",
    "commit",
    "newest",
    "own",
    "passed_over",
    "prune",
    "synced",
    "complete_checkpoints",
    "write_atomically",
]
