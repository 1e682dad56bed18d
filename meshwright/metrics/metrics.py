"""`Metrics`: what a training loop reports. A call costs a step nothing that it would have to wait for."""

from __future__ import annotations

import queue
import resource
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from meshwright.core.type_guards import is_whole
from meshwright.cost.cluster import Cluster
from meshwright.errors import RunError, a_type
from meshwright.metrics.collective_wait import Waiting
from meshwright.metrics.flops import model_flops, seconds_at_peak, tokens_of
from meshwright.metrics.traces import in_trace, name_process, rank_named
from meshwright.metrics.writers import Bar, JsonLines, TensorBoard, Writer
from meshwright.parameter_server.server_step import ServerStep
from meshwright.runtime.step import LocalStep
from meshwright.train import TrainStep

HINTS = {
    "path": 'path="metrics.jsonl"',
    "tensorboard": 'tensorboard="runs/1"',
    "total": "total=1000 steps",
    "tokens": "tokens=8192, of a global batch",
    "trace_signal": "trace_signal=signal.SIGUSR1",
}


class Metrics:
    """Record loss, speed and memory of a run: ``with mw.Metrics(step, "metrics.jsonl") as metrics:``, and in the loop
    ``metrics(step(batch))``.

    A record has the loss, seconds per step, samples and tokens per second, the model's FLOP/s, bytes of memory in use
    and at the peak, and the seconds in which this rank waited for others. A background thread reads the loss and writes
    the files, so steps are not slowed down.
    """

    def __init__(
        self,
        step: TrainStep | LocalStep,
        path: str | Path | None = None,
        *,
        tensorboard: str | Path | None = None,
        progress: bool = False,
        total: int | None = None,
        every: int = 1,
        tokens: int | None = None,
        cluster: Cluster | None = None,
        all_ranks: bool = False,
        trace_signal: int | None = None,
    ) -> None:
        """Open the files.

        Args:
            step: The training step.
            path: A file of JSON lines.
            tensorboard: A folder for TensorBoard.
            progress: Show a progress bar on rank 0, of `total` steps.
            every: Steps between two records.
            tokens: Tokens per step, if the shapes of the batch do not tell.
            cluster: A cluster whose peak FLOP/s gives the utilisation.
            all_ranks: Every rank writes, rank r into ``metrics.r.jsonl``. By default only rank 0 does.
            trace_signal: A process that receives this signal (``signal.SIGUSR1``) traces its next three steps
                (`profile`).

        Raises RunError.
        """
        if not isinstance(step, TrainStep | LocalStep):
            raise RunError(
                f"the step is {a_type(step)}",
                why="mw.Metrics reports on a training step",
                hint="step.traffic, and meshwright ps status"
                if isinstance(step, ServerStep)
                else "mw.Metrics(step, path), with step = mw.train_step(…)",
            )
        if not is_whole(every) or every < 1:
            raise RunError(
                f"every={every!r}", why="a record is written after this many steps", hint="a number from 1 on"
            )
        _check_given(
            path=path, tensorboard=tensorboard, total=total, tokens=tokens, trace_signal=trace_signal
        )
        if cluster is not None and not isinstance(cluster, Cluster):
            raise RunError(
                f"cluster={cluster!r}",
                why=f"it is {a_type(cluster)}, not a Cluster",
                hint='mw.Cluster.load("cluster.yaml"), or mw.Cluster.preset("h100")',
            )
        self.local = step.local if isinstance(step, TrainStep) else step
        parts = self.local.parts
        self.rank, self.every = self.local.world.rank, every
        self.tokens = tokens_of(parts) if tokens is None else tokens
        self.flops = model_flops(parts)
        peaks = dict(cluster.device.flops) if cluster is not None else {}
        self._at_peak = seconds_at_peak(self.flops, peaks) if peaks else None
        self._ranks = self.local.world.mesh.size
        self._path = Path(path) if path is not None else None
        self._writers: list[Writer] = []
        if self.rank == 0 or all_ranks:
            if self._path is not None:
                self._writers.append(JsonLines(self._of_rank(self._path) if all_ranks else self._path))
            if tensorboard is not None:
                folder = Path(tensorboard)
                self._writers.append(TensorBoard(folder / f"rank{self.rank}" if all_ranks else folder))
        if progress and self.rank == 0:
            self._writers.append(Bar(total))
        world, pipe = self.local.world, self.local.pipe
        apart = pipe is not None and pipe.comm.collectives is not world  # stages on meshes of their own
        self._waiting = (
            Waiting(world, pipe.comm.collectives) if pipe is not None and apart else Waiting(world)
        )
        self._records: queue.SimpleQueue[tuple[dict[str, Any], float] | None] = queue.SimpleQueue()
        self._failed: Exception | None = None
        self._profiler: Any = None
        self._kinds = self.local.executor.kinds
        self._trace_left, self._trace_path = 0, Path()
        self._before_signal: Any = None
        self._signal = trace_signal
        self._asked = False
        if trace_signal is not None:
            self._before_signal = signal.signal(trace_signal, self._heard)
        self._count, self._since, self._waited, self._samples = (
            0,
            time.perf_counter(),
            0.0,
            self.local.samples,
        )
        self._thread = threading.Thread(target=self._write, name="meshwright-metrics", daemon=True)
        self._thread.start()

    def _of_rank(self, path: Path) -> Path:
        return path.with_suffix(f".{self.rank}{path.suffix}")

    def __enter__(self) -> Metrics:
        self._since = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(wait=error is None)

    def __call__(self, loss: torch.Tensor, **more: Any) -> torch.Tensor:
        """Record a step: its loss, and more numbers (or tensors of one number) by name. Returns the loss.

        Raises RunError for a value that is not a number, and if an earlier record could not be written.
        """
        if self._failed is not None:
            raise RunError("metrics cannot be written", why=str(self._failed)) from self._failed
        if not isinstance(loss, torch.Tensor):
            raise RunError(
                f"the loss is {a_type(loss)}",
                why="a record has the loss as the step returned it",
                hint="metrics(step(batch))",
            )
        for name, value in {"loss": loss, **more}.items():
            _check_number(name, value)
        self._trace()
        self._count += 1
        if self._count < self.every:
            return loss
        now, waited, samples = time.perf_counter(), self._waiting.seconds, self.local.samples
        if self._writers:
            record = {
                "step": self.local.rank.step,
                "loss": loss.detach(),
                "step_s": (now - self._since) / self._count,
                "waited_s": (waited - self._waited) / self._count,
                "time": time.time(),
                **more,
            }
            self._records.put((record, (samples - self._samples) / self._count))
        self._count, self._since, self._waited, self._samples = 0, now, waited, samples
        return loss

    # ------------------------------------------------------------ traces

    def profile(self, steps: int = 3, path: str | Path | None = None) -> Path:
        """Trace the next steps with torch's profiler, and return the path of the file for Perfetto or chrome://tracing.

        By default the file is next to the metrics; its name has the step and the rank. The trace names the rank and its
        stages, and groups operators by action: forward of a stage and micro-batch, backward, reduction, update.
        """
        if not is_whole(steps) or steps < 1:
            raise RunError(f"steps={steps!r} of a trace", why="it must be a number of steps", hint="steps=3")
        if self._trace_left:
            raise RunError("a trace is being taken", hint=f"it ends in {self._trace_left} steps")
        beside = self._path.parent if self._path is not None else Path()
        named = beside / f"trace-{self.local.rank.step}-rank{self.rank}.json"
        self._trace_path = Path(path) if path is not None else named
        self._trace_left = steps
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self.local.rank.device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=kinds)
        self._kinds = self.local.executor.kinds
        part = "segment" if self.local.pipe is None else "stage"
        self.local.executor.kinds = {kind: in_trace(done, part) for kind, done in self._kinds.items()}
        self._profiler.start()
        return self._trace_path

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def _trace(self) -> None:
        """Between two steps: end a trace, or begin the one that was asked for."""
        if self._trace_left:
            self._trace_left -= 1
            if not self._trace_left:
                self._profiler.stop()
                self._profiler.export_chrome_trace(str(self._trace_path))
                name_process(self._trace_path, rank_named(self.local))
                self._profiler, self.local.executor.kinds = None, self._kinds
        elif self._asked:
            self._asked = False
            self.profile()

    # ------------------------------------------------------------ the other thread

    def _write(self) -> None:
        while (given := self._records.get()) is not None:
            try:
                record = self._finished(*given)
                for writer in self._writers:
                    writer.write(record)
            except Exception as error:
                self._failed = self._failed or error

    def _finished(self, given: Mapping[str, Any], samples: float) -> dict[str, Any]:
        """Tensors as numbers (here it is waited for them), and what follows from the seconds. `samples` of a step, on
        the mean."""
        record = {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
        seconds = record["step_s"]
        record["samples_per_s"] = samples / seconds
        if self.tokens:
            rows = self.local.batches.rows
            record["tokens_per_s"] = self.tokens * (samples / rows if rows else 1.0) / seconds
        record["model_flops_per_s"] = sum(self.flops.values()) / seconds
        if self._at_peak is not None:
            record["flops_utilisation"] = self._at_peak / self._ranks / seconds
        record["memory_bytes"], record["peak_memory_bytes"] = memory_bytes(self.local.rank.device)
        record["rank"] = self.rank
        return record

    def close(self, wait: bool = True) -> None:
        """Write the remaining records. Raises RunError if one could not be written."""
        if self._trace_left:
            self._profiler.stop()
            self.local.executor.kinds, self._trace_left = self._kinds, 0
        if self._signal is not None:
            signal.signal(self._signal, self._before_signal)
            self._signal = None
        self._waiting.end()
        self._records.put(None)
        self._thread.join(timeout=None if wait else 5.0)
        for writer in self._writers:
            writer.close()
        self._writers = []
        if self._failed is not None and wait:
            raise RunError("metrics cannot be written", why=str(self._failed)) from self._failed


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """Bytes in use and at the peak: of torch's allocator on a GPU, of the process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    except OSError:
        return peak, peak
    return min(pages * resource.getpagesize(), peak), peak


def _check_given(**given: Any) -> None:
    """Raise RunError for paths and numbers that are none."""
    for name, value in given.items():
        place = name in ("path", "tensorboard")
        fits = isinstance(value, str | Path) if place else is_whole(value)
        if value is not None and not (fits and (place or value >= 0)):
            raise RunError(
                f"{name}={value!r}",
                why=f"it is {a_type(value)}; a {'path' if place else 'whole number'} is expected",
                hint=HINTS[name],
            )


def _check_number(name: str, value: Any) -> None:
    one = value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, int | float | str)
    if not one:
        shown = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
        raise RunError(
            f"{name}= is {a_type(value)} {shown}".rstrip(),
            why="a record has numbers, strings and tensors of one element",
            hint=f"metrics(loss, {name}={name}.mean())" if shown else f"metrics(loss, {name}=float({name}))",
        )
