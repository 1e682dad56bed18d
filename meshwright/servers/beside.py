"""Work beside the steps of a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Beside:
    """Work in a thread of its own, such as blocks on their way to other servers."""

    def __init__(self, work: Callable[[], object], name: str, *, cut_off: bool) -> None:
        """`cut_off`: a process that ends does not wait for it."""
        self._error: BaseException | None = None

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name=name, daemon=cut_off)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Return whether the work is done; after `seconds` at the latest. Raises what went wrong. A move may need a
        step of the worker that waits: call it after the last step, or with a limit."""
        self._thread.join(seconds)
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()


__all__ = ["Beside"]
