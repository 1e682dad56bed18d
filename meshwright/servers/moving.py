"""Use another number of servers while workers train: every block is moved with the state of its optimizer.

All servers stop between the same two steps of each worker: they hold, and accept only pushes that some server had
accepted already (in step, those that complete the newest round). Then nothing waits to be applied anywhere, blocks are
copied, and the new map lets workers go on; each splits its next request by it. Values are the same to the bit.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable, Sequence

import msgspec

from meshwright.core.type_guards import is_whole
from meshwright.errors import ServerError
from meshwright.servers import messages as m
from meshwright.servers.asking import ask
from meshwright.servers.beside import Beside
from meshwright.servers.clipping import agree
from meshwright.servers.local import Transport
from meshwright.servers.shards import MOST_SERVERS, ShardMap, fingerprint, moves, spread
from meshwright.servers.sockets import Remote

NOWHERE = ShardMap(0, (), {})  # of a server that has no block yet


def use_servers(
    transport: Transport, declare: m.Declare, servers: Sequence[int], mover: str = ""
) -> ShardMap:
    """Spread a job over `servers`, whose processes are there; the new map. Pulls go on meanwhile, pushes wait. Not from
    the thread of a worker: its push may be waited for. The first server of the job stays. Raises ServerError if blocks
    are moving already. `mover`: who moves them; one that is killed may begin again under the same name."""
    first, mover = declare.map.first, mover or uuid.uuid4().hex
    if first not in servers:
        raise ServerError(
            f"server {first} is left out", why="it is the one that all workers ask for the newest map"
        )
    model, known = fingerprint(declare.job, declare.parameters), declare.map
    for server in (
        s for s in servers if s not in known.servers
    ):  # wait for its process before anybody else waits
        ask(transport, {server: (msgspec.structs.replace(declare, map=NOWHERE), [])}, m.Declared)
    while True:  # by the newest map, which a server of an older one may not know
        ask(transport, {first: (m.Hold(model, mover), [])}, m.Held)  # of two moves, one gets no further
        held = ask(transport, {s: (m.Hold(model, mover), []) for s in known.servers}, m.Held)
        newest: ShardMap = max((a.map for a, _ in held.values()), key=lambda x: x.version)
        behind = [s for s, (a, _) in held.items() if a.map.version < newest.version]
        if newest.version <= known.version and not behind:
            break
        _same(transport, m.Remap(model, newest), behind)  # a mover was killed while it sent the map
        known = newest
    said = [a.left | a.clocks for a, _ in held.values()]  # a server may not know yet that a worker was lost
    ahead = {w: max(each.get(w, 0) for each in said) for a, _ in held.values() for w in a.clocks}
    if declare.bound == 0:  # a round is complete when all have pushed it
        ahead = dict.fromkeys(ahead, max(ahead.values(), default=0))
    _same(transport, m.Allow(model, ahead), known.servers)
    last = max([*ahead.values(), *(c for a, _ in held.values() for c in a.left.values())], default=0)
    if (
        last and declare.limit is not None and declare.holds and not declare.limit.outside
    ):  # its workers may have been killed
        agree(transport, model, known, last - 1, 0.0)
    _same(transport, m.Reached(model), known.servers)
    new = spread(declare.parameters, servers, newest)
    # as it is now: the pushes that were still accepted may have changed options
    facts = ask(transport, {first: (m.Hold(model, mover), [])}, m.Held)[first][0]
    resume = m.Resume(model, facts.clocks, facts.left, facts.options, facts.began)
    _same(transport, resume, [s for s in servers if s not in known.servers])
    for move in moves(newest, new):
        answers = ask(transport, {move.source: (m.Take(model, move.parameter, move.block), [])}, m.Taken)
        taken, tensors = answers[move.source]
        give = m.Give(model, move.parameter, move.block, taken.names)
        ask(transport, {move.target: (give, tensors)}, m.Done)
    _same(transport, m.Remap(model, new), dict.fromkeys((*known.servers, *servers)))
    return new


def begin_to_use(transport: Transport, declare: m.Declare, count: int) -> Beside:
    """The same with the first `count` servers, which a launcher starts, in a thread of its own. Raises ServerError
    without a launcher."""
    if not is_whole(count) or not 1 <= count <= MOST_SERVERS or not isinstance(transport, Remote):
        why = "servers are processes that meshwright run starts" if is_whole(count) else "it is a number"
        raise ServerError(
            f"use_servers({count!r}) cannot be done", why=why, hint="meshwright run --servers 2 …"
        )
    transport.meeting.want(count)
    other = transport.another()

    def move() -> None:
        with contextlib.closing(other):
            use_servers(other, declare, range(count))

    return Beside(move, "moving blocks", cut_off=True)


def _same(transport: Transport, request: m.Request, servers: Iterable[int]) -> None:
    ask(transport, {server: (request, []) for server in servers}, m.Done)


__all__ = ["begin_to_use", "use_servers"]
