"""Scripts on real ranks: through the launcher, or, where it is not the matter, on ranks that need not import torch.

A rank takes four seconds of processor time until it has imported torch, its compiler and what else a step needs, as
long as most tests take in all. `run_warm` forks each rank from a process that has done so (`tests/warm.py`), one for
each rank, so that ranks differ in what they would differ in (the seed of hashes). It has no launcher: who tests what is
said of a failure takes `run_script`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = str(Path(__file__).parents[1])
SECONDS = 240.0
GRACE = 20.0  # what the others have to notice that a rank has failed


def run_script(
    folder: Path, ranks: int, script: str, *arguments: object, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A script on so many ranks, in a folder of its own; it may import tests."""
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-m", "meshwright.cli", "run", "--nproc", str(ranks), "script.py"]
    known = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK")}
    known["PYTHONPATH"] = os.pathsep.join([ROOT, *filter(None, [known.get("PYTHONPATH")])])
    return subprocess.run(
        [*command, *map(str, arguments)],
        cwd=folder, env={**known, **environment}, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip


class _Warm:
    """A process that forks one rank at a time."""

    def __init__(self) -> None:
        path = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("warm.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=env,
        )  # fmt: skip
        self.said = b""
        self.rank = 0

    def start(self, job: dict[str, object]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job).encode() + b"\n")
        number = None
        while number is None:
            number = self._number(SECONDS)
        self.rank = number

    def ended(self) -> int | None:
        """The exit code of the rank, once it has one."""
        return self._number(0.0)

    def _number(self, seconds: float) -> int | None:
        """The next number that is answered within a time."""
        assert self.process.stdout is not None
        if b"\n" not in self.said and select.select([self.process.stdout], [], [], seconds)[0]:
            heard = os.read(self.process.stdout.fileno(), 100)
            if not heard:
                raise RuntimeError("the process that forks ranks has gone")
            self.said += heard
        line, end, rest = self.said.partition(b"\n")
        if not end:
            return None
        self.said = rest
        return int(line)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.rank, signal.SIGKILL)

    def close(self) -> None:
        self.process.kill()


_waiting: list[_Warm] = []  # ready for the next script


def _close() -> None:
    for each in _waiting:
        each.close()


atexit.register(_close)


def run_warm(
    folder: Path, ranks: int, script: str, *arguments: object, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The same on ranks that are forked. What rank 0 says is the output, what the others say the errors."""
    (folder / "script.py").write_text(script)
    while len(_waiting) < ranks:
        _waiting.append(_Warm())
    warm = _waiting[:ranks]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    common = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GLOO_SOCKET_IFNAME": "lo",
        **environment,
    }
    logs = [folder / f".rank{rank}.log" for rank in range(ranks)]
    for rank, each in enumerate(warm):
        env = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        threads = max(1, len(os.sched_getaffinity(0)) // ranks)
        shared = {"folder": str(folder), "arguments": [str(a) for a in arguments], "threads": threads}
        each.start({**shared, "log": str(logs[rank]), "env": env})
    code = _codes(warm)
    said = [log.read_text() for log in logs]
    return subprocess.CompletedProcess(["script.py"], code, said[0], "".join(said[1:]))


def _codes(warm: Sequence[_Warm]) -> int:
    """Wait for all ranks: the exit code of the first that failed, or 0."""
    left, code, until = list(warm), 0, time.monotonic() + SECONDS
    while left:
        for each in tuple(left):
            ended = each.ended()
            if ended is None:
                continue
            left.remove(each)
            if ended and not code:
                code, until = ended, min(until, time.monotonic() + GRACE)
        if left and time.monotonic() > until:
            for each in left:
                each.kill()
            code, until = code or -signal.SIGKILL, time.monotonic() + GRACE
        time.sleep(0.02)
    return code


__all__ = ["ROOT", "run_script", "run_warm"]
