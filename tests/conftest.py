"""What holds for all tests: they compute on one thread, no test fails because a machine is busy, and the garbage
collector looks only at what the tests of a module made.

Tensors are small, ranks are threads already, and pytest runs a worker for each core: more threads wait for one another
in a loop, which takes two thirds of a proof's processor time. Python's collector scans all that was ever imported, some
0.3 s each time, and exporting a model or measuring a peak of memory calls it: half of a test's processor time.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# A shell that starts this in the background has it ignore Ctrl-C, which some tests press.
signal.signal(signal.SIGINT, signal.default_int_handler)

GOLDEN = (5**0.5 - 1) / 2  # its multiples, without what is before the point, lie evenly between 0 and 1


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--share K/N``."""
    parser.addoption(
        "--share", default="1/1", metavar="K/N", help="only the tests of one of N shares, the K-th"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is in other shares. A test is in the same one at all times, whatever others there are."""
    mine, shares = map(int, config.getoption("share").split("/"))
    by_share: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        by_share[zlib.crc32(item.nodeid.encode()) % shares == mine - 1].append(item)
    config.hook.pytest_deselected(items=by_share[False])
    items[:] = _mixed(by_share[True])


def _mixed(items: list[pytest.Item]) -> list[pytest.Item]:
    """Put tests of processes between the modules of others, evenly: workers take stretches of this list, and while one
    waits for its processes the others compute. Those that may take longest are spread first."""
    waiting = [item for item in items if item.get_closest_marker("procs")]
    waiting.sort(key=lambda item: -_seconds(item))
    others = [item for item in items if not item.get_closest_marker("procs")]
    places = [0, *(n for n, (one, two) in enumerate(itertools.pairwise(others), 1) if one.path != two.path)]
    between: dict[int, list[pytest.Item]] = {}
    for number, item in enumerate(waiting):
        place = places[int(number * GOLDEN % 1 * len(places))]
        between.setdefault(place, []).append(item)
    return [one for n in range(len(others) + 1) for one in (*between.get(n, ()), *others[n : n + 1])]


def _seconds(item: pytest.Item) -> float:
    limit = item.get_closest_marker("timeout")
    return float(limit.args[0]) if limit else 0.0


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the cases that `tests.breadth.quick` leaves to `make test-all`."""
    for mark in item.iter_markers("quick"):
        if not mark.args[0](**getattr(item, "callspec").params):  # noqa: B009
            item.add_marker(pytest.mark.full)


@pytest.fixture(scope="module", autouse=True)
def nothing_old_is_collected() -> Iterator[None]:
    """Exempt from collection what was imported and made before the tests of a module."""
    gc.collect()
    gc.freeze()
    yield
