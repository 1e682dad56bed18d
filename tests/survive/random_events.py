"""A job of forked ranks in which something breaks again and again, at random moments, until so many events are over.

python -m tests.survive.random_events FOLDER RANKS EVENTS SEED
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import meshwright as mw
from meshwright.heartbeat.generation import JOINED
from meshwright.launch.span import Alone
from meshwright.launch.survivors import Survivors
from tests.survive.job import Forked, build, loader_of, optimizer_of

LOOK_SECONDS = 0.01
SECONDS = 400.0
PAUSE_SECONDS = 0.3  # of a rank that is stopped for a while
AHEAD_STEPS = 100  # for which the job goes on when all is over


def train(folder: Path, ranks: int) -> None:
    """What a rank does: train until a file names the last step."""
    torch.set_num_threads(1)
    me, last = os.environ["RANK"], folder / "last"
    model, batch, loss, samples = build()
    step = mw.train_step(model, optimizer_of, batch, loss=loss, mesh=ranks)
    loader, steps = mw.shard_loader(loader_of(samples), step), 1 << 40
    with (folder / f"losses{me}").open("a") as out:
        while step.steps < steps:
            for part in loader:
                value = step(part)
                out.write(f"{step.steps} {step.mesh.size} {value.item().hex()} {os.getpid()}\n")
                out.flush()
                if last.exists():
                    steps = int(last.read_text())
                if step.steps >= steps:
                    break
    torch.save(step.full_state(), folder / f"weights{me}.pt")
    mw.shutdown()


class Breaker:
    """Breaks something now and then. A rank that has the state of the job is left, always."""

    def __init__(self, ranks: Forked, survivors: Survivors, events: int, seed: int) -> None:
        self.ranks, self.survivors, self.left = ranks, survivors, events
        self.chance, self.told = random.Random(seed), list[str]()
        self.killed = set[int]()
        self.at, self.stopped = time.monotonic() + 1.0, list[int]()

    def look(self) -> None:
        """Break something if it is time."""
        if time.monotonic() < self.at:
            return
        for pid in self.stopped:
            os.kill(pid, signal.SIGCONT)
        self.stopped, able = [], self._able()
        self.at = time.monotonic() + self.chance.uniform(0.0, 0.8)
        if not self.left or len(able) < 2:
            return
        kind = self.chance.choice(("kill", "kill", "two", "coming", "pause"))
        running = self.ranks.running()
        coming = [rank for rank in running if rank not in able]
        if kind == "pause":
            self.stopped = [self.ranks.pids[self.chance.choice(able)]]
            os.kill(self.stopped[0], signal.SIGSTOP)
            self.at = time.monotonic() + PAUSE_SECONDS
        elif kind == "coming" and coming:
            self._kill(coming[:1])
        else:
            self._kill(self.chance.sample(able, 2 if kind == "two" and len(able) > 2 else 1))
        self.told.append(kind)
        self.left -= 1

    def _able(self) -> list[int]:
        """The ranks that have the state of the job."""
        ranks = self.ranks
        running = [r for r in ranks.running() if ranks.pids[r] not in self.killed]
        had = (r for r in self.survivors.now.ranks if r in running)
        return [r for r in had if not ranks.lives[r] or (ranks.folder / f"rank{r}{JOINED}").exists()]

    def _kill(self, ranks: list[int]) -> None:
        for rank in ranks:
            self.killed.add(self.ranks.pids[rank])
            os.kill(self.ranks.pids[rank], signal.SIGKILL)

    def over(self) -> bool:
        """Whether all is over, and all ranks take part again."""
        return not self.left and not self.stopped and len(self._able()) == len(self.ranks.pids)


def main(folder: Path, count: int, events: int, seed: int) -> int:
    """Run the job; 0 if all ranks have ended well."""
    start: Callable[[int, int], None] = lambda rank, life: train(folder, count)  # noqa: E731
    ranks: Any = Forked(folder, count, start)
    survivors = Survivors(folder, ranks, range(count), count, Alone(count, 2 * events))
    end = time.monotonic() + SECONDS
    breaker, last = Breaker(ranks, survivors, events, seed), folder / "last"
    while ranks.running() and not survivors.over() and time.monotonic() < end:
        if (folder / "losses0").exists():
            breaker.look()
        if breaker.over() and not last.exists():
            lines = [line for f in folder.glob("losses*") for line in f.read_text().splitlines()]
            beside = last.with_suffix(".new")
            beside.write_text(str(AHEAD_STEPS + max(int(line.split()[0]) for line in lines)))
            beside.replace(last)
        time.sleep(LOOK_SECONDS)
    print(*breaker.told)
    running = ranks.running()
    for rank in running:
        ranks.end(rank)
    failed = [e.rank for e in ranks.failures() if e.rank not in survivors.lost]
    return int(bool(failed or running or breaker.left))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *map(int, sys.argv[2:])))
