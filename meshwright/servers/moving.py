"""Use another number of servers while workers train: every block is moved with the state of its optimizer.

All servers stop between the same two steps of each worker: they hold, and accept only pushes that some server had
accepted already (in step, those that complete the newest round). Then nothing waits to be applied anywhere, blocks are
copied, and the new map lets workers go on; each splits its next request by it. Values are the same to the bit.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence

import msgspec

from meshwright.errors import ServerError
from meshwright.servers import messages as m
from meshwright.servers.local import Transport
from meshwright.servers.shards import ShardMap, fingerprint, moves, spread
from meshwright.servers.worker import ask

NOWHERE = ShardMap(0, (), {})  # of a server that has no block yet


def use_servers(transport: Transport, declare: m.Declare, servers: Sequence[int]) -> ShardMap:
    """Spread a job over `servers`, whose processes are there; the new map. Pulls go on meanwhile, pushes wait. Not from
    the thread of a worker: its push may be waited for. The first server of the job stays. Raises ServerError if blocks
    are moving already."""
    first, mover = min(declare.map.servers), uuid.uuid4().hex
    if first not in servers:
        raise ServerError(
            f"server {first} is left out", why="it is the one that all workers ask for the newest map"
        )
    model, known = fingerprint(declare.job, declare.parameters), declare.map
    for server in (
        s for s in servers if s not in known.servers
    ):  # wait for its process before anybody else waits
        said = msgspec.structs.replace(declare, map=NOWHERE)
        ask(transport, {server: (said, [])}, m.Declared)
    while True:  # by the newest map, which a server of an older one may not know
        ask(transport, {first: (m.Hold(model, mover), [])}, m.Held)  # of two moves, one gets no further
        held = ask(transport, {s: (m.Hold(model, mover), []) for s in known.servers}, m.Held)
        newest: ShardMap = max((a.map for a, _ in held.values()), key=lambda x: x.version)
        if newest.version <= known.version:
            break
        known = newest
    clocks = {
        w: [a.clocks[w] for a, _ in held.values() if w in a.clocks]
        for a, _ in held.values()
        for w in a.clocks
    }
    ahead = {worker: max(found) for worker, found in clocks.items()}
    if declare.bound == 0:  # a round is complete when all have pushed it
        ahead = dict.fromkeys(ahead, max(ahead.values(), default=0))
    _same(transport, m.Allow(model, ahead), known.servers)
    _same(transport, m.Reached(model), known.servers)
    new = spread(declare.parameters, servers, newest)
    # as it is now: the pushes that were still accepted may have changed options
    facts = ask(transport, {first: (m.Hold(model, mover), [])}, m.Held)[first][0]
    resume = m.Resume(model, ahead, facts.left, facts.options, facts.began)
    _same(transport, resume, [s for s in servers if s not in known.servers])
    for move in moves(newest, new):
        answers = ask(transport, {move.source: (m.Take(model, move.parameter, move.block), [])}, m.Taken)
        taken, tensors = answers[move.source]
        give = m.Give(model, move.parameter, move.block, taken.names)
        ask(transport, {move.target: (give, tensors)}, m.Done)
    _same(transport, m.Remap(model, new), dict.fromkeys((*known.servers, *servers)))
    return new


def _same(transport: Transport, request: m.Request, servers: Iterable[int]) -> None:
    ask(transport, {server: (request, []) for server in servers}, m.Done)


__all__ = ["use_servers"]
