"""Ranks killed at random moments, and the curve of losses beside that of a run that nobody disturbed.

    python -m bench recovery [--kills 20] [--ranks 2] [--steps 400] [--seed 5] [--folder PATH]
    python -m bench recovery --events [NAME …] [--markdown]
    python -m bench recovery --random 30 [--machines 3] [--seed 5]

Every kill is `kill -9` of one rank, at a random moment: mostly between steps, within one or within a save, now and
then while the ranks are still starting. `meshwright run --max-restarts` starts them again, and `mw.Autosave` goes on
from the last checkpoint. Every loss that any attempt saw is compared with the undisturbed one, to the last bit.

With `--events`: what else may happen to a job, and what each costs (`bench.recovery_events`). With `--random`: so many
events in a row over machines, of which the others go on (`bench.recovery_random`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.recovery_events import EVENTS
from bench.recovery_events import main as events
from bench.recovery_random import disturbed
from bench.recovery_run import EVERY

SCRIPT = Path(__file__).with_name("recovery_run.py")
PATIENCE_SECONDS = 300.0
STARTING = 0.2  # of the kills, those that come while the ranks start
STEPS_BETWEEN = 30  # at most, from the begin of an attempt to a kill


@dataclass(frozen=True)
class Kill:
    """One kill: of which rank, after which step (0 before the first), and while what was going on."""

    rank: int
    step: int
    when: str
    from_step: int  # of the newest checkpoint, from which the ranks go on


def launch(folder: Path, steps: int, restarts: int, ranks: int = 2) -> subprocess.Popen[str]:
    """Begin the training in a folder."""
    folder.mkdir(exist_ok=True, parents=True)
    root = str(Path(__file__).parents[1])
    command = (sys.executable, "-m", "meshwright.cli", "run", "--nproc", ranks, "--max-restarts", restarts)
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    return subprocess.Popen(
        [str(word) for word in (*command, SCRIPT, folder, steps)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        stderr=(folder / "stderr").open("w"),
        text=True,
    )


def killed(
    job: subprocess.Popen[str],
    folder: Path,
    kills: int,
    ranks: int,
    seed: int,
    told: Callable[[int, Kill], None] = lambda number, kill: None,
) -> None:
    """Kill ranks of a job so often. Raises RuntimeError where it ends before, or does not come back."""
    chance = random.Random(seed)
    known = frozenset[str]()  # the processes of the attempt before
    for number in range(kills):
        pids = _next_attempt(job, folder, ranks, known)
        rank, lines = chance.randrange(ranks), _lines(folder)
        if chance.random() < STARTING:
            end = time.monotonic() + chance.uniform(0, 3)
            _wait(job, lambda end=end: time.monotonic() >= end, "the moment of a kill")
        else:
            after = lines + chance.randrange(1, STEPS_BETWEEN)
            _wait(job, lambda after=after: _lines(folder) >= after, "the ranks run again")
            time.sleep(chance.random() * 0.05)
        saving = any((folder / "ckpt").glob(".saving-*")) if (folder / "ckpt").exists() else False
        idle = _lines(folder) == lines  # what a killed save has left is there until the next one
        told_when = "starting" if idle else "in a save" if saving else "between saves"
        os.kill(int(pids[rank]), signal.SIGKILL)
        told(number + 1, Kill(rank, _last_step(folder), told_when, _saved(folder)))
        known = frozenset(pids)


def _next_attempt(job: subprocess.Popen[str], folder: Path, ranks: int, known: frozenset[str]) -> list[str]:
    """Wait until all ranks of a new attempt are there; their processes."""
    found: list[str] = []

    def there() -> bool:
        with contextlib.suppress(FileNotFoundError):
            found[:] = [(folder / f"pid{rank}").read_text() for rank in range(ranks)]
        return len(found) == ranks and all(found) and known.isdisjoint(found)

    _wait(job, there, "the next attempt begins")
    return found


def _wait(job: subprocess.Popen[str], true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        if job.poll() is not None:
            raise RuntimeError("the job ended before all kills: more steps are needed, or a look at its log")
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {PATIENCE_SECONDS:.0f} s in vain until {what}")
        time.sleep(0.01)


def _lines(folder: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return (folder / "losses0").read_bytes().count(b"\n")
    return 0


def _last_step(folder: Path) -> int:
    with contextlib.suppress(FileNotFoundError, IndexError):
        return int((folder / "losses0").read_text().splitlines()[-1].split()[0])
    return 0


def _saved(folder: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return int((folder / "ckpt" / "latest").read_text().strip().removeprefix("step-").partition(".")[0])
    return 0


def curve(folder: Path, rank: int = 0) -> dict[int, set[str]]:
    """Step → every value that its loss had, in any attempt. A line that was truncated by a kill counts as none."""
    found: dict[int, set[str]] = {}
    for line in (folder / f"losses{rank}").read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            number, value, *_ = line.split()
            found.setdefault(int(number), set()).add(value)
    return found


def main(arguments: list[str]) -> None:
    """Kill, compare, and say so; exit code 1 where one loss differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="for checkpoints and losses; by default a temporary one")
    parser.add_argument("--events", nargs="*", choices=tuple(EVENTS), metavar="NAME", help=", ".join(EVENTS))
    parser.add_argument("--markdown", action="store_true", help="the table of --events for a page")
    parser.add_argument("--random", type=int, metavar="EVENTS", help="over machines, while the others go on")
    parser.add_argument("--machines", type=int, default=3, help="for --random")
    options = parser.parse_args(arguments)
    if options.folder:
        options.folder.mkdir(exist_ok=True, parents=True)
    if options.random is not None:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            result = disturbed(Path(name), options.random, options.machines, options.seed)
        print(result)
        raise SystemExit(not result.well)
    if options.events is not None:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            events(options.events, Path(name), options.markdown)
        return
    console = Console(width=100, highlight=False)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        began = time.perf_counter()
        job = launch(folder / "killed", options.steps, options.kills, options.ranks)
        table = Table("kill", "rank", "after step", "while", "goes on from step", "lost steps")

        def told(number: int, kill: Kill) -> None:
            lost = max(0, kill.step - kill.from_step)
            row = (number, kill.rank, kill.step, kill.when, kill.from_step, lost)
            table.add_row(*map(str, row))

        try:
            killed(job, folder / "killed", options.kills, options.ranks, options.seed, told)
            code = job.wait()
        finally:
            job.terminate()
            job.wait()
        seconds = time.perf_counter() - began
        if code:
            raise SystemExit(f"the job failed:\n{(folder / 'killed' / 'stderr').read_text()}")
        if launch(folder / "undisturbed", options.steps, 0, options.ranks).wait():
            raise SystemExit("the undisturbed run failed")
        console.print(table)
        differ, count = 0, 0
        for rank in range(options.ranks):
            mine, other = (curve(folder / which, rank) for which in ("killed", "undisturbed"))
            differ += sum(mine.get(n) != other.get(n) for n in set(mine) | set(other))
            count += len((folder / "killed" / f"losses{rank}").read_text().splitlines())
        console.print(
            f"{options.steps} steps on {options.ranks} ranks, a save every {EVERY} steps, {options.kills} kills, "
            f"{seconds:.0f} s: {count} losses were computed, some steps' more than once; "
            + (f"{differ} steps DIFFER" if differ else "all are those of the undisturbed run, bit for bit")
        )
        if differ:
            raise SystemExit(1)
