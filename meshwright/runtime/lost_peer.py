"""When one rank fails, the others say why: what ended it is left in the rendezvous store, and who finds a connection
closed looks there.

Without this they say that a connection was closed, in the words of the back end. Nothing is sent while all goes well.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from meshwright import heartbeat
from meshwright.errors import PEER_LOST, MeshwrightError, PeerLost, RunError
from meshwright.runtime.stores import Store

KEY = "meshwright/reason"
TIMED_OUT = re.compile("[Tt]ime(d |-)?out|Timed")
ADDRESS = re.compile(r"\[([0-9a-f.:]+)\]:\d+")  # as gloo writes it
SAID = 1000  # characters of an error that other ranks receive
_broken: list[str] = []  # what failed in the middle on this rank
# The store of this job, this rank, and what is called when it fails, once they are known.
_told: list[tuple[Any, int, Callable[[], None]]] = []


def begin(store: Store | None, rank: int, failing: Callable[[], None], raised: Path | None = None) -> None:
    """From now on an error that ends this process is left in the store. `failing` is called when one does. `raised`:
    the file that says so to the launcher. No `store`: this rank has not met the others yet."""
    _told.append((store, rank, failing))
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failing()
        if isinstance(error, RuntimeError):
            error = lost(error, "a collective") or error
        if isinstance(error, PeerLost):  # its traceback is of no use: what happened, happened elsewhere
            print(f"{PeerLost.__module__}.{PeerLost.__qualname__}: {error}", file=sys.stderr, flush=True)
            _end_at_once(error)
            return
        leave_reason(error, trace)
        before(kind, error, trace)
        sys.stderr.flush()
        if raised is not None:  # once the traceback is in the log; to leave may take long
            with contextlib.suppress(OSError):
                raised.touch()
        _end_at_once(error)

    sys.excepthook = hook


def _end_at_once(error: BaseException) -> None:
    """End a process that an error ends, without taking the interpreter down, once what is registered for its exit is
    done. A thread of gloo that lets go of a tensor meanwhile needs the interpreter's lock, and would abort the process:
    its exit status would not be that of an error."""
    if not isinstance(error, Exception) or not dist.is_initialized():
        return
    if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
        # torch holds it back, to put the rank before each line once this hook is over.
        lines = sys.stderr.getvalue().splitlines()
        sys.stderr = sys.__stderr__
        print("\n".join(f"[rank{dist.get_rank()}]: {line}" for line in lines), file=sys.stderr)
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)


def begin_anew(store: Store, rank: int) -> None:
    """Those that are left go on: from now on reasons are in another store, and what broke off is made up for."""
    _told[:] = [(store, rank, failing) for _, _, failing in _told]
    _broken.clear()


def leave_reason(error: BaseException, trace: TracebackType | None = None) -> None:
    """Leave in the store what ends this rank; the first to do so is heard."""
    if not _told or isinstance(error, SystemExit):
        return
    store, rank, _ = _told[0]
    what = error.what if isinstance(error, MeshwrightError) else str(error)
    frames = traceback.extract_tb(trace)[-1:]
    notes = "".join(getattr(error, "__notes__", ())[:1])  # of an error in a step: the line of the model
    where = error.where if isinstance(error, MeshwrightError) else notes.removeprefix("where: ")
    where = where or "".join(f"{f.filename}:{f.lineno}" for f in frames)
    with contextlib.suppress(Exception):  # whoever kept the store may have gone
        store.compare_set(KEY, "", json.dumps([rank, type(error).__name__, what[:SAID], where[:SAID]]))


def broke_off(error: Exception, what: str) -> None:
    """An error has ended `what` in the middle, where other ranks may wait for this one: it takes part in nothing more,
    whoever catches the error. Nothing where there are no others."""
    if not _told or isinstance(error, MeshwrightError) or dist.get_world_size() == 1 or _broken:
        return
    _broken.append(f"{what} failed on this rank: {type(error).__name__}: {error}"[:SAID])
    _told[0][2]()
    leave_reason(error, error.__traceback__)


def check() -> None:
    """Raise RunError where this rank has broken off: its next collective would meet an earlier one of the others."""
    if _broken:
        raise RunError(
            _broken[0],
            why="the error was caught, but other ranks may wait in that step for this one: whatever it sent now would "
            "be taken for what they wait for",
            hint="let the error end the script, which begins again from the last checkpoint (mw.Autosave, "
            "step.resume); check a batch on all ranks before it is given to a step",
        )


def lost(error: RuntimeError, what: str) -> PeerLost | None:
    """Convert a back-end error caused by the loss of another rank; None for other errors. `what`: the awaited
    operation."""
    if PEER_LOST.search(str(error)) is None:
        return None
    return another_failed(what) or PeerLost(
        f"another rank has gone, for which this one waited in {what}",
        why=_in_words(str(error)),
        hint=heartbeat.all_call() or "the launcher says which rank ended first, and the log of that one why",
    )


def _in_words(text: str) -> str:
    """What a back end says of a rank that has gone, without its own words."""
    how = "did not answer in time" if TIMED_OUT.search(text) else "closed its connection"
    at = ADDRESS.search(text)
    return f"it {how}" + (f" (at {at[1]})" if at else "")


def another_failed(what: str) -> PeerLost | None:
    """That another rank has failed, if it has said so. `what` was waited for."""
    found = _reason()
    if found is None:
        return None
    rank, kind, said, where = found
    return PeerLost(
        f"rank {rank} failed: {kind}: {said}",
        why=f"this rank waited for it in {what}",
        where=f"{where} on rank {rank}" if where else "",
    )


def _reason() -> tuple[int, str, str, str] | None:
    if not _told:
        return None
    store, mine, _ = _told[0]
    with contextlib.suppress(Exception):
        if store.check([KEY]):
            rank, kind, said, where = json.loads(bytes(store.get(KEY)))
            return None if rank == mine else (rank, kind, said, where)
    return None


__all__ = ["another_failed", "begin", "begin_anew", "broke_off", "check", "leave_reason", "lost"]
