"""How a job ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import LaunchError


@dataclass(frozen=True, slots=True)
class Outcome:
    """`exit_code` is 0, that of the rank that failed first, or 128 + the signal that ended it or the launcher."""

    exit_code: int
    failure: LaunchError | None = None
    log_dir: Path | None = None  # None when the logs were temporary and nobody needs them any more
