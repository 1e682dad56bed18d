"""Going on from copies in memory: which set is complete, who has which file, and the bytes that this rank reads of it.

Files of this machine are linked; of those of others a rank fetches what it needs into files of the same length with
holes. So what is read is an ordinary checkpoint, with all its checks, under any plan and on any number of ranks.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.checkpoint.agree import from_first
from meshwright.checkpoint.fill import met
from meshwright.checkpoint.folder import in_turn
from meshwright.checkpoint.index import NAME, Index, read_index, to_text
from meshwright.checkpoint.load import Loaded, generators_of, load_from, together, wanted
from meshwright.checkpoint.memory import Machines
from meshwright.checkpoint.safetensors_io import ITEM_BYTES
from meshwright.checkpoint.write import index_of
from meshwright.errors import CheckpointError, DamagedError, LaunchError, MeshwrightError
from meshwright.runtime.gather_texts import gather_texts
from meshwright.runtime.step import LocalStep
from meshwright.scheduler.copies import NOTE, TENSORS, Name, Neighbour, file_of, there


@dataclass(frozen=True)
class WholeSet:
    """`holders`: by rank that wrote, the places of the machines that have its file."""

    name: Name
    holders: dict[int, list[int]]


def recover(
    step: LocalStep, machines: Machines, key: str, path: Path, told: Callable[[str], None], **options: Any
) -> Loaded | None:
    """Load the newest set that is complete and sound, if it is newer than the checkpoints in `path`; else None. `told`
    is called on rank 0. Collective. `options`: of `load_from`."""
    sets = _whole_sets(step, machines, key)
    saved = int(together(step, path, lambda: _newest_saved(path)) if sets else 0)
    saved = max(gather_texts(step.world, step.rank.device, saved)) if sets else 0
    for one in sets:
        if one.name.step <= saved:
            break
        folder = machines.own / f"again.{step.world.rank}"
        try:
            together(step, path, lambda one=one, folder=folder: _laid_out(step, machines, one, folder))
            text = from_first(step, (folder / NAME).read_text("utf-8") if step.world.rank == 0 else "")
            together(step, path, lambda one=one, f=folder, t=text: _fetched(step, machines, one, f, t))
            loaded = load_from(step, path, folder, **options)
        except CheckpointError as error:
            if step.world.rank == 0:
                told(f"the copies in memory of step {one.name.step} cannot be used: {error.what}")
            continue
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if step.world.rank == 0:
            told(f"goes on after step {loaded.step}, from copies in memory")
        return replace(loaded, path=machines.own / str(one.name))
    return None


def _whole_sets(step: LocalStep, machines: Machines, key: str) -> list[WholeSet]:
    """Those that some machines have together, the newest first. Collective."""
    mine = {str(name): ranks for name, ranks in there(machines.own, key).items()}
    listed: list[dict[str, Any]] = gather_texts(
        step.world, step.rank.device, {"place": machines.place, "sets": mine}
    )
    holders: dict[Name, dict[int, list[int]]] = {}
    for place, sets in ((told["place"], told["sets"]) for told in listed):
        for text, ranks in sets.items():
            name = Name.of(text)
            assert name is not None
            for rank in ranks:
                known = holders.setdefault(name, {}).setdefault(rank, [])
                if place not in known:
                    known.append(place)
    whole = [n for n, of in holders.items() if set(of) == set(range(n.world))]
    return [WholeSet(name, holders[name]) for name in sorted(whole, reverse=True)]


def _newest_saved(path: Path) -> int:
    """The step of the newest checkpoint of a folder; -1 without one that can be read."""
    with contextlib.suppress(MeshwrightError, OSError):
        for place in in_turn(path):
            return read_index(place).step
    return -1


def _source(machines: Machines, one: WholeSet, rank: int) -> int:
    """The machine of which this one takes a file: itself, if it has it."""
    places = one.holders[rank]
    return machines.place if machines.place in places else places[rank % len(places)]


def _laid_out(step: LocalStep, machines: Machines, one: WholeSet, folder: Path) -> None:
    """Begin the folder; on rank 0 with the index of the set, from the records of all ranks. Raises CheckpointError."""
    shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was ended here
    folder.mkdir()
    if step.world.rank:
        return
    notes: list[dict[str, Any]] = []
    with _asking(machines) as ask:
        for rank in range(one.name.world):
            source, file = _source(machines, one, rank), file_of(rank, NOTE)
            if source == machines.place:
                text = (machines.own / str(one.name) / file).read_bytes()
            else:
                size, _ = ask(source).take(one.name, file, ())
                text = b"".join(bytes(piece) for piece in ask(source).take(one.name, file, ((0, size),))[1])
            notes.append(json.loads(text))
    index = index_of(folder, notes, notes[0]["ties"])
    (folder / NAME).write_text(to_text(index), "utf-8")


def _fetched(step: LocalStep, machines: Machines, one: WholeSet, folder: Path, text: str) -> None:
    """Have in the folder what this rank reads of a set. `text`: of its index. Raises CheckpointError."""
    (folder / NAME).write_text(text, "utf-8")
    index = read_index(folder)
    ranges = _ranges(index, step)
    with _asking(machines) as ask:
        for rank in range(one.name.world):
            file, source = file_of(rank, TENSORS), _source(machines, one, rank)
            if source == machines.place:
                (folder / file).hardlink_to(machines.own / str(one.name) / file)
                continue
            mine = sorted(ranges.get(file, set()) | {(0, index.files[file].head_bytes)})
            size, pieces = ask(source).take(one.name, file, mine)
            _with_holes(folder / file, size, mine, iter(pieces))


def _with_holes(path: Path, size: int, ranges: list[tuple[int, int]], pieces: Iterator[memoryview]) -> None:
    with path.open("wb") as out:
        out.truncate(size)
        piece = memoryview(b"")
        for offset, length in ranges:
            out.seek(offset)
            while length:
                piece = piece or next(pieces)
                out.write(piece[:length])
                length, piece = length - len(piece[:length]), piece[length:]


def _ranges(index: Index, step: LocalStep) -> dict[str, set[tuple[int, int]]]:
    """The bytes that a rank reads, by file: offset and length."""
    found: dict[str, set[tuple[int, int]]] = {}
    parts = [(n, part) for n, held in wanted(index, step, True) for part in met(index, n, held)]
    begin = generators_of(index, step)
    parts += [
        (n, number) for n, e in index.tensors.items() if n.startswith(begin) for number in range(len(e.parts))
    ]
    for name, number in parts:
        entry = index.tensors[name]
        part = entry.parts[number]
        found.setdefault(part.file, set()).add((part.offset, part.box.numel * ITEM_BYTES[entry.dtype]))
    return found


@contextlib.contextmanager
def _asking(machines: Machines) -> Iterator[Callable[[int], Neighbour]]:
    """What gives a machine to be asked, by its place. Raises CheckpointError for one that does not answer."""
    known: dict[int, Neighbour] = {}

    def ask(place: int) -> Neighbour:
        return known.setdefault(place, Neighbour(machines.found[place], machines.trust))

    try:
        yield ask
    except LaunchError as error:
        raise DamagedError(f"a copy in memory cannot be fetched: {error.what}", why=error.why) from None
    except CheckpointError:
        raise
    except (OSError, EOFError, ValueError, KeyError, StopIteration) as error:
        raise DamagedError(
            "a copy in memory cannot be fetched", why=f"{type(error).__name__}: {error}"
        ) from None
    finally:
        for one in known.values():
            one.close()


__all__ = ["recover"]
