"""Training that goes on by itself after a failure: it begins with the newest checkpoint, saves every so many steps, and
once more when it is asked to stop.

    autosave = mw.Autosave(step, "ckpt", every=100, data=loader)
    for batch in loader:
        step(batch)
        autosave()

Under ``meshwright run --max-restarts 3`` a rank that is killed costs the steps since the last save.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import uuid
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from meshwright.checkpoint.agree import confirm, from_first
from meshwright.checkpoint.folder import as_path, own, write_atomically
from meshwright.checkpoint.load import Loaded
from meshwright.checkpoint.lock import Lock
from meshwright.checkpoint.memory import Copies
from meshwright.checkpoint.save import check_keep
from meshwright.checks.input_checks import check_switches
from meshwright.core.type_guards import is_whole
from meshwright.errors import CheckpointError, PeerLost, a_type
from meshwright.parameter_server.server_step import ServerStep
from meshwright.train import TrainStep, shutdown

log = logging.getLogger("meshwright")
STOP = ".stop-"  # begins the names of files that announce a stop
NOTICE_STEPS = 2  # a stop is announced so many steps ahead


class Autosave:
    """Save a training step regularly, resume it at the start, and save on SIGTERM. Call it after every step.

    If parameters are not finite it does not save and logs a warning. `loaded` is the checkpoint from which training
    resumed, or None.

    On SIGTERM (`meshwright run` forwards it to all ranks) the ranks agree on a step two steps later, save there, end
    the process groups and exit with code 0. A second SIGTERM ends a rank immediately. This needs steps in which all
    ranks meet, as in every step that reduces gradients or the loss over all ranks.
    """

    def __init__(
        self,
        step: TrainStep,
        path: str | Path,
        *,
        every: int,
        data: Any = None,
        async_: bool = False,
        keep: int | None = 2,
        memory_every: int = 0,
    ) -> None:
        """Load the newest undamaged checkpoint in `path`, if there is one. Every rank calls it.

        Args:
            step: The training step.
            path: A folder that all ranks share.
            every: Steps between two saves. A script that ends in between calls ``step.save`` for its last steps.
            data: As in `TrainStep.save`, and so are `async_` and `keep`.
            memory_every: Steps between two copies into memory, 0 for none: each rank's part on its machine, and on
                another one if there are several. Under `meshwright run` a job that begins again goes on from them, if
                they are newer than the checkpoints. With `async_` copies are sent beside the next steps.

        Raises CheckpointError.
        """
        if not isinstance(step, TrainStep):
            raise CheckpointError(
                f"the step is {a_type(step)}",
                why="Autosave saves the state of a training step",
                hint="step.resume(path) before the first step, and step.save(path) every so many steps"
                if isinstance(step, ServerStep)
                else "mw.Autosave(step, path, every=100), with step = mw.train_step(…)",
            )
        if not is_whole(every) or every < 1:
            raise CheckpointError(
                f"every={every!r} steps", why="a whole number is expected", hint="every=100"
            )
        if not is_whole(memory_every) or memory_every < 0:
            raise CheckpointError(
                f"memory_every={memory_every!r} steps",
                why="a whole number is expected",
                hint="memory_every=1",
            )
        check_keep(keep)
        check_switches(async_=async_)
        self.step, self.path, self.every, self.data = step, as_path(path), every, data
        self.async_, self.keep = async_, keep
        # Its folder is locked now, and not when the first save is due. A rank that has joined meets no others here.
        self._lock = None if step.joined else self._own()
        self.memory_every = memory_every
        self.copies: Copies | None = None
        self.loaded: Loaded | None = None
        # Replicas that go on without a lost rank have all that a copy has.
        if memory_every and step.survival is None:
            self.loaded, self.copies = step.in_memory(self.path, data=data, async_=async_)
        if self.loaded is None:
            self.loaded = step.resume(path, data=data)
        self.saved = step.steps if self.loaded is not None or step.joined else -1
        word = os.environ.get("TORCHELASTIC_RUN_ID", "").removeprefix("meshwright-")
        if step.survival is None or not word:
            word = from_first(step.local, uuid.uuid4().hex[:12] if step.rank == 0 else "")
        self._stop = self.path / f"{STOP}{word}"
        for left in self.path.glob(f"{STOP}*"):
            if step.rank == 0 and word not in left.name:
                left.unlink(missing_ok=True)
        self._asked, self._last = False, -1
        self._before: Any = None
        self._process = os.getpid()
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._heard)

    def _own(self) -> Lock | None:
        """Keep other jobs from saving here. Raises CheckpointError on all ranks."""
        found, problem = None, None
        if self.step.rank == 0:
            try:
                found = own(self.path.absolute())
            except CheckpointError as error:
                problem = error
        confirm(self.step.local, problem)
        return found

    def __call__(self) -> None:
        """Save if `every` steps have passed. If the ranks have agreed to stop, save and exit. Every rank calls it."""
        now, last = self.step.steps, self._last_step()
        if 0 <= last <= now:
            self._end()
        if self.copies is not None and now % self.memory_every == 0 and now != self.copies.newest:
            with self.step.local.state.access.inside():
                self.copies.write(self.data)
        if now % self.every == 0 and now != self.saved:
            self.saved = now
            try:
                if self._may_save():
                    self.step.save(self.path, data=self.data, async_=self.async_, keep=self.keep)
            except (RuntimeError, PeerLost) as error:
                if not self.step.goes_on_after(error):
                    raise
                log.warning("step %d is not saved: a rank was lost meanwhile", now)

    def close(self) -> None:
        """Wait for a running save and restore the signal handlers. Raises CheckpointError."""
        self.step.wait()
        if self.copies is not None:
            self.copies.close()
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _heard(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)
        if os.getpid() != self._process:  # a loader's worker, which was forked with this handler
            os.kill(os.getpid(), signal.SIGTERM)
        self._asked = True

    def _last_step(self) -> int:
        """The step after which all stop; -1 while none has asked for it."""
        if self._last >= 0:
            return self._last
        asking = self._stop.with_name(f"{self._stop.name}.asked")
        if self.step.rank == 0 and (self._asked or asking.exists()):
            alone = self.step.mesh.size == 1
            self._last = self.step.steps + (0 if alone else NOTICE_STEPS)
            if not alone:
                self.path.mkdir(parents=True, exist_ok=True)
                write_atomically(self._stop, str(self._last))
        elif self._stop.exists():
            self._last = int(self._stop.read_text("utf-8"))
        elif self._asked and self.step.rank != 0:
            self.path.mkdir(parents=True, exist_ok=True)
            asking.touch()
        return self._last

    def _may_save(self) -> bool:
        """Return whether the parameters are finite on all ranks: else the checkpoint would replace a usable one."""
        local = self.step.local
        broken = torch.zeros((), device=local.rank.device)
        with local.state.access.inside():  # each rank looks at its shards
            for name, x in (local.state.tensors | local.state.updated).items():
                if x.is_floating_point():  # a buffer may well be infinite, as masks are
                    wrong = ~x.isfinite() if name in local.state.updated else x.isnan()
                    broken += wrong.any().to(broken)
        if not local.over_ranks(broken).item():
            return True
        if self.step.rank == 0:
            log.warning(
                "parameters are not finite after step %d: this step is not saved, and the checkpoints in %s stay as "
                "they are",
                self.step.steps,
                self.path,
            )
        return False

    def _end(self) -> None:
        self.step.wait()
        saved = self.saved == self.step.steps
        if not saved and self._may_save():
            self.step.save(self.path, data=self.data, keep=self.keep)
            saved = True
        if self.step.rank == 0:
            done = f"saved after step {self.step.steps}" if saved else f"step {self.step.steps} is not saved"
            print(
                f"asked to stop: {done} in {self.path}",
                file=sys.stderr,
                flush=True,
            )
            for left in self.path.glob(f"{self._stop.name}*"):
                left.unlink(missing_ok=True)
        shutdown()
        sys.exit(0)


__all__ = ["Autosave"]
