"""Start a scheduler as a process of its own, which ends with the one that has started it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshwright.scheduler.trust import SECRET

START_SECONDS = 60.0  # for it to listen
LOOK_SECONDS = 0.02


def start_scheduler(
    settings: Mapping[str, Any], secret: str, log: Path, stops: Callable[[], bool] = lambda: False
) -> subprocess.Popen[bytes]:
    """The process, once it listens, has ended, or `stops` is true. `settings`: of
    `meshwright.launch.scheduler_process`. `log`: of what it writes."""
    told = json.dumps({**settings, "launcher": os.getpid()})
    command = [sys.executable, "-P", "-m", "meshwright.launch.scheduler_process", told]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env={**os.environ, SECRET: secret},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    end = time.monotonic() + START_SECONDS
    while process.poll() is None and b"scheduler at" not in log.read_bytes():
        if time.monotonic() > end or stops():
            break
        time.sleep(LOOK_SECONDS)
    return process


def why_ended(log: Path) -> str:
    """What a scheduler said that could not begin."""
    return log.read_text(errors="replace").strip().removeprefix("LaunchError: ") or "the scheduler ended"


__all__ = ["START_SECONDS", "start_scheduler", "why_ended"]
