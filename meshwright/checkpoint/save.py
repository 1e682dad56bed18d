"""Saving: what a rank writes is listed, ranks agree on a folder, and then each writes its part, at once or beside the
next steps."""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from meshwright import heartbeat
from meshwright.checkpoint.agree import confirm, from_first, packed, unpacked
from meshwright.checkpoint.collect import Part, bytes_of, collected
from meshwright.checkpoint.folder import as_path, begin, own
from meshwright.checkpoint.lock import Lock
from meshwright.checkpoint.safetensors_io import Tensor
from meshwright.checkpoint.step_state import kept_inputs
from meshwright.checkpoint.write import Job
from meshwright.core.type_guards import is_whole
from meshwright.errors import CheckpointError, MeshwrightError, PeerLost
from meshwright.plan.plan import Plan
from meshwright.runtime.communicator import ProcessGroups
from meshwright.runtime.rendezvous import late
from meshwright.runtime.step import LocalStep

log = logging.getLogger("meshwright")
COME_SECONDS = 600.0  # how long a rank waits for the others to come
PATIENCE_SECONDS = 1800.0  # how long a rank waits for the others' files


class Saves:
    """The saves of one rank's step. One is under way at a time."""

    def __init__(
        self,
        step: LocalStep,
        plan: Plan,
        temporary: Collection[str] = (),
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        """`temporary`: buffers that the model makes anew, of which other formats know nothing."""
        self.step, self.plan, self.patience_seconds = step, plan, patience_seconds
        self.temporary = sorted(temporary)
        self.come_seconds = COME_SECONDS
        self._met = False  # all ranks have come to a save of this step
        self._owned: dict[Path, Lock] = {}
        self._thread: threading.Thread | None = None
        self._problem: Exception | None = None
        self._job: Job | None = None  # of the thread
        self.gone: Callable[[], bool] = lambda: False  # whether another rank has gone, and the others go on

    def save(self, path: str | Path, *, data: Any = None, async_: bool = False, keep: int | None = 2) -> Path:
        """Write a checkpoint into a folder of checkpoints; the path of the new one. Collective.

        With `async_` only a copy is made here, in the host's memory, and the rest happens beside the next steps.
        Raises CheckpointError, on all ranks, also for an earlier save that went wrong meanwhile."""
        self.wait()
        with heartbeat.during(heartbeat.SAVING):
            return self._save(as_path(path), data, async_, keep)

    def _save(self, path: Path, data: Any, async_: bool, keep: int | None) -> Path:
        check_keep(keep)
        temporary, final = self._agree(path)
        note, problem = {}, None
        try:
            parts, note = collected(self.step, data, self.temporary)
            tensors = [_tensor(part, copied=async_) for part in parts]
        except MeshwrightError as error:
            tensors, problem = [], error
        rank, world = self.step.world.rank, self.step.world.mesh.size
        job = Job(
            temporary, final, rank, world, tensors, note, problem, self.patience_seconds,
            self.plan.to_json() if rank == 0 else "", ties_of(self.step) if rank == 0 else {}, keep,
            gone=self.gone,
        )  # fmt: skip
        if not async_:
            job.run()
            return final
        self._job = job
        self._thread = threading.Thread(target=self._beside, args=(job,), name=f"save {final.name}")
        self._thread.start()
        return final

    def own(self, path: Path) -> None:
        """Keep other jobs from saving into a folder, as long as this is held. Rank 0's. Raises CheckpointError."""
        self._owned[path] = own(path)

    def follow(self, step: LocalStep, plan: Plan) -> None:
        """From now on save another step, of the same state. A save that is under way is given up: a rank was lost, and
        with it perhaps its part."""
        self.step, self.plan, self._met = step, plan, False
        if self._job is not None:
            self._job.given_up = True
        self._thread, self._job = None, None

    @property
    def under_way(self) -> bool:
        """True if a save goes on beside the steps."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the save that is under way. Raises what went wrong with it."""
        if self._thread is not None:
            with heartbeat.during(heartbeat.FOR_SAVE):
                self._thread.join()
            self._thread = None
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def _beside(self, job: Job) -> None:
        try:
            job.run()
        except Exception as error:  # else it would be said by the thread alone, and training go on
            if job.given_up or isinstance(error, PeerLost):
                log.warning("checkpoint %s is given up: a rank was lost meanwhile", job.final.name)
            else:
                self._problem = error

    def _agree(self, path: Path) -> tuple[Path, Path]:
        """The folders to write in, which rank 0 makes. Raises CheckpointError on all ranks."""
        self._meet()
        self.step.comparison.compare(self.step.rank.step)
        told, mine = "", None
        if self.step.world.rank == 0:
            try:
                self.own(path.absolute())
                temporary, final = begin(path.absolute(), self.step.rank.step, uuid.uuid4().hex[:12])
                told = json.dumps({"paths": [str(temporary), str(final), str(path)]})
            except MeshwrightError as error:
                told, mine = packed(error), error
        found = json.loads(from_first(self.step, told))
        if "paths" not in found:
            raise mine or unpacked(json.dumps(found))
        made, named, where = found["paths"]
        other = None
        if str(path) != where:
            other = CheckpointError(
                f"this rank saves in {str(path)!r}, rank 0 in {where!r}",
                why="a checkpoint is one folder, in which all ranks write",
                hint="step.save(path) with one path on all ranks",
            )
        try:
            confirm(self.step, other)
        except CheckpointError:
            if self.step.world.rank == 0:
                Path(made).rmdir()
            raise
        return Path(made), Path(named)

    def _meet(self) -> None:
        """See that all ranks come to the first save. Later ones meet in collectives alone: they need no store, so the
        scheduler that has it may be away. Raises CheckpointError."""
        if self._met or not isinstance(self.step.world, ProcessGroups):
            return
        if missing := late("step.save", self.come_seconds):
            named = (
                f"rank {missing[0]} has"
                if len(missing) == 1
                else f"ranks {', '.join(map(str, missing))} have"
            )
            raise CheckpointError(
                f"{named} not called step.save within {self.come_seconds:.0f} s",
                why="a checkpoint has the parts of all ranks, and each rank writes its own",
                hint="call step.save on every rank, not under `if rank == 0`",
            )
        self._met = True


def _tensor(part: Part, *, copied: bool) -> Tensor:
    """A part as it is written; `copied`: as it is now, whatever the next steps do."""
    x = part.tensor
    held = torch.empty(x.shape, dtype=x.dtype).copy_(x) if copied else x
    return Tensor(part.key, part.dtype, part.box.shape, lambda: bytes_of(held))


def check_keep(keep: Any) -> None:
    """Raise CheckpointError for what is no number of checkpoints that stay."""
    if keep is not None and (not is_whole(keep) or keep < 1):
        raise CheckpointError(
            f"keep={keep!r} checkpoints",
            why="at least the new one is kept",
            hint="keep=2, or None for all",
        )


def ties_of(step: LocalStep) -> dict[str, str]:
    """Further names of tied parameters → the one under which they are saved."""
    return {alias: entry.target for entry in kept_inputs(step) for alias in entry.ties}


__all__ = ["Saves", "check_keep", "ties_of"]
