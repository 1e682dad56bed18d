"""Pushes of which only some servers heard, when workers and servers were killed at once.

A worker sends a push to all servers. If it is killed alone, the servers that lack its push go on without it. If a
launcher goes on from the journals of all servers, each leaves out what another one lacks: the worker makes that step
again, so nothing is lost, and nothing is counted twice.
"""

from __future__ import annotations

from collections import defaultdict
from io import BufferedReader
from pathlib import Path

from meshwright.servers import messages as m
from meshwright.servers import snapshots
from meshwright.servers.shards import ShardMap
from meshwright.servers.wire import skim

Clocks = dict[int, int]


def common(state: Path) -> Clocks:
    """By worker, the number of steps that all servers have. `state`: with a folder for each server."""
    found = {int(path.name): _heard(path) for path in state.iterdir() if path.name.isdecimal()}
    newest = max((shards for _, shards in found.values()), key=lambda shards: shards.version)
    mine = [found[server][0] for server in newest.servers if server in found]
    return {worker: min(clocks[worker] for clocks in mine) for worker in set().union(*mine)}


def _heard(folder: Path) -> tuple[Clocks, ShardMap]:
    """The clocks of workers that one server knows, and its newest map."""
    clocks: Clocks = defaultdict(int)
    shards = ShardMap(0, (), {})

    def note(told: Clocks) -> None:
        clocks.update({worker: max(clocks[worker], clock) for worker, clock in told.items()})

    made = sorted(folder.glob("*.safetensors"), key=lambda path: int(path.stem))
    if made:
        record = snapshots.record_of(made[-1])
        shards = record.map
        note(record.clocks)
        note(record.left)
    for path in folder.glob("*.log"):
        if made and int(path.stem) < int(made[-1].stem):
            continue
        with path.open("rb") as file:
            for body in _bodies(file):
                match body:
                    case m.Push():
                        note({body.worker: body.clock + 1})
                    case m.Join():
                        note({body.worker: body.clock})
                    case m.Resume():
                        note(body.clocks)
                        note(body.left)
                    case m.Declare() | m.Remap():
                        shards = max(shards, body.map, key=lambda each: each.version)
    return clocks, shards


def _bodies(file: BufferedReader):
    while True:
        try:
            yield skim(file)
        except EOFError:
            return


__all__ = ["common"]
