"""The scheduler's keys and values as a store of torch: process groups meet there, and so do we.

torch's own store has neither a secret nor TLS, and is gone with its process. This one has both, and asks again when the
scheduler was away. The C++ side calls it from its own threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from meshwright.runtime.stores import Store
from meshwright.scheduler.client import Client, Place

PATIENCE = timedelta(minutes=30)


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

    def delete_key(self, key: str) -> bool:
        return self._client.delete(self._prefix + key)

    def num_keys(self) -> int:
        return self._client.count()


__all__ = ["SchedulerStore"]
