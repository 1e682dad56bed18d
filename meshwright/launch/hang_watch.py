"""Watching for ranks that hang: when no rank's record moves for a while, the launcher says who hangs, where, and what
the others wait for, and ends the attempt, or that rank alone where the others can go on without it.

What counts as moving is any entry in any record (`meshwright.heartbeat`), and the processor's time of ranks that
capture, plan or build, which take long without a word.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from meshwright.errors import LaunchError
from meshwright.heartbeat import generation
from meshwright.heartbeat.reader import computes, read
from meshwright.heartbeat.record import ENDED, stack_signal
from meshwright.launch import reaper
from meshwright.launch.failure import of_a_library
from meshwright.launch.hang_diagnosis import Finding, State, cut_off, diagnose, differ
from meshwright.launch.hang_elsewhere import Elsewhere

LOOK_SECONDS = 1.0  # between two looks, at most
AWAY_SECONDS = 60.0  # without the scheduler, where no rank moves either
STACK_SECONDS = 5.0  # how long a rank may take to write its stacks
QUIET_LOOKS = 3  # 0.1 s apart: nothing more written in all of them, and stacks are complete
BUSY = 0.02  # the share of a processor's time that tells computing from idling
FRAMES = 8  # what is shown of a stack
FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
HINT = (
    "--hang-after SECONDS waits longer, --hang-after 0 waits for ever; in long work of your own, call mw.alive() "
    "from time to time"
)
AWAY_HINT = (
    "look at the machine of the scheduler and the network between them; started again, the job goes on from its newest "
    "checkpoint; --hang-after SECONDS waits longer"
)


@dataclass(frozen=True, slots=True)
class Process:
    """A rank's process as the kernel shows it: state letter, and seconds of the processor."""

    state: str
    seconds: float

    @property
    def word(self) -> str:
        """As `diagnose.State` has it."""
        return {"T": "stopped", "t": "stopped", "": "gone", "Z": "gone", "X": "gone"}.get(
            self.state, "running"
        )


def process(pid: int) -> Process:
    """Read the state of a process from the kernel."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return Process(words[0], (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK"))
    except (OSError, IndexError, ValueError):
        return Process("", 0.0)


class Watch:
    """Watches `ranks` of an attempt within a ``with`` block. `found` is what it has ended the attempt for.

    `records`: the folder of the ranks' records. `logs`: where their stacks go. `run_id` is that of the attempt.
    `seconds`: without a movement, 0 for ever. `elsewhere`: the other machines, if there are any. `goes_on`: the job
    goes on without ranks that fail, so those that hang are ended alone; `hung` has them, and what was found."""

    def __init__(
        self,
        records: Path,
        logs: Path,
        ranks: Sequence[int],
        seconds: float,
        run_id: str,
        elsewhere: Elsewhere | None = None,
        goes_on: bool = False,
    ) -> None:
        self._elsewhere, self._goes_on = elsewhere, goes_on
        self.hung: dict[int, str] = {}
        self.records, self.logs, self.ranks, self.seconds, self.run_id = records, logs, ranks, seconds, run_id
        self.found: LaunchError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch for hangs", daemon=True)
        self._told = False

    def __enter__(self) -> Watch:
        if self.seconds:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self.seconds:
            self._thread.join()
            if self._elsewhere is not None and all(self.ended(rank) for rank in self.ranks):
                self._elsewhere.all_of(self._states(), time.monotonic())

    def _watch(self) -> None:
        last: list[bytes] = []
        cpu = [0.0] * len(self.ranks)
        since = time.monotonic()
        while not self._stop.wait(min(LOOK_SECONDS, self.seconds / 4)):
            marks, now = [self._mark(rank) for rank in self.ranks], time.monotonic()
            both = zip(self.ranks, marks, strict=True)
            used = [process(self._pid(r)).seconds if computes(m) else 0.0 for r, m in both]
            least = BUSY * max(1.0, now - since)
            if marks != last or any(u - c >= least for u, c in zip(used, cpu, strict=True)):
                last, cpu, since = marks, used, now
                self.found = None  # the others go on
                if self._elsewhere is not None:
                    self._elsewhere.moves()
            elif now - since >= self.seconds:
                states: Mapping[int, State] | None = self._states()
                if self._elsewhere is not None:
                    here, states = states, self._elsewhere.all_of(states, now)
                    if states is None:
                        if self._cut_off(self._elsewhere.away_seconds(now), here, now - since):
                            return
                        continue
                finding = diagnose(states, now - since, now)
                if finding is None:
                    self._say(now - since)
                    since = now
                elif finding.ranks[0] in self.ranks or states[finding.ranks[0]].process == "gone":
                    # else its own machine says so, which has its stack
                    self.found = self.explained(finding, HINT)
                    if not self._goes_on:
                        reaper.sweep(self.run_id)
                        return
                    self._end(finding)
                    since = now

    def _cut_off(self, away_seconds: float, here: Mapping[int, State], seconds: float) -> bool:
        """Whether the attempt has been ended here, since neither other machines nor the scheduler are heard of."""
        if away_seconds < min(self.seconds, AWAY_SECONDS) or (finding := cut_off(here, seconds)) is None:
            return False
        self.found = self.explained(finding, AWAY_HINT)
        reaper.sweep(self.run_id)
        return True

    def _end(self, finding: Finding) -> None:
        """End the ranks of a finding that are here."""
        print(self.found, file=sys.stderr, flush=True)
        for rank in set(finding.ranks).intersection(self.ranks):
            self.hung[rank] = finding.what
            with contextlib.suppress(OSError):
                os.kill(self._pid(rank), signal.SIGKILL)

    def _mark(self, rank: int) -> bytes:
        with contextlib.suppress(OSError):
            return (self.records / f"rank{rank}.pulse").read_bytes()
        return b""

    def _pid(self, rank: int) -> int:
        try:
            return int((self.records / f"rank{rank}.pid").read_text())
        except (OSError, ValueError):
            return -1

    def _states(self) -> dict[int, State]:
        """The ranks here that take part."""
        now = generation.read(self.records) if self._goes_on else None
        away = () if now is None else set(self.ranks).difference(now.ranks).union(now.ended)
        return {
            rank: State(read(self.records / f"rank{rank}"), process(self._pid(rank)).word)
            for rank in self.ranks
            if rank not in away
        }

    def ended(self, rank: int) -> bool:
        """Return whether a rank has come to the end of its script, as far as its record says."""
        seen = read(self.records / f"rank{rank}") if self.seconds else None
        return seen is not None and seen.doing == ENDED

    def left_out(self) -> str:
        """Return a note if a rank skipped a collective, which may have made the attempt fail; empty otherwise."""
        found = differ(self._states()) if self.seconds else None
        return "" if found is None else found[1]

    def _say(self, seconds: float) -> None:
        """Once: all are silent, and it may be as it should."""
        if not self._told and any(self._mark(r) for r in self.ranks):
            print(
                f"no rank has said anything for {seconds:.0f} s; none waits for another, so it may be busy in the "
                "script's own code",
                file=sys.stderr,
                flush=True,
            )
        self._told = True

    def explained(self, finding: Finding, hint: str, shown: int = FRAMES) -> LaunchError:
        """The error for a finding, with the places in the scripts of the ranks that it names. `shown`: so many frames
        of each."""
        stacks = self._stacks()
        lines, where = list(finding.lines), []
        for rank in dict.fromkeys((*finding.alone[:1], *finding.ranks[:2])):
            frames = _frames(stacks.get(rank, ""))
            if frames and shown:
                lines.append(f"rank {rank} is at")
                lines += [f"  {file}:{line} in {name}" for file, line, name in frames[:shown]]
            where += [f"{file}:{line}" for file, line, _ in frames if not of_a_library(file)][:1]
        kept = [self.logs / f"rank{rank}.stack" for rank in finding.ranks[:1] if stacks.get(rank)]
        where += [f"log {self.logs / f'rank{finding.ranks[0]}.log'}", *(f"stacks {p}" for p in kept)]
        why = "\n         ".join(lines)
        hint = f"{finding.hint}; otherwise {hint}" if finding.hint else hint
        return LaunchError(finding.what, why=why, where=", ".join(where), hint=hint)

    def _stacks(self) -> dict[int, str]:
        """The Python stacks of the ranks that can write them, which are kept beside their logs."""
        alive = set(reaper.members(self.run_id))
        asked = {}
        for rank in self.ranks:
            pid, path = self._pid(rank), self.records / f"rank{rank}.stack"
            if pid in alive and path.exists() and process(pid).word == "running":
                with contextlib.suppress(OSError):
                    os.kill(pid, stack_signal())
                    asked[rank] = path
        end, looks = time.monotonic() + STACK_SECONDS, 0
        found: dict[int, str] = {}
        while looks < QUIET_LOOKS and time.monotonic() < end:
            time.sleep(0.1)
            before = found
            found = {rank: path.read_text("utf-8", errors="replace") for rank, path in asked.items()}
            looks = looks + 1 if found == before and all(map(_frames, found.values())) else 0
        for rank, text in found.items():
            if text:
                (self.logs / f"rank{rank}.stack").write_text(text, "utf-8")
        return found


def _frames(text: str) -> Sequence[tuple[str, str, str]]:
    """(file, line, function) of the main thread, the innermost first: that which the signal met."""
    _, mark, here = text.partition("Current thread")
    here = here.partition("\n\n")[0] if mark else ""
    return [(m["file"], m["line"], m["name"]) for m in FRAME.finditer(here)]


__all__ = ["Watch"]
