"""A server's state on disk, so that a killed one goes on as if nothing had been: a snapshot, and requests since then.

A request is written before it is answered, and requests are applied one after another: to repeat them in order gives
the same values to the bit. What was being written when a server was killed was never answered, and is asked again. A
killed process loses nothing; a machine without power may lose the last moments (nothing is synced).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from io import BufferedReader, FileIO
from pathlib import Path

from meshwright.errors import ServerError
from meshwright.servers import snapshots
from meshwright.servers.server import Server
from meshwright.servers.wire import Malformed, pieces, read

SNAPSHOT_BYTES = 1 << 28  # of requests, after which a snapshot is made, at least


class Journal:
    """`folder`: of this server alone. `every`: bytes of requests between snapshots; at least as many as the state has,
    so that writing snapshots costs no more than writing requests."""

    def __init__(self, folder: Path, number: int, every: int = SNAPSHOT_BYTES) -> None:
        self.folder, self.number, self.every = folder, number, every
        folder.mkdir(parents=True, exist_ok=True)
        self._generation = max((int(p.stem) for p in folder.glob("*.log")), default=0)
        self._writing: threading.Thread | None = None
        self._file: FileIO | None = None
        self._bytes = 0

    def server(self, pushed: Mapping[int, int] | None = None) -> Server:
        """The server as it was. `pushed`: where no server runs, by worker, one more than the clock of its last push
        that counts; prepared ones that do not are dropped. Raises ServerError for a folder of another server."""
        made = sorted(self.folder.glob("*.safetensors"), key=lambda p: int(p.stem))
        server = snapshots.read(made[-1], self.number) if made else Server(self.number)
        begins = int(made[-1].stem) if made else 0
        for path in sorted(self.folder.glob("*.log"), key=lambda p: int(p.stem)):
            if int(path.stem) >= begins:
                good = self._repeat(path, server)
                with path.open("r+b") as file:
                    file.truncate(good)  # what was never answered
        if pushed is not None and any(map(server.in_doubt, server.prepared)):
            server.settle(pushed)
            self._snapshot(server)
            self._written_down()
        server.apply()
        return server

    def _repeat(self, path: Path, server: Server) -> int:
        """Apply the requests of a file; the bytes that are complete."""
        with path.open("rb") as file:
            while True:
                good = file.tell()
                try:
                    body, tensors = read(lambda into: _fill(file, into))
                except EOFError:
                    return good
                except Malformed as error:
                    raise ServerError(f"{path} is damaged at byte {good:,}", why=str(error)) from None
                server.answer(body, tensors)

    def write(self, server: Server, body: object, tensors: list) -> None:
        """Write down a request that `server` has applied."""
        self._file = self._file or self._log(self._generation).open("ab", buffering=0)
        for piece in pieces(body, tensors):  # pyright: ignore[reportArgumentType]
            done = 0
            while done < len(piece):
                done += self._file.write(piece[done:])
            self._bytes += len(piece)
        if self._bytes >= max(self.every, server.size_bytes) and (
            self._writing is None or not self._writing.is_alive()
        ):
            self._snapshot(server)

    @property
    def fresh(self) -> bool:
        """Return whether nothing was ever written here."""
        return not any(self.folder.glob("*.log"))

    def begin_with(self, server: Server) -> None:
        """Forget what was written, for what another server has kept of this one."""
        self._snapshot(server)

    def _snapshot(self, server: Server) -> None:
        """Begin a new file of requests, and write what was before it beside, from a copy."""
        kept = snapshots.copy(server)
        self._generation, self._bytes = self._generation + 1, 0
        if self._file is not None:
            self._file.close()
        self._file = self._log(self._generation).open("ab", buffering=0)
        self._writing = threading.Thread(target=self._written, args=(kept, self._generation))
        self._writing.start()

    def _written(self, kept: snapshots.Snapshot, generation: int) -> None:
        snapshots.write(kept, self.folder / f"{generation}.safetensors")
        for path in (*self.folder.glob("*.log"), *self.folder.glob("*.safetensors")):
            if int(path.stem) < generation:
                path.unlink()

    def _written_down(self) -> None:
        if self._writing is not None:
            self._writing.join()

    def close(self) -> None:
        self._written_down()
        if self._file is not None:
            self._file.close()

    def _log(self, generation: int) -> Path:
        return self.folder / f"{generation}.log"


def _fill(file: BufferedReader, into: memoryview) -> None:
    if file.readinto(into) < len(into):
        raise EOFError


__all__ = ["Journal"]
