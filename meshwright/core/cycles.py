"""Run Python's cyclic garbage collector rarely while a plan is made.

A planner creates hundreds of thousands of small objects that stay alive and form no cycles. Python scans the youngest
objects after every 700 new ones and all objects from time to time. For 10,000 distinct operators that took longer than
planning. During planning the collector runs a hundred times less often; it still runs, so cycles do not pile up.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Generator
from contextlib import contextmanager

YOUNG = 100_000  # new objects until the collector runs

_lock = threading.Lock()
_inside = 0
_before = (0, 0, 0)


@contextmanager
def rare_collection() -> Generator[None]:
    """Collect cycles rarely inside a ``with`` block or a decorated function.

    Uses may nest, also across threads. A collector that the user turned off (or gave a threshold of 0) stays off.
    """
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
