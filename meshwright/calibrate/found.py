"""From rows of times to a cluster, and to lines for a reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.calibrate import fit
from meshwright.calibrate.operators import TABLE
from meshwright.calibrate.plan import KINDS, Found, Point
from meshwright.calibrate.quiet import LIMIT
from meshwright.cost.cluster import Cluster
from meshwright.cost.local import LINK_BYTES_PER_S, LINK_LATENCY_SECONDS
from meshwright.cost.parts import Curve, Device, Level, Measured

LEVEL = "rank"  # all ranks of one machine are neighbours: one level


@dataclass(frozen=True)
class Calibration:
    """What a run found: the cluster, and a line for each row (name, fit, error, quiet)."""

    cluster: Cluster
    lines: tuple[tuple[str, str, str, str], ...]
    note: str

    @property
    def void(self) -> tuple[str, ...]:
        """Rows measured while the machine was not quiet."""
        return self.cluster.measured.void


def calibration(machine: Mapping[str, Any], rows: Sequence[Found]) -> Calibration:
    """The cluster that a machine is, by what was measured on it."""
    points = {row.name: row.points for row in rows}
    launch = points["launch"][0].seconds
    curves = {name: _curve(name, found, launch) for name, found in points.items() if _is_curve(name)}
    growth, links = (
        fit.links({k: points[k] for k in KINDS if k in points}) if KINDS[0] in points else ("ring", {})
    )
    slow = points.get("slowdown", ())
    measured = Measured(
        rates=curves,
        collectives={LEVEL: {k: (_short(v.latency_seconds), _short(v.bytes_per_s)) for k, v in links.items()}}
        if links
        else {},
        slowdown={name: _short(p.seconds) for name, p in zip(("compute", "collective"), slow, strict=False)},
        void=tuple(row.name for row in rows if row.unrest > LIMIT),
    )
    first = links.get("all_reduce")
    level = Level(
        LEVEL,
        machine["ranks"],
        _short(first.bytes_per_s) if first else LINK_BYTES_PER_S,
        _short(first.latency_seconds) if first else LINK_LATENCY_SECONDS,
    )
    device = Device(
        name=machine["device"],
        flops={
            name.split()[1]: max(rate for _, rate in found)
            for name, found in curves.items()
            if name.startswith("matmul")
        },
        memory_bytes=machine["memory_bytes"],
        memory_bytes_per_s=curves["memory"][-1][1],
        launch_seconds=_short(launch),
    )
    host = points.get("host", ())
    cluster = Cluster(
        name=f"calibrated, {count(machine['ranks'], 'rank')}",
        device=device,
        levels=(level,),
        host_memory_bytes=machine["host_memory_bytes"] if host else 0,
        host_bytes_per_s=_short(host[-1].work / host[-1].seconds) if host else 0.0,
        measured=measured,
        growth=growth,
    )
    cluster, misses = _corrected(cluster, rows)
    lines = tuple((row.name, *_line(row, curves, links, misses), _quiet(row)) for row in rows)
    return Calibration(cluster, lines, _note(machine))


def _is_curve(name: str) -> bool:
    return name.partition(" ")[0] in TABLE and name not in ("launch", "host")


def _curve(name: str, points: Sequence[Point], launch: float) -> Curve:
    return fit.curve(points, launch, TABLE[name.partition(" ")[0]][1])


def _corrected(cluster: Cluster, rows: Sequence[Found]) -> tuple[Cluster, dict[str, tuple[float, float]]]:
    """The cluster with a factor for each class, from the whole steps (the quiet ones, if any was), and for each step
    the predicted seconds before and after."""
    whole = [row for row in rows if "works" in row.about]
    if not whole:
        return cluster, {}
    parts = {row.name: fit.predicted(row.about, cluster.device, cluster.measured) for row in whole}
    quiet = [row for row in whole if row.unrest <= LIMIT] or whole
    factors = fit.corrections([parts[row.name] for row in quiet], [row.points[0].seconds for row in quiet])
    after = {
        name: sum(s * factors.get(kind, 1.0) for kind, s in part.items()) for name, part in parts.items()
    }
    measured = replace(cluster.measured, corrections=factors)
    return replace(cluster, measured=measured), {
        name: (sum(parts[name].values()), after[name]) for name in parts
    }


def _line(
    row: Found,
    curves: Mapping[str, Curve],
    links: Mapping[str, fit.Link],
    steps_seconds: Mapping[str, tuple[float, float]],
) -> tuple[str, str]:
    """The fit and its error, for a reader."""
    if row.name in steps_seconds:
        found, (before, after) = row.points[0].seconds, steps_seconds[row.name]
        shown = f"{found * 1e3:.1f} ms; predicted {before * 1e3:.1f}, corrected {after * 1e3:.1f}"
        return shown, f"{after / found - 1:+.0%}"
    if row.name in curves:
        unit = "B" if row.name in ("memory", "update") else "FLOP"
        (low_work, low), (high_work, high) = curves[row.name][0], curves[row.name][-1]
        return (
            f"{si(low)}{unit}/s at {si(low_work)}{unit} … {si(high)}{unit}/s at {si(high_work)}{unit}",
            "curve",
        )
    if row.name in links:
        found = links[row.name]
        return (
            f"{found.latency_seconds * 1e6:.0f} µs a round, {si(found.bytes_per_s)}B/s",
            f"{found.error:.0%}",
        )
    if row.name == "slowdown":
        return f"computing × {row.points[0].seconds:.2f}, collective × {row.points[1].seconds:.2f}", ""
    if row.name == "launch":
        return f"{row.points[0].seconds * 1e6:.1f} µs an operator", ""
    return f"{si(row.points[-1].work / row.points[-1].seconds)}B/s", ""


def _quiet(row: Found) -> str:
    again = f", measured {row.attempts} times" if row.attempts > 1 else ""
    return ("yes" if row.unrest <= LIMIT else f"no: void ({row.unrest:.2f})") + again


def _note(machine: Mapping[str, Any]) -> str:
    return (
        f"Measured by meshwright calibrate, {count(machine['ranks'], 'rank')} at once: {machine['device']},\n"
        f"{count(machine['threads'], 'thread')} a rank, torch {machine['torch']}, {machine['backend']}."
    )


def count(number: int, thing: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def si(value: float) -> str:
    """Three digits and a prefix: ``12.3 G``."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5:
            return f"{value:.3g} {prefix}"
        value /= 1000
    return f"{value:.3g} P"


def _short(value: float) -> float:
    return float(f"{value:.4g}")
