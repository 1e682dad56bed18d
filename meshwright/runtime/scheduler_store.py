"""The scheduler's keys and values as a store of torch: process groups meet there, and so do we.

torch's own store has neither a secret nor TLS, and is gone with its process. This one has both, and asks again when the
scheduler was away. The C++ side calls it from its own threads.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

from meshwright.runtime.stores import Store
from meshwright.scheduler.client import Client, Place

PATIENCE = timedelta(minutes=30)
TURN_SECONDS = 0.1  # of one question whether keys are there


class SchedulerStore(Store):
    """The keys that begin with `prefix`, as if there were no others."""

    def __init__(self, place: Place, prefix: str, timeout: timedelta = PATIENCE) -> None:
        super().__init__()
        self._client, self._prefix, self._patience = Client(place), prefix, timeout

    @classmethod
    def of(cls, file: Path, prefix: str, timeout: timedelta) -> SchedulerStore:
        """The store that a launcher has written down in a file for its ranks."""
        return cls(Place.read(file), prefix, timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self._patience = timeout

    @property
    def timeout(self) -> timedelta:
        return self._patience

    @contextlib.contextmanager
    def patient(self, seconds: float) -> Iterator[None]:
        """Within it, a scheduler that is away is waited for at least so long."""
        before, self._client.patience = self._client.patience, max(self._client.patience, seconds)
        try:
            yield
        finally:
            self._client.patience = before

    def set(self, key: str, value: bytes | str) -> None:
        self._client.set(self._prefix + key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        found = self._client.get(self._prefix + key, self._patience.total_seconds())
        if found is None:
            raise RuntimeError(f"Wait timeout: {key} has not come within {self._patience}")
        return found

    def add(self, key: str, value: int) -> int:
        return self._client.add(self._prefix + key, value)

    def compare_set(self, key: str, expected_value: bytes | str, desired_value: bytes | str) -> bytes:
        both = (expected_value, desired_value)
        texts = (v.encode() if isinstance(v, str) else bytes(v) for v in both)
        return self._client.swap(self._prefix + key, *texts)

    def check(self, keys: Sequence[str]) -> bool:
        return not self._client.wait(tuple(self._prefix + key for key in keys), 0.0)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = (self._patience if timeout is None else timeout).total_seconds()
        missing = self._client.wait(tuple(self._prefix + key for key in keys), seconds)
        if missing:
            raise RuntimeError(f"Wait timeout: {len(missing)} keys have not come, {missing[0]} among them")

    def arrived(self, keys: Sequence[str], seconds: float) -> bool:
        """Return whether keys are there, or come within some seconds."""
        return not self._client.wait(tuple(self._prefix + key for key in keys), seconds)

    def delete_key(self, key: str) -> bool:
        return self._client.delete(self._prefix + key)

    def num_keys(self) -> int:
        return self._client.count()


def arrived(store: Store, keys: Sequence[str], pause: float) -> bool:
    """Return whether keys are there. If they are not, it has waited `pause` seconds, or longer where each question goes
    to the scheduler, which answers as soon as they come."""
    if isinstance(store, SchedulerStore):
        return store.arrived(keys, TURN_SECONDS)
    if store.check(list(keys)):
        return True
    time.sleep(pause)
    return False


__all__ = ["SchedulerStore", "arrived"]
