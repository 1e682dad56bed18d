"""The stopwatch of one rank among others that run the same at the same time."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from meshwright.calibrate.plan import NODES
from meshwright.runtime.collectives import Handle
from meshwright.runtime.communicator import Communicator

SAMPLE_SECONDS = 1e-3  # the shortest time that is worth reading off a clock
MOST_CALLS = 2000  # in a sample
LEAST_SAMPLES = 3
CALLS_BETWEEN = 8  # of a collective among calls that compute: whoever comes early to one waits, and so on
LEAST_SHARE = 0.02  # of a sample, for what is the difference of two: noise must not make it nothing
ISSUED_SECONDS = (
    4e-3  # of calls that wait in a device's queue: some hundred, and a queue has room for a thousand
)
BLOCK = 4096  # the size of the product that an accelerator computes while calls are issued
STEPS_IN_A_ROW = 4  # on an accelerator, whose host is in the next step before this one has ended

Call = Callable[[], object]


@dataclass
class Bench:
    """`comm` joins the ranks that measure together, `here` of them on this machine; `device` is this rank's. Times are
    seconds."""

    comm: Communicator
    device: torch.device
    cores: int
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.handle = Handle(self.comm)
        self.axes = [a.name for a in self.comm.mesh.axes]
        self.here = math.prod(a.size for a in self.comm.mesh.axes if a.link != NODES)

    @property
    def ranks(self) -> int:
        """How many measure together."""
        return self.comm.mesh.size

    def slowest(self, value: float) -> float:
        """The largest of the ranks' values, on every rank; it makes them meet."""
        mine = torch.tensor([value], dtype=torch.float64, device=self.device)
        return float(self.comm.all_reduce(mine, self.axes, "max").item())

    def meet(self) -> None:
        """Wait for everybody."""
        self.slowest(0.0)

    def elapsed(self) -> float:
        """Seconds since the rank that began first did, the same number on every rank."""
        return self.slowest(time.monotonic() - self.began)

    def finish(self) -> None:
        """Wait until the device has done all that it was told."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def crowded(self) -> bool:
        """True if ranks take turns on the cores: then no short time says what a long one takes."""
        return self.device.type == "cpu" and self.here > self.cores

    def sample(self, call: Call, calls: int) -> float:
        """Seconds of one call, from so many in a row."""
        self.finish()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        self.finish()
        return (time.perf_counter() - began) / calls

    def seconds(self, call: Call, budget: float) -> float:
        """Measure a call that involves no other rank: the slowest rank's median seconds while all ranks make it. The
        mean if ranks share the cores: a short call then either runs at once or waits for a full time slice. On an
        accelerator they are the device's, without what the host takes to issue the call."""
        if self.device.type == "cuda":
            return self._device_seconds(call, budget)
        calls = _calls(min(self.sample(call, 1), self.sample(call, 2)))
        self.meet()
        end, found = time.perf_counter() + budget, []
        while len(found) < LEAST_SAMPLES or time.perf_counter() < end:
            found.append(self.sample(call, calls))
        return self.slowest(statistics.fmean(found) if self.crowded else statistics.median(found))

    def _device_seconds(self, call: Call, budget: float) -> float:
        """The device computes products until the host has issued all calls of a sample; then it makes them in a row."""
        once = self._issue_seconds(call, 1)
        calls = max(1, min(MOST_CALLS, int(ISSUED_SECONDS / once)))
        waiting = calls * self._issue_seconds(call, min(calls, 16))
        self.meet()
        end, found, blocks = time.perf_counter() + budget, list[float](), 1
        while len(found) < LEAST_SAMPLES or time.perf_counter() < end:
            blocks = max(blocks, math.ceil(1.5 * waiting / self._block_seconds))
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._block(blocks)
            began.record()
            for _ in range(calls):
                call()
            ended.record()
            late = began.query() and blocks < 1000
            self.finish()
            if late:  # the device was idle in between
                blocks *= 2
                continue
            found.append(began.elapsed_time(ended) / 1e3 / calls)
        return self.slowest(statistics.median(found))

    def _issue_seconds(self, call: Call, calls: int) -> float:
        """Seconds of the host to issue one call, while the device has other work."""
        self.finish()
        self._block(1)
        began = time.perf_counter()
        for _ in range(calls):
            call()
        issued = time.perf_counter() - began
        self.finish()
        return issued / calls

    def host_seconds(self, call: Call, budget: float, calls: int = 100) -> float:
        """Measure what the host takes to issue a call that is nothing for the device, of so many in a row."""
        end, found = time.perf_counter() + budget, list[float]()
        while len(found) < LEAST_SAMPLES or time.perf_counter() < end:
            found.append(self.sample(call, calls))
        return self.slowest(statistics.median(found))

    def _block(self, count: int) -> None:
        for _ in range(count):
            torch.mm(*self._factors)

    @functools.cached_property
    def _factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = (torch.randn(BLOCK, BLOCK, device=self.device) for _ in range(2))
        return a, b

    @functools.cached_property
    def _block_seconds(self) -> float:
        self._block(2)
        return self.sample(lambda: self._block(1), 3)

    def joint_seconds(self, call: Call, budget: float) -> float:
        """Seconds of a collective: every rank makes equally many calls; the median over samples of the slowest rank."""
        self.sample(call, 1)
        once = self.slowest(self.sample(call, 2))
        calls = max(_calls(once), STEPS_IN_A_ROW if self.device.type == "cuda" else 1)
        samples = max(LEAST_SAMPLES, min(50, int(budget / (calls * once))))
        found = []
        for _ in range(samples):
            self.meet()
            found.append(self.sample(call, calls))
        mine = torch.tensor(found, dtype=torch.float64, device=self.device)
        return statistics.median(self.comm.all_reduce(mine, self.axes, "max").tolist())

    def waited_seconds(self, computes: Call, collective: Call, budget: float) -> float:
        """Seconds that a collective adds to a program that computes before and after it: what is sent, what comes late
        on some rank, caches that it finds and leaves cold. The median over pairs of samples, with it and without."""

        def both() -> None:
            computes()
            collective()

        self.sample(both, 2)
        once = self.slowest(self.sample(both, 2) + self.sample(computes, 2))
        calls = CALLS_BETWEEN
        samples = max(LEAST_SAMPLES, min(50, int(budget / (calls * once))))
        found: list[tuple[float, float]] = []
        for _ in range(samples):
            self.meet()
            without = self.sample(computes, calls)
            self.meet()
            found.append((without, self.sample(both, calls)))
        mine = torch.tensor(found, dtype=torch.float64, device=self.device)
        slowest = self.comm.all_reduce(mine, self.axes, "max").tolist()
        return statistics.median(max(b - a, LEAST_SHARE * b) for a, b in slowest)


def _calls(once: float) -> int:
    return max(1, min(MOST_CALLS, int(SAMPLE_SECONDS / max(once, 1e-9))))
