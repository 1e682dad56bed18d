"""Constants of executions fitted to published steps, each source evaluated with constants from all the others.

The seconds of a step are sums and maxima of the seconds of its classes of work, so near a prediction they are linear in
a factor on each class (Euler). Factors are fitted to the logarithm of measured over predicted seconds, weighed so that
a source counts with the root of its runs, large errors linearly (Huber), and each factor held near what was published
for kernels and links alone (`START`), before any step was looked at.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.published_plan import STATES
from bench.published_rows import Run
from meshwright.cost.cluster import Cluster
from meshwright.cost.execution import EXECUTIONS, HIDDEN, LINKS, RATES, Execution
from meshwright.partition import Partition
from meshwright.predict.pipeline_step import predict
from meshwright.predict.step_time import step_times

NUDGE = 0.05  # of a factor, for a derivative
NOISE, LARGE = 0.12, 0.10  # spread of runs around a right prediction; errors beyond this count linearly
HELD = 0.2  # spread of a factor around its start, in logarithms
STEPS, DAMPING = 40, 0.7  # of Gauss and Newton
# Before any step was looked at: kernels and links alone, and a compiler that saves half of the pointwise traffic.
SUSTAINED = 1.15
START: Mapping[str, Execution] = {
    "eager": Execution(products=1.0, memory=1.0, launch=1.5, attention=1.0, waited=LINKS),
    "compiled": Execution(products=1.0, memory=0.5, launch=1.0, attention=1.0, waited=LINKS),
    "fused": Execution(products=1.0, memory=0.6, launch=1.0, attention=1.0, waited=LINKS),
}
CLASSES = {
    "matmul": "products",
    "attention": "attention",
    "memory": "memory",
    "launch": "launch",
    "waited": "waited",
}
OVERLAPPED = ("hidden", "hidden_rows")


@dataclass(frozen=True)
class Slopes:
    """A run's predicted seconds, and the seconds in them of each class of work."""

    source: str
    device: str
    execution: str
    measured: float
    predicted: float
    seconds: Mapping[str, float]


def slopes(run: Run, execution: str, parts: Partition, cluster: Cluster, measured: float) -> Slopes:
    """Nudge the factor of each class of work and predict again."""
    base = _seconds(parts, cluster)
    found: dict[str, float] = {}
    for name in (*CLASSES, *OVERLAPPED):
        factors = {**cluster.measured.corrections}
        factors[name] = factors.get(name, 1.0) * (1 + NUDGE)
        nudged = replace(cluster, measured=replace(cluster.measured, corrections=factors))
        found[name] = (_seconds(parts, nudged) - base) / NUDGE
    return Slopes(run.source.title, cluster.device.name, execution, measured, base, found)


def _seconds(parts: Partition, cluster: Cluster) -> float:
    if parts.plan.stages:
        return predict(parts, cluster, STATES).step_seconds
    return step_times(parts, cluster, STATES).step_seconds


def left_out(rows: Sequence[Slopes]) -> list[float]:
    """The error of each run, predicted with factors that were fitted to the runs of all other sources."""
    errors = [0.0] * len(rows)
    for source in {row.source for row in rows}:
        factors = fitted([row for row in rows if row.source != source])
        for number, row in enumerate(rows):
            if row.source == source:
                errors[number] = with_factors(row, factors) / row.measured - 1
    return errors


def with_factors(row: Slopes, factors: Mapping[str, float]) -> float:
    """The seconds of a run with factors; one that is not known is at its start."""
    seconds = row.predicted - math.fsum(row.seconds.values())
    for name, part in row.seconds.items():
        seconds += part * math.prod(factors.get(f, _start(f)) for f in _factors(row, name))
    return seconds


def fitted(rows: Sequence[Slopes]) -> dict[str, float]:
    """Factors on the constants of `meshwright.cost.execution`, by name, fitted to runs."""
    names = sorted({f for row in rows for name in row.seconds for f in _factors(row, name)})
    if not rows:
        return {}
    start = np.log([_start(name) for name in names])
    classes = (*CLASSES, *OVERLAPPED)
    parts = np.array([[row.seconds[c] for c in classes] for row in rows])
    rest = np.array([row.predicted for row in rows]) - parts.sum(1)
    uses = np.array([[[f in _factors(row, c) for f in names] for c in classes] for row in rows], float)
    goal = np.log([row.measured for row in rows])
    counts = Counter(row.source for row in rows)
    weight = np.array([counts[row.source] ** -0.5 for row in rows]) / NOISE**2
    logs = start.copy()
    for _ in range(STEPS):
        seconds = parts * np.exp(uses @ logs)
        total = np.maximum(seconds.sum(1) + rest, 1e-9)
        off = np.log(total) - goal
        robust = weight * np.minimum(1.0, LARGE / np.maximum(np.abs(off), 1e-9))
        slope = np.einsum("ij,ijk->ik", seconds, uses) / total[:, None]
        bend = slope.T @ (robust[:, None] * slope) + np.eye(len(names)) / HELD**2
        logs = logs - DAMPING * np.linalg.solve(bend, slope.T @ (robust * off) + (logs - start) / HELD**2)
    return dict(zip(names, map(float, np.exp(logs)), strict=True))


def _factors(row: Slopes, name: str) -> tuple[str, ...]:
    """The factors that the seconds of a class of work depend on."""
    if name in OVERLAPPED:
        return ("hidden",)
    mine = f"{CLASSES[name]} {row.execution}"
    return (mine, f"sustained {row.device}") if name == "matmul" and row.device in RATES else (mine,)


def _start(name: str) -> float:
    """Where a factor begins: what was published for kernels and links alone, over the constant of today."""
    kind, _, of = name.partition(" ")
    if kind == "hidden":
        return LINKS / HIDDEN
    if kind == "sustained":
        return SUSTAINED / RATES[of].sustained
    return getattr(START[of], kind) / getattr(EXECUTIONS[of], kind)


__all__ = ["Slopes", "fitted", "left_out", "slopes", "with_factors"]
