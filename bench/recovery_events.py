"""What breaks in a job, one after another, and what each costs.

    python -m bench recovery --events [NAME …] [--folder PATH] [--markdown]

Each event has a job of its own: two or three ranks of this machine, or two machines with a rank each (network
namespaces joined by a bridge). What is counted is written by the ranks themselves: seconds from the event until the
next step, and how many steps were done once more. Losses of all steps, and the weights at the end, are compared with
those of the same job undisturbed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.machines import Machine, machines
from bench.recovery_job import PATIENCE_SECONDS, Job
from bench.recovery_lines import Found, Line, furthest, longest

DOWN_SECONDS = 20.0
SLOW_SECONDS = 10.0
ANY_MOMENT_SECONDS = 1.0  # a kill follows no step at once
ALONE = [Machine("127.0.0.1")]


# ---- events: each gets a job that trains, and says what it cost, and what else there is to say


def rank_killed(job: Job) -> tuple[Found | None, str]:
    known = job.warm()
    time.sleep(random.uniform(0, ANY_MOMENT_SECONDS))
    moment = time.time()
    os.kill(job.pid(1), signal.SIGKILL)
    return job.next(moment, _next_step(job, known)), ""


def _next_step(job: Job, known: frozenset[int]) -> Callable[[Line], bool]:
    """Which steps are those after a loss: of ranks that are left, or of new processes."""
    if "continue" in job.options:
        return lambda line: line.ranks < job.ranks
    return lambda line: line.pid not in known


def rank_back(job: Job) -> tuple[Found | None, str]:
    known, moment = job.warm(), time.time()
    os.kill(job.pid(1), signal.SIGKILL)
    job.next(moment, lambda line: line.ranks < job.ranks)
    return _joined(job, known, moment, "it was killed")


def _joined(job: Job, known: frozenset[int], moment: float, what: str) -> tuple[Found, str]:
    """How long the others pause for a rank that joins them, and when it does after `what`."""
    found = job.next(moment, lambda line: line.pid not in known)
    joined = moment + found.seconds
    pause = longest((n for n in job.lines() if n.pid in known), joined - 1.0, joined)
    return Found(pause, 0), f"takes part {found.seconds:.1f} s after {what}"


def machine_lost(job: Job) -> tuple[Found | None, str]:
    known = job.warm()
    time.sleep(random.uniform(0, ANY_MOMENT_SECONDS))
    moment = job.kill(1)
    del job.running[1]
    return job.next(moment, _next_step(job, known)), ""


def machine_joins_others(job: Job) -> tuple[Found | None, str]:
    machine_lost(job)
    moment, known = time.time(), frozenset(line.pid for line in job.lines())
    job.start(1)
    return _joined(job, known, moment, "it was started")


def machine_joins(job: Job) -> tuple[Found | None, str]:
    known, moment = job.warm(), time.time()
    place = next(place for place in range(len(job.places)) if place not in job.running)
    job.start(place)
    found = job.next(moment, lambda line: line.pid not in known)
    last = max(line.at for line in job.lines() if line.pid in known)
    note = f"{found.seconds:.1f} s after it was started; the others save first"
    return Found(moment + found.seconds - last, found.lost), note


def machine_back(job: Job) -> tuple[Found | None, str]:
    machine_lost(job)
    job.ranks -= job.each
    return machine_joins(job)


def machine_killed(job: Job) -> tuple[Found | None, str]:
    known = job.warm()
    moment = job.kill(1)
    job.start(1)
    return job.next(moment, lambda line: line.pid not in known), "started again at once"


def scheduler_killed(job: Job) -> tuple[Found | None, str]:
    job.warm()
    moment = job.kill(-1)
    time.sleep(2)
    job.schedule()
    job.warm()
    return Found(
        longest(job.lines(), moment, time.time()), 0
    ), "away for 2 s: steps do not need it, a save waits for it"


def network_down(job: Job) -> tuple[Found | None, str]:
    job.warm()
    with job.places[1].unreachable():
        time.sleep(DOWN_SECONDS)
        moment = time.time()
    found = job.next(moment, lambda line: line.at > moment)
    return found, "seconds since it is up again"


def machine_slow(job: Job) -> tuple[Found | None, str]:
    job.warm()
    begin = time.time()
    while time.time() < begin + SLOW_SECONDS:
        for number, seconds in ((signal.SIGSTOP, 0.4), (signal.SIGCONT, 0.1)):
            os.kill(job.pid(1), number)
            time.sleep(seconds)
    end = time.time()
    steps = [line for line in job.lines() if begin < line.at < end and line.pid == job.pid(0)]
    note = f"stopped for 4/5 of its time: {len(steps) / SLOW_SECONDS:.1f} steps/s"
    return Found(longest(job.lines(), begin, end), 0), note


def machine_added(job: Job) -> tuple[Found | None, str]:
    job.warm()
    job.start(2)
    code = job.running.pop(2).wait(PATIENCE_SECONDS)
    job.warm()
    said = (job.folder / "stderr2").read_text().splitlines()[0]
    return None, f"refused ({code}): {said.partition(': ')[2]}"


RESTART = ("--max-restarts", 3)
ELASTIC = (*RESTART, "--last-call", 1)
REPLICAS = ("replicas",)
CONTINUE = ("--on-failure", "continue", "--max-restarts")


@dataclass(frozen=True)
class Event:
    """What happens, what the job does then, and the job: see `Job`. `machines`: it has two."""

    title: str
    how: str
    run: Callable[[Job], tuple[Found | None, str]]
    options: tuple[object, ...] = RESTART
    plan: tuple[str, ...] = ()
    ranks: int = 2
    machines: int = 1
    nnodes: str = ""
    scheduler: tuple[object, ...] | None = None

    def job(self, folder: Path, places: list[Machine]) -> Job:
        how = (self.plan, self.ranks, self.machines, self.nnodes, self.scheduler)
        return Job(folder, places, self.options, *how)


EVENTS = {
    "rank": Event("rank killed", "all restart", rank_killed),
    "rank-continue": Event("rank killed", "the others go on", rank_killed, (*CONTINUE, 0), REPLICAS, 3),
    "rank-back": Event("rank back", "it joins", rank_back, (*CONTINUE, 1), REPLICAS, 3),
    "rank-continue-machines": Event(
        "rank killed, --nnodes 3", "the others go on", rank_killed, (*CONTINUE, 0), REPLICAS, 3, 3
    ),
    "machine-continue": Event(
        "machine killed, --nnodes 3", "the others go on", machine_lost, (*CONTINUE, 0), REPLICAS, 3, 3
    ),
    "machine-continue-back": Event(
        "machine back, --nnodes 3", "it joins", machine_joins_others, (*CONTINUE, 0), REPLICAS, 3, 3
    ),
    "rank-memory": Event("rank killed", "all restart, from memory", rank_killed, plan=("zero", "memory")),
    "machine": Event("machine killed and back", "all restart", machine_killed, machines=2),
    "scheduler": Event("scheduler killed and back", "nothing", scheduler_killed, machines=2, scheduler=()),
    "network": Event("network down for 20 s", "all wait", network_down, machines=2),
    "slow": Event("slow machine", "all wait", machine_slow, machines=2),
    "added": Event("machine added", "nothing", machine_added, machines=2),
    "elastic-lost": Event(
        "machine killed, --nnodes 2:3", "the others begin again", machine_lost, ELASTIC, (), 3, 3, "2:3"
    ),
    **{
        name: Event(
            f"machine killed, --nnodes 2:3, {title}",
            "the others begin again, from memory",
            machine_lost,
            ELASTIC,
            (plan, memory),
            3,
            3,
            "2:3",
        )
        for name, plan, memory, title in (
            ("memory-zero", "zero", "memory", "ZeRO"),
            ("memory-tensor", "tensor", "memory", "tensor parallel"),
            ("memory-stages", "stages", "memory", "pipeline"),
            ("memory-beside", "tensor", "memory-beside", "tensor parallel, async_=True"),
        )
    },
    "elastic-back": Event(
        "machine back, --nnodes 2:3", "all begin again", machine_back, ELASTIC, (), 3, 3, "2:3"
    ),
    "elastic-added": Event(
        "machine added, --nnodes 2:3", "all begin again", machine_joins, ELASTIC, (), 2, 2, "2:3"
    ),
}


@dataclass(frozen=True)
class Row:
    event: Event
    found: Found | None
    equal: str
    note: str


def measured(name: str, folder: Path) -> Row:
    """Run an event, and the same job undisturbed."""
    event = EVENTS[name]
    with (
        machines(3) if event.machines > 1 else contextlib.nullcontext(ALONE) as places,
        contextlib.closing(event.job(folder / name, places)) as job,
    ):
        found, note = event.run(job)
        last = job.end()
        with contextlib.closing(event.job(folder / f"{name}-undisturbed", places)) as calm:
            calm.end(last)
    weights, apart = _weights(job), furthest(job.lines(), calm.lines())
    if len(weights) > 1:
        return Row(event, found, "NO: ranks differ", note)
    if weights == _weights(calm) and not apart:
        return Row(event, found, "yes, bit for bit", note)
    return Row(event, found, f"on all ranks; losses to {apart:.0e}", note)


def _weights(job: Job) -> set[str]:
    return {path.read_text() for path in job.folder.glob("weights*")}


def main(names: list[str], folder: Path, markdown: bool = False) -> None:
    """Run events and print the table."""
    heads = ("event", "what the job does", "seconds", "steps lost", "weights equal", "remarks")
    rows: list[tuple[str, ...]] = [heads]
    for name in names or EVENTS:
        row = measured(name, folder)
        cost = (f"{row.found.seconds:.2f}", str(row.found.lost)) if row.found is not None else ("", "")
        rows.append((row.event.title, row.event.how, *cost, row.equal, row.note))
        print(f"{name}: {' | '.join(rows[-1])}", file=sys.stderr, flush=True)
    if markdown:
        for cells in (heads, ("---", "---", "--:", "--:", "---", "---"), *rows[1:]):
            print(f"| {' | '.join(cells)} |")
        return
    table = Table(*heads)
    for cells in rows[1:]:
        table.add_row(*cells)
    Console(width=140, highlight=False).print(table)


__all__ = ["EVENTS", "Event", "main", "measured"]
