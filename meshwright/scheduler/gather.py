"""Wait until all nodes of a job are there, and say meanwhile for whom."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import msgspec

from meshwright.errors import LaunchError
from meshwright.scheduler import messages as m
from meshwright.scheduler.client import Client, Unreachable

TURN_SECONDS = 1.0  # of one wait for the others, after which `look` is called
QUIET_SECONDS = 5.0  # before it says for whom it waits


def gather(client: Client, join: m.Join, wait_seconds: float, look: Callable[[], None]) -> m.Formed:
    """The next attempt. `client`: with little patience. `wait_seconds`: negative for ever. `look` may raise. Raises
    LaunchError with the names of the nodes that have not come."""
    began, told = time.monotonic(), ""
    while True:
        look()
        waited = time.monotonic() - began
        late = 0 <= wait_seconds < waited
        try:
            asked = msgspec.structs.replace(join, clock=time.time(), seconds=TURN_SECONDS)
            answer = client.ask(asked, m.Formed | m.Waiting, TURN_SECONDS)
        except Unreachable as error:
            if late:
                raise error from None
            continue
        if isinstance(answer, m.Formed):
            return answer
        if late:
            raise _missing(answer, wait_seconds)
        missing = ", ".join(answer.absent)
        if waited > QUIET_SECONDS and missing != told:
            print(f"waiting for {missing}", file=sys.stderr, flush=True)
            told = missing


def _missing(answer: m.Waiting, seconds: float) -> LaunchError:
    here = ", ".join(f"{node.id} ({node.host}, {node.nproc} ranks)" for node in answer.here)
    return LaunchError(
        f"after {seconds:.0f} s nodes are missing: {', '.join(answer.absent)}",
        why=f"here are {here or 'none'}",
        hint="look at the terminal of each missing node; --cluster-time-out SECONDS (MS_TOPO_TIMEOUT) waits longer",
    )


__all__ = ["gather"]
