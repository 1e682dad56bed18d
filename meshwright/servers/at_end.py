"""What the workers of steps that are not closed do when their script ends."""

from __future__ import annotations

import atexit
import contextlib
import sys
import weakref

from meshwright.errors import MeshwrightError
from meshwright.servers.sockets import Remote
from meshwright.servers.worker import Worker

OPEN: weakref.WeakSet[Worker] = weakref.WeakSet()  # of steps that are not closed
LEAVE_SECONDS = 2.0  # for servers that may have ended before


def settle_shares() -> None:
    """At the end of a script, if no error is on its way: wait until the last steps of `mode="parameter_server"` have
    the shares of all workers. Raises ServerError where one has ended before, BatchError where batches differed."""
    if sys.exc_info()[0] is None:
        for worker in list(OPEN):
            if worker.declare.shares and worker.declare.workers > 1:
                worker.settle()


@atexit.register
def leave() -> None:
    """If no error has ended the script: let nobody wait for this worker, as `ServerStep.close` does."""
    if getattr(sys, "last_value", None) is not None:
        return
    for worker in list(OPEN):
        if isinstance(worker.transport, Remote):
            worker.transport.away = worker.transport.patience = LEAVE_SECONDS
            with contextlib.suppress(MeshwrightError):
                worker.leave()


__all__ = ["OPEN", "leave", "settle_shares"]
