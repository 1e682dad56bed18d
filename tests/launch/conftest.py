"""Real launches, each marked by a variable in the environment, so that a test can see all that it left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PATIENCE_SECONDS = 120.0  # how long to wait for what must happen; a loaded machine takes its time


def eventually(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < deadline, f"waited {PATIENCE_SECONDS:.0f} s in vain until {what}"
        time.sleep(0.02)


@dataclass
class Launches:
    """Writes scripts, launches them, and knows every process that came of it."""

    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def script(self, body: str, name: str = "script.py") -> str:
        (self.folder / name).write_text(textwrap.dedent(body))
        return name

    def start(
        self,
        *arguments: object,
        env: dict[str, str] | None = None,
        prefix: tuple[str, ...] = (),
        verb: str = "run",
    ) -> subprocess.Popen[str]:
        command = [*prefix, sys.executable, "-m", "meshwright.cli", verb, *map(str, arguments)]
        inherited = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "FORCE_COLOR")}
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**inherited, "MESHWRIGHT_TEST": self.mark, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def run(self, *arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, env=env)
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def alive(self) -> list[int]:
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"MESHWRIGHT_TEST={self.mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def wait_for(self, *names: str) -> None:
        eventually(lambda: all((self.folder / n).exists() for n in names), f"{names} are written")

    def wait_until_gone(self) -> None:
        eventually(lambda: not self.alive(), "no process is left")


@pytest.fixture
def launches(tmp_path: Path) -> Iterator[Launches]:
    if not Path("/proc/self/environ").exists():
        pytest.skip("processes are found through /proc")
    result = Launches(tmp_path)
    yield result
    for pid in result.alive():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    for process in result.started:  # a test that failed half-way leaves pipes open, and that is a warning
        process.communicate()
