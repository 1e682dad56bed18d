"""A timeline of a step: tasks in issue order on a few streams, simulated as events.

A *stream* runs its tasks one after another in the order of the list, as a device's streams and a library's queues do. A
blocking collective occupies the compute stream and the stream of its axes at once. A collective that is only started
occupies the latter alone; then compute beside it, and it beside compute, slow down by the measured factors. A task
starts when it is the first of all its streams and its dependences are done. Since both kinds of waiting point back in
the list, the simulation cannot deadlock.

The host issues the tasks in the order of the list and runs ahead of an accelerator. Where it takes time to issue them,
a task cannot start before the host has come to it, so a step of many small operators is as long as the host takes.

Without slowdown, a longer task never ends the step earlier: all times are sums and maxima of seconds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

COMPUTE = "compute"
ALONE: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class Task:
    """One task of a step.

    `streams` are the streams it occupies, `after` the positions of its dependences (earlier ones), `kind` a word for
    readers (``forward``, ``backward``, ``reduce``, ``update``). A task is compute when it occupies the compute stream
    alone; any other is communication. `seconds` is its time with nothing beside it. `about` is carried along for
    reports. `issue_seconds` is the host's time to issue it.
    """

    name: str
    streams: tuple[str, ...]
    seconds: float
    after: tuple[int, ...] = ()
    kind: str = ""
    about: Mapping[str, object] = field(default_factory=dict)
    issue_seconds: float = 0.0

    @property
    def computes(self) -> bool:
        """True if it is compute."""
        return self.streams == (COMPUTE,)


@dataclass(frozen=True)
class Timeline:
    """The start and end of each task of a list, in seconds from the beginning of the step.

    `compute_seconds` is the time of computation, `exposed_seconds` that of communication without computation,
    `hidden_seconds` that of both together. `marked`: exposed and hidden seconds until each marked task has ended.
    """

    tasks: tuple[Task, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    compute_seconds: float
    exposed_seconds: float
    hidden_seconds: float
    marked: tuple[tuple[float, float], ...] = ()

    @property
    def step_seconds(self) -> float:
        """The end of the last task."""
        return max(self.ends, default=0.0)

    @property
    def idle_seconds(self) -> float:
        """The time in which nothing runs."""
        return max(0.0, self.step_seconds - self.compute_seconds - self.exposed_seconds)

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams in order of first use, compute first."""
        used = dict.fromkeys(s for t in self.tasks for s in t.streams)
        return (COMPUTE, *(s for s in used if s != COMPUTE))

    def busy_seconds(self, stream: str) -> float:
        """Return the time in which a stream is occupied."""
        return sum(
            end - start
            for task, start, end in zip(self.tasks, self.starts, self.ends, strict=True)
            if stream in task.streams
        )


def play(
    tasks: Sequence[Task], slowdown: Mapping[str, float] = ALONE, marks: Collection[int] = ()
) -> Timeline:
    """Simulate a list of tasks. `slowdown`: factors (at least 1) of ``compute`` and ``collective`` while the other
    runs. `marks`: positions of tasks, each of which ends after the one before it (`Timeline.marked`).

    Raises ValueError for a task that waits for itself or a later one, and for negative seconds.
    """
    check(tasks)
    return _Play(
        tasks, max(1.0, slowdown.get("compute", 1.0)), max(1.0, slowdown.get("collective", 1.0))
    ).run(frozenset(marks))


def check(tasks: Sequence[Task]) -> None:
    """Raise ValueError for a list that cannot be simulated."""
    for number, task in enumerate(tasks):
        after = task.after
        if after and (max(after) >= number or min(after) < 0):
            raise ValueError(f"task {number} ({task.name}) waits for {max(after)}, which is not before it")
        if not task.streams or not task.seconds >= 0.0:
            raise ValueError(
                f"task {number} ({task.name}) has streams {task.streams}, {task.seconds} seconds"
            )


class _Play:
    """The state of a simulation: the running tasks, with the seconds of work they have left.

    A search simulates hundreds of thousands of tasks, so that the common cases (one stream, nothing beside it) have
    short ways of their own. They do the same arithmetic.
    """

    def __init__(self, tasks: Sequence[Task], compute: float, collective: float) -> None:
        self.tasks, self.compute_factor, self.collective_factor = tuple(tasks), compute, collective
        # A task waits for those it names and for the one before it on each of its streams.
        last: dict[str, int] = {}
        self.waits = [0] * len(tasks)
        self.next: list[list[int]] = [[] for _ in tasks]
        self.computes = [task.computes for task in tasks]
        for number, task in enumerate(tasks):
            streams = task.streams
            if len(streams) == 1 and not task.after:
                before = (last[streams[0]],) if streams[0] in last else ()
                last[streams[0]] = number
            else:
                before = {*task.after, *(last[s] for s in streams if s in last)}
                last.update(dict.fromkeys(streams, number))
            self.waits[number] = len(before)
            for other in before:
                self.next[other].append(number)
        self.starts, self.ends = [0.0] * len(tasks), [0.0] * len(tasks)
        self.left: dict[int, float] = {}
        self.computing = 0
        # When the host has issued each, if that takes time; and the tasks that wait for that alone.
        issued = [task.issue_seconds for task in tasks]
        self.issued = list(itertools.accumulate(issued)) if any(issued) else None
        self.unissued: list[tuple[float, int]] = []

    def run(self, marks: frozenset[int]) -> Timeline:
        marked: list[tuple[float, float]] = []
        now = compute = exposed = hidden = 0.0
        left, unissued = self.left, self.unissued
        self._start([n for n, count in enumerate(self.waits) if count == 0], now)
        while left or unissued:
            both = 0 < self.computing < len(left)
            limit = unissued[0][0] - now if unissued else math.inf
            if len(left) == 1 and not unissued:
                ((first, passed),) = left.items()
                ended = [first]
            elif both:
                passed, ended = self._pass_beside(limit)
            else:
                passed = min(limit, *left.values()) if left else limit
                ended = [n for n, work in left.items() if work <= passed]
                for n in left:
                    left[n] -= passed
            now += passed
            if self.computing:
                compute += passed
                hidden += passed if both else 0.0
            elif left:
                exposed += passed
            self._end(ended, now)
            if marks and not marks.isdisjoint(ended):
                marked.append((exposed, hidden))
            if passed == limit:
                now = max(now, unissued[0][0])
                self._start([heappop(unissued)[1]], now)
        ends = tuple(self.ends)
        return Timeline(self.tasks, tuple(self.starts), ends, compute, exposed, hidden, tuple(marked))

    def _pass_beside(self, limit: float) -> tuple[float, list[int]]:
        """Let compute and communication slow each other down until a task ends, or for `limit` seconds; return the
        seconds and what ended."""
        left, computes = self.left, self.computes
        factors = [self.compute_factor if computes[n] else self.collective_factor for n in left]
        works = [work * factor for work, factor in zip(left.values(), factors, strict=True)]
        passed = min(limit, *works)
        ended = [n for n, work in zip(left, works, strict=True) if work <= passed]
        for n, factor in zip(left, factors, strict=True):
            left[n] -= passed / factor
        return passed, ended

    def _start(self, ready: Sequence[int], now: float) -> None:
        issued = self.issued
        for number in ready:
            if issued is not None and issued[number] > now:
                heappush(self.unissued, (issued[number], number))
                continue
            self.starts[number] = now
            self.left[number] = self.tasks[number].seconds
            self.computing += self.computes[number]

    def _end(self, ended: Sequence[int], now: float) -> None:
        ready: list[int] = []
        waits = self.waits
        for number in ended:
            self.ends[number] = now
            del self.left[number]
            self.computing -= self.computes[number]
            for other in self.next[number]:
                waits[other] -= 1
                if waits[other] == 0:
                    ready.append(other)
        self._start(sorted(ready) if len(ready) > 1 else ready, now)
