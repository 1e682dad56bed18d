"""Answers of a server to who writes or reads a checkpoint, see `meshwright.checkpoint.of_servers`."""

from __future__ import annotations

from meshwright.errors import ServerError
from meshwright.servers import messages as m
from meshwright.servers.dealing import Stream
from meshwright.servers.state import State


def answer_saving(state: State, request: m.Saving) -> m.Answer:
    match request:
        case m.Freeze():
            if request.map != state.map.version:
                return state.other_map(request.map)
            state.shares.check(state.clocks, request.clock)
            behind = state.clocks.bound == 0 and state.clocks.least() < request.clock
            if state.missing() or behind or state.holds(request.clock):
                return m.Wait()
            samples = {name: stream.position for name, stream in state.streams.items()}
            return m.Frozen(state.copy.take(request.worker, state.stored), samples)
        case m.Thaw():
            state.copy.forget()
        case m.Clear():
            if state.rounds or any(state.clocks.of.values()):
                raise ServerError("values are loaded while workers train", hint="load before the first step")
            for stored in state.stored.values():
                stored.drop(list(stored.blocks))
        case m.Begin():
            if any(state.clocks.of.values()):
                raise ServerError("values are loaded while workers train", hint="load before the first step")
            if gone := state.missing():
                raise ServerError(f"block {next(iter(gone.values()))[0]} of {next(iter(gone))} has not come")
            state.began = m.Begins(request.steps, request.path)
            state.streams = {name: Stream.at(position) for name, position in request.samples.items()}
        case m.Await():
            return state.began or m.Wait()
    return m.Done()


__all__ = ["answer_saving"]
