"""Servers in the worker's own process: for one process alone, for tests, and for simulation.

A request that has to wait is asked again when another thread has changed something.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Protocol

from meshwright.errors import ServerError
from meshwright.servers import messages as m
from meshwright.servers.server import Reply, Server

Requests = Mapping[int, tuple[m.Request, m.Tensors]]
PATIENCE_SECONDS = 600.0  # for other workers


class Transport(Protocol):
    """Passes requests to servers, all at once, and returns their answers; waits while an answer is `Wait`."""

    def ask(self, requests: Requests, busy: float = 0.0) -> dict[int, Reply]: ...

    def another(self) -> Transport:
        """One to the same servers, for another thread."""
        ...

    def close(self) -> None: ...


class Local:
    """Servers by number. `patience`: seconds to wait for other threads."""

    def __init__(self, servers: Mapping[int, Server], patience: float = PATIENCE_SECONDS) -> None:
        self.servers, self.patience = servers, patience
        self._changed = threading.Condition()

    def ask(self, requests: Requests, busy: float = 0.0) -> dict[int, Reply]:
        """Raises ServerError if what is waited for does not come."""
        found: dict[int, Reply] = {}

        def all_answered() -> bool:
            for number, (request, tensors) in requests.items():
                if number not in found:
                    reply = self.servers[number].answer(request, tensors)
                    if not isinstance(reply[0], m.Wait):
                        found[number] = (reply[0], [tensor.clone() for tensor in reply[1]])
            return len(found) == len(requests)

        with self._changed:
            answered = self._changed.wait_for(all_answered, self.patience)
            self._changed.notify_all()
        if not answered:
            raise ServerError(
                "the other workers do not come on", why=f"their pushes were waited for {self.patience:g} s"
            )
        return found

    def another(self) -> Local:
        return self

    def close(self) -> None:
        """Nothing is open."""


__all__ = ["Local", "Requests", "Transport"]
