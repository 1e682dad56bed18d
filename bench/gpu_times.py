"""What is measured on a device: its rates, our step beside hand-written ones, and beside what was predicted of it."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

import meshwright as mw
from bench.gpu_checks import Found, Part, Place
from bench.gpu_fair import TWIN, Recorded, compare, exact, nudge
from bench.gpu_programs import PROGRAMS, Program
from bench.models import CONFIGS, built_from
from bench.one_rank import MEGATRON, narrow, run, show
from bench.steps import Step, adamw
from meshwright.calibrate.calls import with_calls
from meshwright.calibrate.step_rows import describe_step, priced
from meshwright.capture import Captured
from meshwright.compile import captured_of, lower, plan_captured
from meshwright.core.techniques import techniques_from
from meshwright.partition import Partition
from meshwright.planning.search_request import request_for
from meshwright.predict.memory.step import ADAMW_FUSED, peak
from meshwright.predict.step_time import step_times

WARM_UP = 3
ROUNDS_SECONDS = 1.0  # over a step of the slowest contender: how many rounds are measured
OURS, EAGER, COMPILED, BOTH = "ours", "eager", "torch.compile", "ours, compiled"


def parts_of(name: str, place: Place) -> Iterator[Part]:
    """The parts of a check."""
    if name == "calibration":
        yield "rates of one rank", lambda: _calibrated(place)
        return
    if name == "one rank":
        yield "rank 0 of 64, Llama-8B, 8 × 8", lambda: _one_of_many(place)
        return
    for title, program in PROGRAMS.items():
        yield title, functools.partial(_measured, place, title, program)


def _ours(place: Place, program: Program, compiled: bool = False) -> Step:
    model, batch, loss = program.build(place)
    asked = {"mesh": 1, "mode": "stand_alone", "compile": compiled, **program.techniques}
    step = mw.train_step(model, adamw, batch, loss=loss, **asked)
    return lambda: step(batch)


def _theirs(place: Place, program: Program, compiled: bool = False, nudged: bool = False) -> Step:
    """The same by hand."""
    model, batch, loss = program.build(place)
    if nudged:
        nudge(model)
    optimizer = adamw(model.parameters())
    forward = torch.compile(loss) if compiled else loss

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        value = forward(model, batch)
        value.backward()
        optimizer.step()
        return value.detach()

    return step


@dataclass(frozen=True)
class Times:
    """Of a step, of each contender: seconds by round."""

    taken: Mapping[str, list[float]]

    def median(self, name: str) -> float:
        """Of a contender, in seconds."""
        return statistics.median(self.taken[name])

    def ratio(self, name: str, ours: str = OURS) -> list[float]:
        """Quartiles of our time over another's, taken within rounds."""
        pairs = zip(self.taken[ours], self.taken[name], strict=True)
        return statistics.quantiles([a / b for a, b in pairs], n=4)


def _measured(place: Place, title: str, program: Program) -> Found:
    """Our step: its seconds beside those of hand-written peers and predicted ones, and its peak of bytes."""
    predicted = _predicted(place, title, program)
    contenders: dict[str, Callable[[], Step]] = {OURS: lambda: _ours(place, program)}
    if not program.techniques:
        contenders[EAGER] = lambda: _theirs(place, program)
    if program.compiled and place.cuda:
        contenders[COMPILED] = lambda: _theirs(place, program, compiled=True)
        contenders[BOTH] = lambda: _ours(place, program, compiled=True)
    steps, sizes, rounded = dict[str, Recorded](), dict[str, int](), 0
    for name, make in contenders.items():
        made, sizes[name] = place.with_peak(lambda make=make: Recorded(make()))
        assert isinstance(made, Recorded)
        steps[name] = made
        rounded = place.rounded_bytes() if name == OURS else rounded
    spread = _alike(place, program, steps)
    times = _times(place, steps)
    ours_s, ours_bytes = times.median(OURS), sizes[OURS]
    shown = [f"step {ours_s * 1e3:.2f} ms"]
    if predicted is not None:
        shown[0] += f", predicted {_beside(predicted['seconds'], ours_s)}"
        shown[0] += f", from its own operators {_beside(predicted['by_calls'], ours_s)}"
        shown += [f"peak {ours_bytes / 1e6:.1f} MB, predicted ({predicted['bytes'] / ours_bytes:.3f})"]
    if rounded > 0.001 * ours_bytes:
        shown += [f"{rounded / 1e6:.1f} MB of them are blocks that the allocator rounds up"]
    if EAGER in contenders:
        shown += [f"{_quartiles(times.ratio(EAGER))} of eager's"]
    if BOTH in contenders:
        took = times.median(BOTH) * 1e3
        shown += [f"compiled {took:.2f} ms, {_quartiles(times.ratio(COMPILED, BOTH))} of {COMPILED}'s"]
    if EAGER in sizes:
        shown += [f"peak {ours_bytes / sizes[EAGER]:.3f} of eager's"]
    if spread:
        shown += [f"losses agree in full float32 (eager runs that start one rounding apart: {spread:.1g})"]
    data = {"taken": dict(times.taken), "bytes": sizes, "predicted": predicted, "spread": spread}
    data["rounded_bytes"] = rounded
    return "; ".join(shown), data


def _beside(seconds: float, measured: float) -> str:
    return f"{seconds * 1e3:.2f} ({seconds / measured:.3f})"


def _quartiles(found: list[float]) -> str:
    low, middle, high = found
    return f"{middle:.3f} ({low:.3f} – {high:.3f})"


def _alike(place: Place, program: Program, steps: Mapping[str, Recorded]) -> float:
    """Warm up all, and compare their losses from the first on; the spread of eager runs, where it was needed."""
    for _ in range(WARM_UP):
        for step in steps.values():
            step()

    def again(count: int) -> dict[str, list[float]]:
        makes: dict[str, Callable[[], Step]] = {
            OURS: lambda: _ours(place, program),
            EAGER: lambda: _theirs(place, program),
            TWIN: lambda: _theirs(place, program, nudged=True),
        }
        found = dict[str, list[float]]()
        with exact():
            for name, make in makes.items():
                step = make()
                found[name] = [step().item() for _ in range(count)]
        return found

    return compare({name: step.stop() for name, step in steps.items()}, OURS, program.dtype, again)


def _times(place: Place, steps: Mapping[str, Step]) -> Times:
    """All in turn, in alternating order."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    with collected():
        once = max(_seconds(place, step) for step in steps.values())
        rounds = 5 if place.small else max(7, min(15, int(ROUNDS_SECONDS / once)))
        for number in range(rounds):
            for name in steps if number % 2 == 0 else reversed([*steps]):
                taken[name].append(_seconds(place, steps[name]))
    return Times(taken)


@contextlib.contextmanager
def collected() -> Iterator[None]:
    """No garbage is collected meanwhile."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _seconds(place: Place, step: Step) -> float:
    """Of one step, until the device has ended it; on a CUDA device of one among several, as in a loop of training."""
    place.settle()
    steps = 3 if place.cuda else 1
    began = time.perf_counter()
    for _ in range(steps):
        step()
    place.settle()
    return (time.perf_counter() - began) / steps


# ---------------------------------------------------------------- calibrated and predicted


def _calibrated(place: Place) -> Found:
    file = place.out / "cluster.yaml"
    command = [sys.executable, "-m", "meshwright.cli", "calibrate", "--nproc", "1", "-o", str(file)]
    command += ["--rows", str(place.out / "rows.jsonl")]
    ended = subprocess.run(
        [*command, *(["--quick"] if place.small else [])], capture_output=True, text=True, check=False
    )
    print(ended.stdout, ended.stderr)
    if ended.returncode:
        raise RuntimeError(ended.stderr or ended.stdout)
    cluster = mw.Cluster.load(file)
    device = cluster.device
    if cluster.device_type != place.kind:
        raise AssertionError(f"a cluster of type {cluster.device_type} was measured")
    rates = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in device.flops.items())
    lines = [line for line in ended.stdout.splitlines() if line.startswith(("void", "left out"))]
    return "; ".join([device.name, rates, *lines]), {"flops_per_s": dict(device.flops), "notes": lines}


def _predicted(place: Place, title: str, program: Program) -> dict[str, Any] | None:
    """Seconds and peak bytes of our step for the cluster that was calibrated, or None without it. What the step
    consists of is left in ``steps.jsonl``, to be priced again."""
    file = place.out / "cluster.yaml"
    if not file.exists():
        return None
    cluster = mw.Cluster.load(file)
    model, batch, loss = program.build(place)
    captured = captured_of(model, batch, loss)
    asked = techniques_from(program.techniques)
    plan = plan_captured(captured, 1, "stand_alone", None, request_for(cluster), asked)
    parts = lower(captured, plan)
    about = describe_step(parts, cluster)
    with (place.out / "steps.jsonl").open("a", encoding="utf-8") as steps:
        steps.write(json.dumps({"program": title, **about}) + "\n")
    size = peak(parts, 0, optimizer=ADAMW_FUSED, device=place.kind).bytes
    seconds = {
        name: step_times(parts, known).step_seconds
        for name, known in {"seconds": cluster, "by_calls": _with_calls(place, title, cluster, parts)}.items()
    }
    return {**seconds, "bytes": size}


def _with_calls(place: Place, title: str, cluster: mw.Cluster, parts: Partition) -> mw.Cluster:
    """The cluster with the seconds of the program's own operators, which are left in ``calls.jsonl``."""
    began = time.perf_counter()
    found = with_calls(cluster, parts, place.device)
    took = time.perf_counter() - began
    with (place.out / "calls.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"program": title, "took": took, "calls": found.measured.calls}) + "\n")
    return found


# ---------------------------------------------------------------- one rank of many


def _one_of_many(place: Place) -> Found:
    """One rank of a plan for 64, with a communicator that only counts: its peak, what it computes, what it sends."""
    published = {**CONFIGS["Llama-8B bf16"], "num_hidden_layers": 2 if place.small else 8}
    config = narrow(published, 32 if place.small else 1)
    rows, tokens = (64, 16) if place.small else (64, 4096)
    captured, batch = _captured(config, rows, tokens)
    cluster, file = mw.Cluster.preset("h100", nodes=8), place.out / "cluster.yaml"
    if file.exists():
        known = mw.Cluster.load(file)
        host = {"host_bytes_per_s": known.host_bytes_per_s, "host_memory_bytes": known.host_memory_bytes}
        cluster = replace(cluster, device=known.device, measured=known.measured, **host)
    asked = techniques_from({"optimizer_parallel": 1})
    mesh = {"dp": 8, "tp": 8}
    plan = plan_captured(captured, mesh, "sharding_propagation", MEGATRON, request_for(cluster), asked)
    parts, taken = lower(captured, plan), list[float]()

    def most_bytes(make: Callable[[], Step]) -> int:
        def timed() -> Callable[[], None]:
            step = make()
            return lambda: taken.append(_seconds(place, step))

        return place.peak_bytes(timed)

    ran = run(parts, captured, batch, 0, place.device, most_bytes)
    if ran.sent != ran.expected:
        raise AssertionError("what was sent is not what was predicted: " + "; ".join(show(ran)))
    about = describe_step(parts, cluster)
    alone = {**about, "tasks": [{k: v for k, v in task.items() if k != "send"} for task in about["tasks"]]}
    seconds, took = priced(alone, cluster).seconds(), min(taken)
    by_calls = None  # of a cluster that was not calibrated
    if file.exists():
        by_calls = priced(alone, _with_calls(place, "rank 0 of 64", cluster, parts)).seconds()
    shown = f"{sum(ran.sent.values())} collectives, each as predicted; "
    shown += f"peak {ran.peak_bytes / 1e6:.1f} MB, predicted ({ran.expected_bytes / ran.peak_bytes:.3f}); "
    shown += f"computes {took * 1e3:.1f} ms, predicted {_beside(seconds, took)}"
    shown += f", from its own operators {_beside(by_calls, took)}" if by_calls is not None else ""
    data = {
        "peak_bytes": ran.peak_bytes,
        "expected_bytes": ran.expected_bytes,
        "taken": taken,
        "seconds": seconds,
        "by_calls": by_calls,
    }
    return shown, data


def _captured(config: Mapping[str, Any], rows: int, tokens: int) -> tuple[Captured, Any]:
    model, batch, loss = built_from(config, rows, tokens)
    return captured_of(model, batch, loss), batch


__all__ = ["parts_of"]
