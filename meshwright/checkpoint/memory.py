"""Copies of a step's state in the memory of machines, from which a job goes on where it was when one of them is lost.

After a step each rank writes what it would write of a checkpoint, in the same format, into a folder that outlives it:
in the memory of its machine, kept by the launcher. The same goes to the next machine, beside the steps that follow or
at once. A set of such files belongs to one step and is taken only if it is complete, so two are kept: a rank begins
another one only when all have ended the last.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import threading
import time
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from meshwright import heartbeat
from meshwright.checkpoint.collect import Part, collected
from meshwright.checkpoint.folder import write_atomically
from meshwright.checkpoint.safetensors_io import Tensor, lead_of
from meshwright.checkpoint.save import ties_of
from meshwright.errors import CheckpointError, MeshwrightError
from meshwright.runtime.gather_texts import gather_texts
from meshwright.runtime.step import LocalStep
from meshwright.scheduler.client import FILE as SCHEDULER_FILE
from meshwright.scheduler.client import Place
from meshwright.scheduler.copies import (
    FOUND,
    NOTE,
    TENSORS,
    WANTED,
    Found,
    Name,
    Neighbour,
    file_of,
    forget,
    forget_attempts,
)
from meshwright.scheduler.trust import Trust

log = logging.getLogger("meshwright")
FOLDER_SECONDS = 60.0  # until the launcher has made the folder
LOOK_SECONDS = 0.005
COPYING = "copying its state into memory"


@dataclass(frozen=True)
class Machines:
    """Where the machines of this job keep copies: by their place, in the order of ranks. `place`: of this one."""

    found: list[Found]
    place: int
    trust: Trust

    @property
    def own(self) -> Path:
        return Path(self.found[self.place].folder)

    @property
    def next(self) -> Found | None:
        """The machine that keeps a copy of what this one has; None where there is no other."""
        return self.found[(self.place + 1) % len(self.found)] if len(self.found) > 1 else None


def machines_of(step: LocalStep) -> Machines:
    """Ask the launchers for their folders. Collective. Raises CheckpointError under another launcher."""
    store, problem, mine = heartbeat.store(), "", ""
    if store is None:
        problem = "another launcher started this rank, and keeps nothing for it"
    else:
        (store.parent / WANTED).touch()
        end = time.monotonic() + FOLDER_SECONDS
        while not (store.parent / FOUND).exists() and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)
        if (store.parent / FOUND).exists():
            mine = (store.parent / FOUND).read_text("utf-8")
        else:
            problem = f"its launcher has made no folder within {FOLDER_SECONDS:.0f} s"
    word = {"problem": problem, "found": mine, "place": int(os.environ.get("GROUP_RANK", "0"))}
    told: list[dict[str, Any]] = gather_texts(step.world, step.rank.device, word)
    for rank, one in enumerate(told):
        if what := one["problem"]:
            raise CheckpointError(
                f"rank {rank} cannot keep copies in memory",
                why=what,
                hint="meshwright run, or memory_every=0",
            )
    assert store is not None
    by_place = {one["place"]: one["found"] for one in told}
    found = [msgspec.json.decode(by_place[place], type=Found) for place in sorted(by_place)]
    scheduler = store.parent / SCHEDULER_FILE
    trust = Place.read(scheduler).trust if scheduler.exists() else Trust()
    return Machines(found, sorted(by_place).index(word["place"]), trust)


def key_of(path: Path) -> str:
    """What tells copies of one script's steps apart: their folder of checkpoints."""
    return f"{zlib.crc32(str(path).encode()):08x}"


class MemoryFile:
    """A file in memory with a place for each tensor of a rank, to be overwritten again and again."""

    def __init__(self, path: Path, heads: list[Tensor]) -> None:
        self.path, self.heads = path, heads
        self.lead = lead_of(heads, {"format": "pt"})
        self.size_bytes = len(self.lead) + sum(head.size_bytes for head in heads)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(
                handle, 0, self.size_bytes
            )  # a full memory is an error here, not a signal later
            self.mapped = mmap.mmap(handle, self.size_bytes)
        finally:
            os.close(handle)
        self.mapped[: len(self.lead)] = self.lead
        self.places: dict[str, tuple[int, int]] = {}
        self._rooms: dict[str, torch.Tensor] = {}
        offset = len(self.lead)
        for head in heads:
            self.places[head.key] = (offset, head.size_bytes)
            if head.size_bytes:
                self._rooms[head.key] = torch.frombuffer(
                    self.mapped, dtype=torch.uint8, count=head.size_bytes, offset=offset
                )
            offset += head.size_bytes

    def fits(self, parts: list[Part]) -> bool:
        return [(h.key, h.dtype, h.shape) for h in self.heads] == [
            (p.key, p.dtype, p.box.shape) for p in parts
        ]

    def write(self, parts: list[Part]) -> None:
        for part in parts:
            if part.key in self._rooms:
                self._rooms[part.key].copy_(part.tensor.contiguous().reshape(-1).view(torch.uint8))

    def described(self) -> dict[str, Any]:
        """What a note says of a file, with the checksums of all that is in it."""
        with memoryview(self.mapped) as view:
            places = {
                head.key: [head.dtype, offset, zlib.crc32(view[offset : offset + size])]
                for head, (offset, size) in zip(self.heads, self.places.values(), strict=True)
            }
        return {
            "file": [self.path.name, self.size_bytes, len(self.lead), zlib.crc32(self.lead)],
            "places": places,
        }


class Copies:
    """The copies of one rank's step. `async_`: they go to the other machine beside the next steps."""

    def __init__(
        self, step: LocalStep, machines: Machines, key: str, temporary: Collection[str], *, async_: bool
    ) -> None:
        self.machines, self._step, self._key, self._temporary, self._async = (
            machines,
            step,
            key,
            temporary,
            async_,
        )
        self._attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self._next = None if machines.next is None else Neighbour(machines.next, machines.trust)
        self._files: list[tuple[Name, MemoryFile]] = []  # of this rank, the older first
        self._thread: threading.Thread | None = None
        self._problem = ""
        self._whole = False  # a set of this attempt has been ended by all
        self.on = True
        self.newest = -1
        self.size_bytes = 0  # of this rank's part

    def write(self, data: Any) -> None:
        """Copy the state as it is now. Collective. What goes wrong ends the copies, and not the job."""
        if not self.on:
            return
        with heartbeat.during(COPYING):
            if not self._ended():
                return
            try:
                note = self._written(data)
            except (MeshwrightError, OSError) as error:
                self._problem = str(error)
                return
        self.newest = self._step.rank.step
        if self._async:
            self._thread = threading.Thread(target=self._send, args=(note,), name="copy to another machine")
            self._thread.start()
        else:
            self._send(note)
            self._ended()

    def close(self) -> None:
        """Wait for what is sent."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._next is not None:
            self._next.close()

    def _ended(self) -> bool:
        """Whether all ranks have ended the last copy; else there are no more. Collective."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        wrong = torch.tensor(float(bool(self._problem)), device=self._step.rank.device)
        self.on = not self._step.over_ranks(wrong).item()
        if self._problem:
            log.warning("no more copies in memory: %s", self._problem)
        if self.on and self._files and not self._whole and os.environ["LOCAL_RANK"] == "0":
            forget_attempts(self.machines.own, self._files[-1][0])
        self._whole = self._whole or bool(self._files)
        return self.on

    def _written(self, data: Any) -> dict[str, Any]:
        """Write this rank's file; the record that makes it whole."""
        step, own = self._step, self.machines.own
        rank = step.world.rank
        parts, note = collected(step, data, self._temporary)
        name = Name(step.rank.step, self._attempt, step.world.mesh.size, self._key)
        folder = own / str(name)
        folder.mkdir(exist_ok=True)
        path = folder / file_of(rank, TENSORS)
        file = None
        if len(self._files) > 1:
            before, old = self._files.pop(0)
            (own / str(before) / file_of(rank, NOTE)).unlink(missing_ok=True)
            if old.fits(parts):
                old.path.replace(path)
                file, old.path = old, path
            forget(own, rank, self._files[-1][0])
        if file is None:
            file = MemoryFile(path, [Tensor(p.key, p.dtype, p.box.shape, lambda: b"") for p in parts])
        self.size_bytes = file.size_bytes
        file.write(parts)
        self._files.append((name, file))
        return {**note, "ties": ties_of(step)}

    def _send(self, note: dict[str, Any]) -> None:
        """Complete this rank's file here, and then on the other machine."""
        name, file = self._files[-1]
        rank = self._step.world.rank
        try:
            text = json.dumps({**note, **file.described()})
            write_atomically(file.path.with_name(file_of(rank, NOTE)), text, lasts=False)
            if self._next is not None:
                with memoryview(file.mapped) as view:
                    self._next.put(name, file.path.name, view)
                self._next.put(name, file_of(rank, NOTE), text.encode())
        except (MeshwrightError, OSError, EOFError) as error:
            self._problem = f"rank {rank}: {error}"


__all__ = ["Copies", "Machines", "key_of", "machines_of"]
