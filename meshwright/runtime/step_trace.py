"""When a rank does what: each action of a step with its beginning and end, and when it waited for other stages or for
collectives within its own.

A step that nobody looks at knows nothing of this: for the one that is recorded, the kinds of actions of its executor
and the communicators that it uses are wrapped.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from meshwright.core.collectives import REGISTERED
from meshwright.pipeline.actions import Action
from meshwright.pipeline.measured import Span
from meshwright.runtime.communicator import Communicator, Work
from meshwright.runtime.step import LocalStep

TRIPS = 8  # round trips, of which the quickest says how far two clocks are apart
Mark = Any  # seconds, or an event on a GPU's stream


class Clock:
    """Moments of a rank. On a GPU they are those at which its stream comes there, known when the step is over."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._on_gpu = device, device.type == "cuda"
        if self._on_gpu:
            torch.cuda.synchronize(device)
            self._first, self._zero = self.mark(), time.perf_counter()

    def mark(self) -> Mark:
        """Now."""
        if not self._on_gpu:
            return time.perf_counter()
        return torch.cuda.current_stream(self.device).record_event(torch.cuda.Event(enable_timing=True))

    def seconds(self, mark: Mark) -> float:
        """A moment on this process's clock."""
        if not self._on_gpu:
            return mark
        mark.synchronize()
        return self._zero + self._first.elapsed_time(mark) / 1e3


@dataclass
class _Span:
    action: Action
    begin: Mark
    end: Mark
    waits: list[tuple[Mark, Mark]]
    talks: list[tuple[Mark, Mark]]


class Recorder:
    """Records the actions of a rank while an executor is watched."""

    def __init__(self, device: torch.device) -> None:
        self.clock = Clock(device)
        self._spans: list[_Span] = []
        self._open = False  # whether an action runs

    @contextlib.contextmanager
    def watching(self, step: LocalStep) -> Iterator[None]:
        """Record what a step runs."""
        kinds = step.executor.kinds
        step.executor.kinds = {kind: self._timed(done) for kind, done in kinds.items()}
        talkers: list[Any] = [
            step.executor.borders,
            step.pipe,
            step.handle,
            step.rank,
            step.buckets,
            step.sharded,
        ]
        before = [(one, one.comm) for one in talkers if hasattr(one, "comm")]
        for one, comm in before:
            one.comm = _Watched(comm, self)
        try:
            yield
        finally:
            step.executor.kinds = kinds
            for one, comm in before:
                one.comm = comm

    def spans(self) -> tuple[Span, ...]:
        """The recorded spans, on this process's clock."""
        at = self.clock.seconds
        return tuple(
            Span(
                replace(s.action, kind=_NAMES.get(s.action.kind, s.action.kind)),
                at(s.begin),
                at(s.end),
                tuple((at(begin), at(end)) for begin, end in s.waits),
                tuple((at(begin), at(end)) for begin, end in s.talks),
            )
            for s in self._spans
        )

    def waiting(self, done: Callable[[], torch.Tensor], *, within: bool) -> torch.Tensor:
        """Wait for a message, or for a collective `within` the stage; what lies before and after the actions has no
        place among them."""
        if not self._open:
            return done()
        begin = self.clock.mark()
        found = done()
        span = self._spans[-1]
        (span.talks if within else span.waits).append((begin, self.clock.mark()))
        return found

    def _timed(self, done: Callable[[Action], None]) -> Callable[[Action], None]:
        def run(action: Action) -> None:
            begin = self.clock.mark()
            span = _Span(action, begin, begin, [], [])
            self._spans.append(span)
            self._open = True
            try:
                done(action)
            finally:
                self._open = False
            span.end = self.clock.mark()

        return run


_NAMES = {"reduce_wait": "reduce"}


MESSAGES = ("send_to", "receive_from")


class _Watched:
    """A communicator that tells a recorder when its messages and its collectives are waited for."""

    def __init__(self, comm: Any, recorder: Recorder) -> None:
        self._comm, self._recorder = comm, recorder

    def __getattr__(self, name: str) -> Any:
        found, recorder = getattr(self._comm, name), self._recorder
        if name in MESSAGES:
            return lambda *a, **k: _WatchedWork(found(*a, **k), recorder, within=False)
        if name.removesuffix("_start") not in REGISTERED and name != "sum_over":
            return found
        if name.endswith("_start"):
            return lambda *a, **k: _WatchedWork(found(*a, **k), recorder, within=True)
        return lambda *a, **k: recorder.waiting(lambda: found(*a, **k), within=name != "sum_over")


@dataclass
class _WatchedWork:
    work: Work
    recorder: Recorder
    within: bool

    def wait(self) -> torch.Tensor:
        return self.recorder.waiting(self.work.wait, within=self.within)


def ahead_of_first(comm: Communicator, device: torch.device, tag: int) -> float:
    """By how many seconds this process's clock is ahead of rank 0's: none on one machine, and else half way through
    the quickest of a few round trips (Cristian, "Probabilistic clock synchronization", 1989). All ranks call it, and
    leave it at about one time.

    `tag` is of nothing else between rank 0 and the others.
    """
    here = _machine()

    def told(source: int) -> tuple[float, float]:
        into = torch.zeros(2, dtype=torch.float64, device=device)
        now, machine = comm.receive_start(into, source, tag).wait().tolist()
        return now, machine

    def tell(to: int) -> None:
        now = torch.tensor([time.perf_counter(), here], dtype=torch.float64, device=device)
        comm.send_start(now, to, tag).wait()

    others = range(1, comm.mesh.size)
    if comm.rank == 0:
        for rank in others:
            for _ in range(TRIPS):
                told(rank)
                tell(rank)
        for rank in others:
            tell(rank)
        return 0.0
    trips: list[tuple[float, float]] = []
    for _ in range(TRIPS):
        began = time.perf_counter()
        tell(0)
        there, _ = told(0)
        ended = time.perf_counter()
        trips.append((ended - began, (began + ended) / 2 - there))
    _, machine = told(0)
    return 0.0 if here and machine == here else min(trips)[1]


def _machine() -> float:
    """A number of this machine since it was started, exact as a float; 0 where it cannot be known. Linux has one
    monotonic clock for all processes but those of other time namespaces, and a round trip of a rank that waits for its
    turn on a busy core is off by more than a micro-batch takes."""
    try:
        names = Path("/proc/sys/kernel/random/boot_id").read_text() + str(
            Path("/proc/self/ns/time").readlink()
        )
    except OSError:
        return 0.0
    return float(int.from_bytes(hashlib.blake2b(names.encode(), digest_size=6).digest()))


__all__ = ["Clock", "Recorder", "ahead_of_first"]
