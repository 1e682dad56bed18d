"""Clipping by the norm of all gradients of a step, which no server has alone: a push is held until the norm is known.

So it is with ``staleness=0``; elsewhere each push is an update of its own, which its worker clips by a norm that it
knows. When all workers have pushed a step, each server says the sum of squares of its mean gradients. A worker adds
these up, with those of what is on no server, and says the norm to all servers, which then update. The first norm that a
server hears counts, and it remembers the last one: whoever asks again gets it, and passes it on to the servers that
lack it. So if a worker is killed in between, another one, or one that joins, or who moves blocks, ends what it has
begun, and each update is made once.
"""

from __future__ import annotations

import math

from meshwright.servers import messages as m
from meshwright.servers.asking import ask
from meshwright.servers.local import Transport
from meshwright.servers.shards import ShardMap


def agree(transport: Transport, model: str, shards: ShardMap, clock: int, others: float) -> float:
    """Return the norm of a step's gradients once all servers have updated by it. Waits until all workers have pushed
    the step. `others`: squares of what is on no server. Raises ServerError, BatchError."""
    asked = ask(transport, {s: (m.Measure(model, clock), []) for s in shards.servers}, m.Measured)
    answers = {server: answer for server, (answer, _) in sorted(asked.items())}
    known = [a.norm for a in answers.values() if a.norm is not None]
    norm = known[0] if known else math.sqrt(sum(a.squares for a in answers.values()) + others)
    left = [server for server, a in answers.items() if a.norm is None]
    ask(transport, {server: (m.Clip(model, clock, norm), []) for server in left}, m.Done)
    return norm


__all__ = ["agree"]
