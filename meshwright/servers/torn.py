"""Which pushes count when all servers were killed at once: those that the first server has.

A worker that is killed while it pushes leaves prepared pushes behind, and no server can ask the first one about them.
The journal of that one says which count, so a launcher that goes on from all journals loses and repeats none.
"""

from __future__ import annotations

from io import BufferedReader
from pathlib import Path

from meshwright.servers import messages as m
from meshwright.servers import snapshots
from meshwright.servers.wire import skim


def pushed(state: Path) -> dict[int, int]:
    """By worker, one more than the clock of its last push that counts. `state`: with a folder for each server."""
    folder = min((p for p in state.iterdir() if p.name.isdecimal()), key=lambda p: int(p.name))
    made = sorted(folder.glob("*.safetensors"), key=lambda path: int(path.stem))
    record = snapshots.record_of(made[-1]) if made else None
    found = {} if record is None else dict(record.pushed)
    attempt = 0 if record is None or record.declared is None else record.declared.attempt
    for path in sorted(folder.glob("*.log"), key=lambda path: int(path.stem)):
        if made and int(path.stem) < int(made[-1].stem):
            continue
        with path.open("rb") as file:
            for body in _bodies(file):
                match body:
                    case m.Declare() if body.attempt > attempt:  # all begins anew
                        found, attempt = {}, body.attempt
                    case m.Commit() | m.Push(prepare=False):
                        found[body.worker] = body.clock + 1
    return found


def _bodies(file: BufferedReader):
    while True:
        try:
            yield skim(file)
        except EOFError:
            return


__all__ = ["pushed"]
