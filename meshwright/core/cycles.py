"""Python's search for cyclic garbage, put off while a plan is made.

A planner makes hundreds of thousands of small values that stay and refer to no cycle. Python looks through its youngest
ones after every 700 new ones and through all now and again: for 10,000 distinct operators that took longer than the
planning. While a plan is made it looks a hundred times less often; it still looks, so cycles do not pile up.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 100_000  # new values until Python looks through them

_lock = threading.Lock()
_inside = 0
_before = (0, 0, 0)


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Collect cycles seldom inside; for a ``with`` or as a decorator. It nests, over threads too, and a collector that
    the user turned off (by a threshold of 0 too) stays as it is."""
    global _inside, _before
    with _lock:
        _inside += 1
        if _inside == 1:
            _before = gc.get_threshold()
            if 0 < _before[0] < YOUNG:
                gc.set_threshold(YOUNG, *_before[1:])
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                gc.set_threshold(*_before)
