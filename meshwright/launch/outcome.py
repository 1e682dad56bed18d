"""How a job ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import LaunchError


@dataclass(frozen=True, slots=True)
class Outcome:
    """`exit_code` is 0, that of the rank that failed first, or 128 + the signal that ended it or the launcher.
    `peer_lost`: its error only says that another rank has gone. `cut_short`: ranks ran when the attempt was ended."""

    exit_code: int
    failure: LaunchError | None = None
    log_dir: Path | None = None  # None when the logs were temporary and nobody needs them any more
    peer_lost: bool = False
    cut_short: bool = False
