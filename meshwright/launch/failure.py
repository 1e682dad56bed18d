"""Which rank failed first, and what to tell the person who waits for it."""

from __future__ import annotations

import dataclasses
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import PEER_LOST, LaunchError, PeerLost

TAIL_BYTES = 1 << 16  # what is read of a log
HEAD_LINES, TAIL_LINES = 4, 26  # what is shown of it

# without a traceback
TOLD_LOST = re.compile(rf"^{PeerLost.__module__}\.{PeerLost.__qualname__}: ", re.MULTILINE)
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# torch's own mark on an uncaught exception, once for each time that it was initialized
PREFIX = re.compile(r"^(?:\[rank\d+\]: ?)+", re.MULTILINE)
FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
# Of an error in a step, which is not raised by a line of the model (`meshwright.runtime.source_lines`).
PLACE = re.compile(r"^where: (?P<place>\S+:\d+)", re.MULTILINE)
ERROR = re.compile(r"^(?P<error>[A-Za-z_][\w.]*(?:: .*)?)$", re.MULTILINE)

SIGNAL_HINTS = {
    signal.SIGKILL: "somebody killed it, or the machine ran out of memory: fewer ranks, a smaller batch",
    signal.SIGSEGV: "a crash in native code: the lines that start with 'File' above are where it happened",
    signal.SIGABRT: "native code gave up: its reason is among the last lines of the log",
    signal.SIGBUS: "often a full /dev/shm: fewer loader workers, or a bigger shared memory",
    signal.SIGTERM: "somebody asked it to stop, or another rank failed in a way that left no trace",
}
ABOVE = "its last words are above"  # where a rank was shown


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank ended: `exit_code` as `subprocess` has it (negative for a signal), its log, and whether the launcher
    had stopped it."""

    rank: int
    exit_code: int
    log: Path
    stopped: bool = False

    @property
    def status(self) -> int:
        """As a shell would say it: 128 + signal."""
        return self.exit_code if self.exit_code >= 0 else 128 - self.exit_code


def first(ends: Sequence[RankEnd]) -> RankEnd:
    """Return the rank whose failure came first.

    The agent polls the ranks, so several may have failed in between, most of them because one did. The order: a rank
    that was killed or failed by itself; one that only lost a peer; one that the launcher stopped. Among equals, the one
    whose log was written the longest ago: a traceback is written before peers notice. A rank that raised may still be
    shutting down (threads to join, sockets to close) when its peers have noticed and the launcher stops it: its error
    counts, and the exit code is the one that it was about to return.
    """

    def order(end: RankEnd) -> tuple[int, int, int]:
        text = tail(end.log)
        quiet = end.stopped and not final_error(text)
        written = end.log.stat().st_mtime_ns if end.log.exists() else 0
        return (2 if quiet else 1 if lost_a_peer(text) else 0, written, end.rank)

    end = min(ends, key=order)
    raised = end.stopped and end.exit_code < 0 and final_error(tail(end.log))
    return dataclasses.replace(end, exit_code=1) if raised else end


def raised(end: RankEnd) -> bool:
    """Return whether a rank's log ends with an error, that it lost a peer included."""
    text = tail(end.log)
    return bool(final_error(text)) or lost_a_peer(text)


def lost_a_peer(text: str) -> bool:
    """Return whether the last error of a log only says that another rank went away."""
    found = final_error(text)
    return (PEER_LOST if found else TOLD_LOST).search(found or PREFIX.sub("", text)) is not None


def tail(log: Path) -> str:
    """The end of a log as a person would see it: no colour codes, no overdrawn progress bars."""
    try:
        with log.open("rb") as source:
            source.seek(max(0, log.stat().st_size - TAIL_BYTES))
            text = source.read().decode(errors="replace")
    except OSError:
        return ""
    text = ANSI.sub("", text)
    seen = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return "\n".join(line for line in seen if line)


def final_error(text: str) -> str:
    """The last line of the last traceback, such as ``ValueError: bad batch``; empty when there is none."""
    _, mark, trace = PREFIX.sub("", text).rpartition("Traceback (most recent call last)")
    found = [m["error"] for m in ERROR.finditer(trace)] if mark else []
    return found[0] if found else ""


def explain(
    end: RankEnd, ends: Sequence[RankEnd], world_size: int, *, attempt: int = 1, shown: int = 0
) -> LaunchError:
    """The error that the launcher ends with: which rank, how, the end of its log, and where to read more.

    `end` is the first of all `ends`. Rank `shown` was shown on the terminal, so what it said is not said again.
    """
    text = PREFIX.sub("", tail(end.log))
    error = final_error(text)
    if end.exit_code < 0:
        sent = signal.Signals(-end.exit_code)
        how, hint = f"was ended by {sent.name}", SIGNAL_HINTS.get(sent, "")
    else:
        how, hint = f"failed with exit code {end.exit_code}", ""
    what = f"rank {end.rank} of {world_size} {how}" + (f": {error}" if error else "")
    if attempt > 1:
        what += f" (attempt {attempt})"
    seen = end.rank == shown
    if not hint and not seen and any(e.rank == shown and lost_a_peer(tail(e.log)) for e in ends):
        hint = f"look at rank {end.rank}: the error of rank {shown} above only says that it lost a peer"
    if not text:
        why = "it wrote nothing"
    elif seen:
        why = ABOVE
    else:
        start = text.rfind("Traceback (most recent call last)")
        why = _shortened(text[start:] if start >= 0 and error else text).replace("\n", "\n         ")
    frames = FRAME.finditer(text) if error else ()
    own = [f"{m['file']}:{m['line']}" for m in frames if not of_a_library(m["file"])]
    own = [m["place"] for m in PLACE.finditer(text)] or own if error else []
    where = ", ".join([*own[-1:], f"log {end.log}"])
    return LaunchError(what, why=why, where=where, hint=hint)


def of_a_library(file: str) -> bool:
    """True for a file that is not the user's: of a package, of Python or of this project."""
    parts = Path(file).parts
    return (
        file.startswith("<")  # frozen modules
        or "site-packages" in parts
        or f"python{sys.version_info.major}.{sys.version_info.minor}" in parts
        or (Path(__file__).parents[1] in Path(file).parents)
    )


def elsewhere(text: str, node: str) -> LaunchError:
    """What the other machines say of the failure of a node. `text`: its report."""
    there = text.replace(ABOVE, "its last words are on the terminal there")
    return LaunchError(f"on node {node}: {there}" if text else f"node {node} failed")


def ended_early(error: LaunchError, who: str, log: Path | None) -> LaunchError:
    """The error where those that failed only lost a peer, and `who` had ended before without an error. `log`: its
    own; None where that is on another machine."""
    return LaunchError(
        f"{who} while others were still running",
        why=f"{error.what}\n         {error.why}",
        where=f"log {log}" if log is not None else "its log is on its own machine",
        hint="all ranks must do the same number of steps, and end with mw.shutdown(), which waits for all: look for a "
        "sys.exit, a return or a shorter loop there",
    )


def _shortened(text: str) -> str:
    """A long text without its middle: a traceback says most at both ends."""
    lines = text.split("\n")
    if len(lines) > HEAD_LINES + TAIL_LINES + 1:
        lines[HEAD_LINES:-TAIL_LINES] = [f"  … {len(lines) - HEAD_LINES - TAIL_LINES} lines …"]
    return "\n".join(lines)
