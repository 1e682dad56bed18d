"""A time limit is a promise, and so is Ctrl-C: a search that does not end by itself is left behind, and its best plan
so far is taken.

Loops of a search look at its `Stop` and return what they have, but work between two looks may take seconds on large
models. So a search runs on a thread of its own, and offers each plan that fits as soon as it is known. The caller waits
a little longer than the limit, or than the moment at which an end was asked for, takes the quickest plan that was
offered, and ends the thread.
"""

from __future__ import annotations

import concurrent.futures
import contextvars
import ctypes
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
    """Return what `search` does, or the best that it offered where it goes on after the time limit of its `Stop`, or
    after the user or the progress callback asked for the end.

    Raises what `search` raises, and PlanError where the time is up and nothing that fits was found.
    """
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            future.set_result(context.run(search))
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="meshwright search", daemon=True)
    thread.start()
    try:
        while not future.done() and time.monotonic() < _end(stop):
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
        hint="a longer time_limit, or none: then the search ends by itself, with a plan or with what does not fit",
    )


def _end(stop: Stop) -> float:
    """Until when to wait for a search, on the clock of `time.monotonic`. Who asks for the end waits for a plan."""
    if stop.offered is None:
        return stop.ends + TO_FIND
    return min(stop.ends, stop.asked) + TO_END


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
