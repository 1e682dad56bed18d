"""The part of a save that needs nobody else's memory: files, notes, waiting for the others, the index, the name.

Every rank writes a file of its own and a note about it; rank 0 waits for all notes, makes the index of them and gives
the folder its name. Ranks meet through files alone here, so the same code runs beside the next steps, in a thread that
must not call collectives.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from errno import ENOSPC
from pathlib import Path
from typing import Any

import torch

import meshwright
from meshwright import heartbeat
from meshwright.checkpoint import safetensors_io as tensor_file
from meshwright.checkpoint.agree import packed, unpacked
from meshwright.checkpoint.folder import commit, prune, write_atomically
from meshwright.checkpoint.index import NAME, PLAN, Entry, FileNote, Index, Part, to_text
from meshwright.checkpoint.step_state import merged
from meshwright.errors import CheckpointError, MeshwrightError, PeerLost
from meshwright.redistribute.boxes import Box

LOOKS = (0.002, 0.2)  # seconds between two looks for files of others: first, and at most
LONGER = 1.1  # each pause than the one before: then little more is waited than this part of what has to be
OUTCOME = "problem.json"


@dataclass
class Job:
    """One rank's part of one save."""

    temporary: Path
    final: Path
    rank: int
    world: int
    tensors: list[tensor_file.Tensor]  # emptied once they are written
    note: dict[str, Any]
    problem: MeshwrightError | None
    patience_seconds: float
    plan: str
    ties: dict[str, str]
    keep: int | None
    gone: Callable[[], bool] = lambda: False  # whether another rank has gone, and the others go on
    given_up: bool = False

    def run(self) -> None:
        """Write this rank's part, and wait until the checkpoint is whole. Raises CheckpointError."""
        file = self.temporary / f"rank{self.rank:05d}.safetensors"
        try:
            if self.problem is not None:
                raise self.problem
            if not self.temporary.is_dir():
                raise CheckpointError(
                    f"rank {self.rank} does not see the folder that rank 0 has made",
                    where=str(self.temporary),
                    hint="a folder on a file system that all ranks share",
                )
            written = tensor_file.write(file, self.tensors, {"format": "pt"})
            self.tensors.clear()
            places = {key: [p.dtype, p.offset, p.crc] for key, p in written.places.items()}
            lengths = [written.size_bytes, written.head_bytes, written.head_crc]
            self._tell({**self.note, "file": [file.name, *lengths], "places": places})
        except (MeshwrightError, OSError) as error:
            file.unlink(missing_ok=True)
            found = error if isinstance(error, MeshwrightError) else tensor_file.cannot_write(file, error)
            self._tell({"problem": packed(found)})
            self.problem = found
        told = heartbeat.begun("checkpoint", tuple(range(self.world)), "save", self.final.name)
        with heartbeat.waiting(told, beside=threading.current_thread() is not threading.main_thread()):
            if self.rank == 0:
                self._finish()
            else:
                self._await()

    def _tell(self, note: dict[str, Any]) -> None:
        """Rank 0 waits for this note. One that does not fit on the disk says so in the room of this rank's part, or by
        being empty."""
        path = self.temporary / f"rank{self.rank:05d}.json"
        try:
            write_atomically(path, json.dumps(note), lasts=False)
        except OSError as error:
            self.problem = self.problem or tensor_file.cannot_write(path, error)
            with contextlib.suppress(OSError):
                path.with_suffix(".safetensors").unlink(missing_ok=True)
                try:
                    write_atomically(path, json.dumps({"problem": packed(self.problem)}), lasts=False)
                except OSError:
                    path.touch()

    def _finish(self) -> None:
        """Rank 0: everybody's notes, the index, the name."""
        names = [f"rank{r:05d}.json" for r in range(self.world)]
        missing = set(names)

        def all_there() -> bool:
            missing.difference_update([n for n in missing if (self.temporary / n).exists()])
            return not missing or (self.problem is not None and missing == {names[0]})

        if not self._eventually(all_there):
            late = ", ".join(n[4:9].lstrip("0") or "0" for n in sorted(missing))
            self.problem = self.problem or CheckpointError(
                f"ranks {late} have not written their part of the checkpoint",
                why=f"rank 0 has waited for {self.patience_seconds:.0f} s",
                where=str(self.temporary),
            )
        if self.problem is None:
            notes = [_note(self.temporary / n) for n in names]
            told = (unpacked(n["problem"], f"rank {r}: ") for r, n in enumerate(notes) if "problem" in n)
            self.problem = next(told, None)
            if self.problem is None:
                try:
                    self._commit(notes)
                except OSError as error:
                    self.problem = tensor_file.cannot_write(self.temporary / NAME, error)
                except MeshwrightError as error:
                    self.problem = error
        if self.problem is not None:
            self._give_up(self.problem)
            raise self.problem
        prune(self.final.parent, self.keep)

    def _commit(self, notes: list[dict[str, Any]]) -> None:
        index = index_of(self.final, notes, self.ties)
        if self.plan:
            write_atomically(self.temporary / PLAN, self.plan)
        write_atomically(self.temporary / NAME, to_text(index))
        for number in range(self.world):
            (self.temporary / f"rank{number:05d}.json").unlink()
        commit(self.temporary, self.final)

    def _give_up(self, problem: MeshwrightError) -> None:
        """Leave nothing but a word for the others, who wait for it."""
        for path in self.temporary.glob("*"):
            path.unlink(missing_ok=True)
        try:
            write_atomically(self.temporary / OUTCOME, packed(problem))
        except OSError:
            shutil.rmtree(self.temporary, ignore_errors=True)
        if self.world == 1:
            shutil.rmtree(self.temporary, ignore_errors=True)

    def _eventually(self, true: Callable[[], bool]) -> bool:
        """Return whether something comes true in time. Raises PeerLost where it will not: a rank has gone, and the
        others go on."""
        found = _eventually(lambda: true() or self.given_up or self.gone(), self.patience_seconds)
        if found and not true():
            raise PeerLost("another rank has gone", why=f"its part of {self.final.name} may be missing")
        return found

    def _await(self) -> None:
        """Other ranks: until rank 0 has given the folder its name, or has given up."""
        outcome = self.temporary / OUTCOME

        def over() -> bool:
            return outcome.exists() or (self.final / NAME).exists() or not self.temporary.exists()

        ended = self._eventually(over)
        if (self.final / NAME).exists():
            return
        if self.problem is not None:
            raise self.problem
        if outcome.exists():
            raise unpacked(outcome.read_text("utf-8"))
        raise CheckpointError(
            "rank 0 has not ended the checkpoint" if not ended else "rank 0 gave the checkpoint up",
            where=str(self.temporary),
        )


def _note(path: Path) -> dict[str, Any]:
    """Read the record that a rank wrote about its file."""
    text = path.read_text("utf-8")
    return (
        json.loads(text) if text else {"problem": packed(tensor_file.cannot_write(path, OSError(ENOSPC, "")))}
    )


def _eventually(true: Callable[[], bool], seconds: float) -> bool:
    """Return whether something comes true in time."""
    end, pause = time.monotonic() + seconds, LOOKS[0]
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(LOOKS[1], pause * LONGER)
    return True


def index_of(final: Path, notes: list[dict[str, Any]], ties: dict[str, str]) -> Index:
    """The index of what the ranks have written. Raises CheckpointError where they do not fit one another."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    parts: dict[str, list[Part]] = {}
    files: dict[str, FileNote] = {}
    for rank, note in enumerate(notes):
        name, *lengths = note["file"]
        files[name] = FileNote(*lengths)
        for key, (tensor, shape, start, size) in note["boxes"].items():
            dtype, offset, crc = note["places"][key]
            shapes[tensor] = dtype, tuple(shape)
            parts.setdefault(tensor, []).append(Part(name, Box(tuple(start), tuple(size)), offset, crc))
        for tensor, (dtype, shape) in note["empty"].items():
            shapes[tensor] = dtype, tuple(shape)
        for what in ("step", "data"):
            mine, theirs = json.dumps(notes[0][what]), json.dumps(note[what])
            if mine != theirs:
                raise CheckpointError(
                    f"rank {rank} saves another {what} than rank 0",
                    why=f"{theirs[:80]} there, {mine[:80]} here",
                    hint="data= is one value for all ranks, such as the position of a loader that all go through",
                )
    entries = {n: Entry(*shapes[n], tuple(parts.get(n, ()))) for n in sorted(shapes)}
    for name, entry in entries.items():  # what is missing would be missed when it is loaded
        assert sum(p.box.numel for p in entry.parts) == math.prod(entry.shape), f"parts of {name} are missing"
    return Index(
        final,
        entries,
        files,
        notes[0]["step"],
        notes[0]["seed"],
        len(notes),
        ties,
        merged([n["optimizer"] for n in notes]),
        notes[0]["data"],
        f"meshwright {meshwright.__version__}, torch {torch.__version__}",
        frozenset(notes[0]["temporary"]),
        samples=notes[0].get("samples", {}),
    )


__all__ = ["Job", "index_of"]
