"""Answers of a server while blocks move to other servers, see `moving.py`."""

from __future__ import annotations

from meshwright.errors import ServerError
from meshwright.servers import messages as m
from meshwright.servers.shards import ShardMap
from meshwright.servers.state import Reply, State


def answer_moving(state: State, request: m.Moving, tensors: m.Tensors) -> Reply:
    match request:
        case m.Hold():
            if state.mover not in ("", request.mover):
                raise ServerError("blocks are moving already", hint="wait for that move")
            state.allowed, state.mover = {} if state.allowed is None else state.allowed, request.mover
            options = {name: stored.options for name, stored in state.stored.items()}
            return m.Held(dict(state.clocks.of), dict(state.clocks.left), options, state.map, state.began), []
        case m.Allow():
            state.allowed = dict(request.clocks)
        case m.Reached():
            behind = any(clock < (state.allowed or {}).get(w, 0) for w, clock in state.clocks.of.items())
            return (m.Wait() if behind or state.rounds else m.Done()), []
        case m.Resume():
            state.clocks.of, state.clocks.left, state.clocks.expected = (
                dict(request.clocks),
                dict(request.left),
                0,
            )
            state.allowed, state.began = {}, request.began
            for name, options in request.options.items():
                state.of(name).set_options(options)
        case m.Take():
            stored = state.copy.of(request.parameter) if request.frozen else state.of(request.parameter)
            if request.block not in stored.blocks:
                raise ServerError(f"block {request.block} of {request.parameter} is not here")
            parts = stored.take(request.block)
            return m.Taken(tuple(parts)), list(parts.values())
        case m.Give():
            stored = state.of(request.parameter)
            if request.block in stored.blocks:
                return m.Done(repeated=True), []
            owned = request.block in state.map.blocks_of(state.number).get(request.parameter, ())
            if state.allowed is None and not owned:
                raise ServerError(
                    f"a block of {request.parameter} comes while workers push", hint="hold first"
                )
            stored.put({request.block: dict(zip(request.names, tensors, strict=False))})
        case m.Remap():
            return _remap(state, request.map), []
    return m.Done(), []


def _remap(state: State, new: ShardMap) -> m.Answer:
    if new.version <= state.map.version:
        return m.Done(repeated=True)
    mine = new.blocks_of(state.number)
    for name, blocks in mine.items():
        if gone := [b for b in blocks if b not in state.of(name).blocks]:
            raise ServerError(f"block {gone[0]} of {name} has not come")
    for name, stored in state.stored.items():
        if left := [b for b in stored.blocks if b not in mine.get(name, ())]:
            stored.drop(left)
    state.map, state.allowed, state.mover = new, None, ""
    state.prepared = {}  # split by the map before; their workers push again
    return m.Done()


__all__ = ["answer_moving"]
