"""What is measured on a device: its rates, our step over a hand-written one, and what was predicted of ours."""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import meshwright as mw
from bench.gpu_checks import Found, Part, Place, Skip
from bench.steps import Case, Step, adamw
from meshwright.calibrate.step_rows import describe_step, priced
from meshwright.compile import captured_of, lower
from meshwright.examples import mlp
from meshwright.predict.memory.step import ADAMW_FUSED, peak

Built = tuple[torch.nn.Module, dict[str, torch.Tensor], Callable[[Any, Any], torch.Tensor]]
WARM_UP = 3
FAIR = 1e-3  # relative: losses of two contenders that are further apart are no comparison
OURS: dict[str, Any] = {"mesh": 1, "mode": "stand_alone"}
LARGE = (Case("GPT", 1024, 6, 1024, 4, 32768), Case("Llama", 1024, 6, 1024, 4, 32768))
SMALL = (Case("GPT", 128, 2, 32, 2), Case("Llama", 128, 2, 32, 2))


def parts_of(name: str, place: Place) -> Iterator[Part]:
    """The parts of a check."""
    if name == "calibration":
        yield "rates of one rank", lambda: _calibrated(place)
        return
    measure = _speed if name == "speed" else _predicted
    for title, build in _models(place).items():
        yield title, lambda build=build: measure(place, build)


def _models(place: Place) -> dict[str, Callable[[], Built]]:
    """Three, on the device, the same weights at each call."""

    def moved(model: torch.nn.Module, batch: dict[str, torch.Tensor], loss: Any) -> Built:
        return model.to(place.device), {k: v.to(place.device) for k, v in batch.items()}, loss

    def language(case: Case) -> Built:
        model, batches, loss = case.build()
        return moved(model, batches[0], loss)

    wide = 64 if place.small else 2048
    found: dict[str, Callable[[], Built]] = {
        str(case): lambda case=case: language(case) for case in (SMALL if place.small else LARGE)
    }
    found[f"MLP {wide} × 6, batch {2 * wide}"] = lambda: moved(
        *mlp.build(batch=2 * wide, features=wide, hidden=wide, classes=wide, depth=3)
    )
    return found


def _ours(build: Callable[[], Built]) -> Step:
    model, batch, loss = build()
    step = mw.train_step(model, adamw, batch, loss=loss, **OURS)
    return lambda: step(batch)


def _theirs(build: Callable[[], Built]) -> Step:
    """The same by hand."""
    model, batch, loss = build()
    optimizer = adamw(model.parameters())

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        return value.detach()

    return step


def _seconds(place: Place, step: Step) -> float:
    """Of one step, until the device has ended it."""
    gc.collect()
    place.settle()
    began = time.perf_counter()
    step()
    place.settle()
    return time.perf_counter() - began


def _speed(place: Place, build: Callable[[], Built]) -> Found:
    """Both in turn, in alternating order; the ratio is taken within a round."""
    pair = {"ours": _ours(build), "eager": _theirs(build)}
    for _ in range(WARM_UP):
        ours, eager = (step().item() for step in pair.values())
        if not abs(ours - eager) <= FAIR * abs(eager):
            raise AssertionError(f"the two compute different things: losses {ours} and {eager}")
    taken: dict[str, list[float]] = {name: [] for name in pair}
    for number in range(5 if place.small else 21):
        for name in pair if number % 2 == 0 else reversed(pair):
            taken[name].append(_seconds(place, pair[name]))
    pair.clear()
    ratios = [a / b for a, b in zip(taken["ours"], taken["eager"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    ours_s, eager_s = (statistics.median(t) for t in taken.values())
    ours_bytes, eager_bytes = (place.peak_bytes(lambda m=make: m(build)) for make in (_ours, _theirs))
    shown = f"{middle:.3f} ({low:.3f} – {high:.3f}): {ours_s * 1e3:.2f} ms over {eager_s * 1e3:.2f} ms"
    shown += (
        f"; peak {ours_bytes / eager_bytes:.2f}: {ours_bytes / 1e6:.1f} MB over {eager_bytes / 1e6:.1f} MB"
    )
    data = {**taken, "ratio": [low, middle, high], "ours_bytes": ours_bytes, "eager_bytes": eager_bytes}
    return shown, data


# ---------------------------------------------------------------- calibrated and predicted


def _calibrated(place: Place) -> Found:
    file = place.out / "cluster.yaml"
    command = [sys.executable, "-m", "meshwright.cli", "calibrate", "--nproc", "1", "-o", str(file)]
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


def _predicted(place: Place, build: Callable[[], Built]) -> Found:
    """A step's seconds and its peak of bytes, predicted for the cluster that was calibrated, and measured."""
    file = place.out / "cluster.yaml"
    if not file.exists():
        raise Skip("needs the calibration")
    cluster = mw.Cluster.load(file)
    model, batch, loss = build()
    plan = mw.plan(model, batch, loss=loss, **OURS)
    parts = lower(captured_of(model, batch, loss), plan)
    del model
    seconds = priced(describe_step(parts, cluster), cluster).seconds()
    size = peak(parts, 0, optimizer=ADAMW_FUSED, device=place.kind).bytes
    step = _ours(build)
    for _ in range(WARM_UP):
        step()
    took = statistics.median(_seconds(place, step) for _ in range(5 if place.small else 15))
    del step
    held = place.peak_bytes(lambda: _ours(build))
    shown = f"step {seconds * 1e3:.2f} ms, measured {took * 1e3:.2f} ms ({seconds / took:.2f}); "
    shown += f"peak {size / 1e6:.1f} MB, measured {held / 1e6:.1f} MB ({size / held:.3f})"
    data = {"predicted_s": seconds, "measured_s": took, "predicted_bytes": size, "measured_bytes": held}
    return shown, data


__all__ = ["parts_of"]
