"""A time limit is a promise: a search that does not end by itself is left behind, and its best plan so far is taken.

Loops of a search look at its `Stop` and return what they have, but work between two looks may take seconds on large
models. So a search with a time limit runs on a thread of its own, and offers each plan that fits as soon as it is
known. The caller waits a little longer than the limit, takes the quickest plan that was offered, and ends the thread.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from meshwright.errors import PlanError
from meshwright.search.stop import Stop

T = TypeVar("T")

# Seconds beyond the limit: for a search to end by itself, which also gives a bound; for a first plan that fits.
TO_END, TO_FIND = 0.5, 0.75


def within_time(stop: Stop, search: Callable[[], T]) -> T:
    """Return what `search` does, or the best that it offered where it takes longer than its `Stop` has seconds.

    Raises what `search` raises, and PlanError where the time is up and nothing that fits was found.
    """
    if not math.isfinite(stop.seconds):
        return search()
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(search())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="meshwright search", daemon=True)
    thread.start()
    try:
        while not future.done() and time.monotonic() < stop.ends + (TO_END if stop.offered else TO_FIND):
            concurrent.futures.wait([future], timeout=0.05)
    except BaseException:  # a second Ctrl-C
        _give_up(thread)
        raise
    if future.done():
        return future.result()
    _give_up(thread)
    stop.over = True
    if stop.offered is not None:
        return stop.offered()
    raise PlanError(
        f"no plan was found within {stop.seconds:g} s",
        why=f"the search was at: {stop.stage or 'the options of every operator'}; nothing that fits was known by then",
        hint='a longer time_limit; or another mode: "recursive_programming" searches less than "auto", "data_parallel" '
        "nothing",
    )


class _LeftBehind(BaseException):
    """Raised in the thread of a search whose answer nobody waits for."""


def _give_up(thread: threading.Thread) -> None:
    """End a thread at its next instruction: what it computes is lost, and it shares nothing that could be left half
    done."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(_LeftBehind)
        )


__all__ = ["within_time"]
