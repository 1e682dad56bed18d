"""A store on the loopback address, for scripts that call ``torch.distributed.init_process_group()`` themselves.

torch's own store listens on all interfaces. So the launcher binds a port of 127.0.0.1 and waits; when the first rank
connects, a process of its own (this file) becomes the store behind it. Jobs of Meshwright's own steps meet in a file
(`meshwright.runtime.rendezvous`) and never connect, so that nobody has to import torch here.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from types import TracebackType

LOOPBACK = "127.0.0.1"
WAITING = 4096  # ranks that may connect before the store is there


class Port:
    """A port of the loopback address within a ``with`` block. `env`: of the store's process."""

    def __init__(self, env: dict[str, str]) -> None:
        self._env = env
        self._socket = socket.socket()
        self._store: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Port:
        self._socket.bind((LOOPBACK, 0))
        self._socket.listen(WAITING)
        self.number = self._socket.getsockname()[1]
        return self

    def look(self) -> None:
        """Start the store if somebody has come for it."""
        if self._store is None and select.select([self._socket], [], [], 0)[0]:
            self.start()

    def start(self) -> None:
        """Start the store, if it is not there."""
        if self._store is None:
            handle = self._socket.fileno()
            self._store = subprocess.Popen(
                [sys.executable, "-P", __file__, str(handle), str(self.number), str(os.getpid())],
                env=self._env, pass_fds=[handle], start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._store is not None:
            self._store.kill()
            self._store.wait()
        self._socket.close()


class Stores:
    """Of each attempt of a job over several machines one, on the scheduler's, within a ``with`` block: nodes come to it
    through the scheduler. Those of earlier attempts end when the next one begins."""

    def __init__(self) -> None:
        self._attempt = 0
        self._ports = contextlib.ExitStack()
        self._port: Port | None = None

    def __enter__(self) -> Stores:
        return self

    def __exit__(self, *_: object) -> None:
        self._ports.close()

    def port(self, attempt: int) -> int:
        """The number of the port of an attempt, started when it is asked for."""
        if self._port is None or attempt != self._attempt:
            self._ports.close()
            self._port, self._attempt = self._ports.enter_context(Port(dict(os.environ))), attempt
            self._port.start()
        return self._port.number


def main() -> None:
    """Be the store: of a socket that is bound already, until the launcher ends this process or is gone."""
    from meshwright.launch.bootstrap import die_with

    handle, number, launcher = map(int, sys.argv[1:])
    die_with(launcher)
    from meshwright.runtime.stores import TCPStore

    store = TCPStore(LOOPBACK, number, None, True, wait_for_workers=False, master_listen_fd=handle)
    while store.port:
        signal.pause()


if __name__ == "__main__":
    main()
