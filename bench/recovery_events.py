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
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.machines import Machine, machines
from bench.recovery_lines import Found, Line, after, furthest, longest, read

SCRIPT = Path(__file__).with_name("recovery_run.py")
PATIENCE_SECONDS = 180.0
WARM_STEPS = 10  # before an event
LAST_STEPS = 12  # after it
DOWN_SECONDS = 20.0
SLOW_SECONDS = 10.0
ANY_MOMENT_SECONDS = 1.0  # a kill follows no step at once
PORT = 29517
ALONE = [Machine("127.0.0.1")]


@dataclass
class Job:
    """A launched job, of which every machine may be started again. `options`: of `meshwright run`; `plan`: of
    `recovery_run`."""

    folder: Path
    places: list[Machine]
    options: tuple[object, ...]
    plan: tuple[str, ...] = ()
    ranks: int = 2
    machines: int = 1  # of `places`, with which it begins
    nnodes: str = ""  # MIN:MAX; else it is as many
    scheduler: bool = False  # one of its own, rather than that of the first machine
    secret: str = field(default_factory=secrets.token_hex)
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.each = self.ranks // self.machines
        if self.scheduler:
            self.schedule()
        for place in range(self.machines):
            self.start(place)

    def _popen(self, place: int, *words: object) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).parents[1])
        path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
        command = (*self.places[place].prefix, sys.executable, "-m", "meshwright.cli", *words)
        with (self.folder / f"stderr{place}").open("ab") as out:
            return subprocess.Popen(
                list(map(str, command)),
                env={**os.environ, "PYTHONPATH": path, "MESHWRIGHT_SECRET": self.secret},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    @property
    def master(self) -> str:
        return f"{self.places[0].address}:{PORT}"

    def start(self, place: int) -> None:
        """Start a machine, for the first time or again."""
        count = self.machines
        one = "--node-rank" if place < count else "--node-id"
        several = ("--nnodes", self.nnodes or count, one, place, "--master", self.master) if count > 1 else ()
        script = (SCRIPT, self.folder, 10**6, *self.plan)
        words = ("run", "--nproc", self.each, *several, *self.options, *script)
        self.running[place] = self._popen(place, *words)

    def schedule(self) -> None:
        """Start the scheduler, for the first time or again."""
        listen = ("--listen", self.master, "--state", self.folder / "kept")
        self.running[-1] = self._popen(0, "scheduler", *listen)

    def kill(self, place: int) -> float:
        """Kill a machine, its ranks with their launcher, or the scheduler (-1); when."""
        moment = time.time()
        os.killpg(self.running[place].pid, signal.SIGKILL)
        for rank in range(place * self.each, (place + 1) * self.each) if place >= 0 else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid(rank), signal.SIGKILL)
        self.running[place].wait()
        return moment

    def pid(self, rank: int) -> int:
        """The process of a rank."""
        return int((self.folder / f"pid{rank}").read_text())

    def lines(self) -> list[Line]:
        return read(self.folder)

    def until(self, true: Callable[[], object], what: str) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not true():
            ended = [p for p in self.running.values() if p.poll() not in (None, 0)]
            if ended or time.monotonic() > end:
                raise RuntimeError(f"the job ended before {what}\n{self.said()}")
            time.sleep(0.02)

    def warm(self, more: int = WARM_STEPS) -> frozenset[int]:
        """Wait until all ranks have done some steps; their processes."""
        begin = max((line.step for line in self.lines()), default=0)
        self.until(
            lambda: len({n.pid for n in self.lines() if n.step >= begin + more}) >= self.ranks, "it was warm"
        )
        return frozenset(self.pid(rank) for rank in range(self.ranks))

    def next(self, moment: float, new: Callable[[Line], bool]) -> Found:
        """What an event cost, once there has been a step since."""
        self.until(lambda: after(self.lines(), moment, new), "the next step")
        found = after(self.lines(), moment, new)
        assert found is not None
        return found

    def end(self, last: int = 0) -> int:
        """Have it end by itself, after a step or soon; its last step."""
        last = last or max(line.step for line in self.lines()) + LAST_STEPS
        (self.folder / "last").write_text(str(last))
        for process in self.running.values():
            if process.wait(PATIENCE_SECONDS):
                raise RuntimeError(f"the job failed\n{self.said()}")
        return last

    def said(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("stderr*")))

    def close(self) -> None:
        for place, process in self.running.items():
            if process.poll() is None:
                self.kill(place)


# ---- events: each gets a job that trains, and says what it cost, and what else there is to say


def rank_killed(job: Job) -> tuple[Found | None, str]:
    known = job.warm()
    time.sleep(random.uniform(0, ANY_MOMENT_SECONDS))
    moment = time.time()
    os.kill(job.pid(1), signal.SIGKILL)
    if "continue" in job.options:
        return job.next(moment, lambda line: line.ranks < job.ranks), ""
    return job.next(moment, lambda line: line.pid not in known), ""


def rank_back(job: Job) -> tuple[Found | None, str]:
    known, moment = job.warm(), time.time()
    os.kill(job.pid(1), signal.SIGKILL)
    job.next(moment, lambda line: line.ranks < job.ranks)
    found = job.next(moment, lambda line: line.pid not in known)
    joined = moment + found.seconds
    pause = longest((n for n in job.lines() if n.pid in known), joined - 0.01, joined)
    return Found(pause, 0), f"takes part {found.seconds:.1f} s after it was killed"


def machine_lost(job: Job) -> tuple[Found | None, str]:
    known = job.warm()
    time.sleep(random.uniform(0, ANY_MOMENT_SECONDS))
    moment = job.kill(1)
    del job.running[1]
    return job.next(moment, lambda line: line.pid not in known), ""


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
    scheduler: bool = False

    def job(self, folder: Path, places: list[Machine]) -> Job:
        how = (self.plan, self.ranks, self.machines, self.nnodes, self.scheduler)
        return Job(folder, places, self.options, *how)


EVENTS = {
    "rank": Event("rank killed", "all restart", rank_killed),
    "rank-continue": Event("rank killed", "the others go on", rank_killed, (*CONTINUE, 0), REPLICAS, 3),
    "rank-back": Event("rank back", "it joins", rank_back, (*CONTINUE, 1), REPLICAS, 3),
    "rank-memory": Event("rank killed", "all restart, from memory", rank_killed, plan=("zero", "memory")),
    "machine": Event("machine killed and back", "all restart", machine_killed, machines=2),
    "scheduler": Event("scheduler killed and back", "nothing", scheduler_killed, machines=2, scheduler=True),
    "network": Event("network down for 20 s", "all wait", network_down, machines=2),
    "slow": Event("slow machine", "all wait", machine_slow, machines=2),
    "added": Event("machine added", "nothing", machine_added, machines=2),
    "elastic-lost": Event(
        "machine killed, --nnodes 2:3", "the others begin again", machine_lost, ELASTIC, (), 3, 3, "2:3"
    ),
    **{
        f"memory-{plan}": Event(
            f"machine killed, --nnodes 2:3, {title}",
            "the others begin again, from memory",
            machine_lost,
            ELASTIC,
            (plan, "memory"),
            3,
            3,
            "2:3",
        )
        for plan, title in (("zero", "ZeRO"), ("tensor", "tensor parallel"), ("stages", "pipeline"))
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
    rows = [heads]
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


__all__ = ["EVENTS", "Event", "Job", "main", "measured"]
