"""From rows of times to a cluster, and to lines for a reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from meshwright.calibrate import fit, host
from meshwright.calibrate.kernels import PREFIX
from meshwright.calibrate.models import EMPTY
from meshwright.calibrate.operators import TABLE
from meshwright.calibrate.plan import LEVEL, NODES, POST, SUFFIX, WAITED, MeasuredRow, Point
from meshwright.calibrate.quiet import LIMIT
from meshwright.calibrate.step_rows import priced
from meshwright.core.collectives import PRICED
from meshwright.cost.cluster import Cluster
from meshwright.cost.cluster_data import Curve, Device, Level, Measured
from meshwright.cost.local_machine import LINK_BYTES_PER_S, LINK_LATENCY_SECONDS
from meshwright.cost.machine import launches_of, seconds
from meshwright.cost.operators import Work

ENOUGH = 6  # quiet steps from which factors are found without others
NEAR = 1.25  # how much longer a probe takes beside a little of other work


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration: the cluster, and a line for each row (name, fit, error, quiet)."""

    cluster: Cluster
    lines: tuple[tuple[str, str, str, str], ...]
    note: str
    fit: str = ""  # the error of the cluster's predictions for full steps

    @property
    def void(self) -> tuple[str, ...]:
        """Rows measured while the machine was not quiet."""
        return self.cluster.measured.void


def calibration(machine: Mapping[str, Any], rows: Sequence[MeasuredRow]) -> Calibration:
    """The cluster that a machine is, by what was measured on it."""
    points = {row.name: row.points for row in rows}
    launch = points["launch"][0].seconds
    curves = {name: _curve(name, found, launch) for name, found in points.items() if _is_curve(name)}
    nodes = machine.get("nodes", 1)
    growth, links, waited = _links(points)
    slow = points.get("slowdown", ())
    measured = Measured(
        rates=curves,
        collectives=_by_level(links),
        waited=_by_level(waited),
        slowdown={name: _short(p.seconds) for name, p in zip(("compute", "collective"), slow, strict=False)},
        void=tuple(row.name for row in rows if row.unrest > LIMIT),
        post_seconds=_short(points[POST][0].seconds) if POST in points else 0.0,
    )
    issue = _short(points["issue"][0].seconds) if "issue" in points else 0.0
    sizes = {NODES: nodes, LEVEL: machine["ranks"] // nodes}
    sizes = {name: size for name, size in sizes.items() if size > 1} or {LEVEL: 1}
    levels = [_level(name, size, links) for name, size in sizes.items()]
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
        issue_seconds=issue,
    )
    issues = host.issues(points, issue)
    if issues and EMPTY in points:  # nearly all of it; a factor says the rest
        issues["step"] = max(_short(points[EMPTY][0].seconds / issue), 0.01), 0.01
    measured = replace(measured, operators=_operators(rows, device, measured), issues=issues)
    link = points.get("host", ())
    cluster = Cluster(
        name=f"calibrated, {count(machine['ranks'], 'rank')}",
        device=device,
        levels=tuple(levels),
        host_memory_bytes=machine["host_memory_bytes"] if link else 0,
        host_bytes_per_s=_short(link[-1].work / link[-1].seconds) if link else 0.0,
        measured=measured,
        growth=growth,
    )
    cluster, misses = _corrected(cluster, rows)
    lines = tuple((row.name, *_line(row, curves, {**links, **waited}, misses), _quiet(row)) for row in rows)
    return Calibration(cluster, lines, _note(machine), _fit(rows, misses, cluster.measured.corrections))


def _operators(
    rows: Sequence[MeasuredRow], device: Device, measured: Measured
) -> dict[str, tuple[float, float]]:
    """Of each operator that was measured by itself, its time over that of its bytes and FLOPs, forward and backward;
    launches are left out of both."""
    found: dict[str, tuple[float, float]] = {}
    for row in rows:
        if not row.name.startswith(PREFIX) or "work" not in row.about:
            continue
        work = Work(**row.about["work"])
        launches = launches_of(work, device)
        alone = replace(work, name="", launches_forward=0.0, launches_backward=0.0)
        halves = zip(row.points, launches, seconds(alone, device, measured), strict=True)
        forward, backward = (
            _factor(point.seconds - float(count) * device.launch_seconds, float(expected))
            for point, count, expected in halves
        )
        found[row.name.removeprefix(PREFIX)] = forward, backward
    return found


def _factor(seconds: float, expected: float) -> float:
    return _short(min(max(seconds / expected, 0.05), 100.0)) if expected > 0.0 else 1.0


def _links(
    points: Mapping[str, Sequence[Point]],
) -> tuple[str, dict[str, fit.Link], dict[str, fit.Link]]:
    """How rounds grow with the ranks, as those of the innermost level do; the fit of each row, alone and waited for."""
    growth, links, waited = "", dict[str, fit.Link](), dict[str, fit.Link]()
    for suffix in SUFFIX.values():
        rows = {kind: points[kind + suffix] for kind in PRICED if kind + suffix in points}
        if rows and not growth:
            growth, found = fit.links(rows)
        else:
            found = {kind: fit.link(kind, row, growth) for kind, row in rows.items()}
        links |= {kind + suffix: link for kind, link in found.items()}
        for name in (name for name in WAITED if name + suffix in points):
            waited[name + suffix] = fit.link(name.partition(" ")[0], points[name + suffix], growth)
    return growth or "ring", links, waited


def _level(name: str, size: int, links: Mapping[str, fit.Link]) -> Level:
    first = links.get("all_reduce" + SUFFIX[name])
    if first is None:
        return Level(name, size, LINK_BYTES_PER_S, LINK_LATENCY_SECONDS)
    return Level(name, size, _short(first.bytes_per_s), _short(first.latency_seconds))


def _by_level(links: Mapping[str, fit.Link]) -> dict[str, dict[str, tuple[float, float]]]:
    """Latencies and rates by kind, on each level that was measured."""
    rows: dict[str, dict[str, tuple[float, float]]] = {}
    for name, v in links.items():
        level = NODES if name.endswith(SUFFIX[NODES]) else LEVEL
        rows.setdefault(level, {})[name.partition(" ")[0]] = (
            _short(v.latency_seconds),
            _short(v.bytes_per_s),
        )
    return rows


def _is_curve(name: str) -> bool:
    return name.partition(" ")[0] in TABLE and name.partition(" ")[0] not in ("launch", "issue", "host")


def _curve(name: str, points: Sequence[Point], launch: float) -> Curve:
    return fit.curve(points, launch, TABLE[name.partition(" ")[0]][1])


def _corrected(
    cluster: Cluster, rows: Sequence[MeasuredRow]
) -> tuple[Cluster, dict[str, tuple[float, float]]]:
    """Fit a factor for each class to the usable full steps; return the cluster with them, and for each step the
    predicted seconds before and after."""
    whole = [row for row in rows if "tasks" in row.about]
    if not whole:
        return cluster, {}
    steps = {row.name: priced(row.about, cluster) for row in whole}
    usable = _usable(whole)
    factors = fit.corrected([steps[row.name] for row in usable], [row.points[0].seconds for row in usable])
    made = replace(cluster, measured=replace(cluster.measured, corrections=factors))
    return made, {row.name: (steps[row.name].seconds(), priced(row.about, made).seconds()) for row in whole}


def _usable(whole: Sequence[MeasuredRow]) -> Sequence[MeasuredRow]:
    """Select the full steps that ran undisturbed. If these are few, also those that were disturbed a little: that costs
    less than a class that occurs in none. If there are none of either, all."""
    quiet = [row for row in whole if row.unrest <= LIMIT]
    near = [row for row in whole if row.unrest <= NEAR]
    return quiet if len(quiet) >= ENOUGH else near or whole


def _fit(
    rows: Sequence[MeasuredRow],
    steps_seconds: Mapping[str, tuple[float, float]],
    factors: Mapping[str, float],
) -> str:
    """Describe the fit: the mean error of the usable full steps before and after the corrections, and the
    corrections."""
    usable = _usable([row for row in rows if row.name in steps_seconds])
    if not usable:
        return ""
    before, after = (
        fmean(abs(steps_seconds[row.name][n] / row.points[0].seconds - 1) for row in usable) for n in (0, 1)
    )
    said = ", ".join(f"{name} × {factor:.2f}" for name, factor in sorted(factors.items()))
    told = f"{count(len(usable), 'full step')}: mean error {before:.1%} without corrections, {after:.1%} with {said}"
    if ends := fit.at_the_end(factors):
        told += (
            f"\nbad fit: {', '.join(f'{factors[n]:.2f} of {n}' for n in ends)} is as far as a factor goes, and full "
            "steps ask for more: rows do not measure what steps do here, so do not trust the seconds of plans"
        )
    if all(row.unrest > NEAR for row in usable):
        told += "\nno full step was measured while the machine was quiet: the corrections are guesses, calibrate again"
    return told


def _line(
    row: MeasuredRow,
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
    if row.name.startswith(PREFIX):
        if reason := row.about.get("left out"):
            return str(reason), ""
        return " and ".join(f"{p.seconds * 1e6:.1f}" for p in row.points) + " µs forward and backward", ""
    if row.name.startswith(host.PREFIX):
        said = " to ".join(f"{p.seconds * 1e6:.1f}" for p in row.points)
        return f"{said} µs of the host, forward to forward and backward", ""
    if row.name == "slowdown":
        return f"computing × {row.points[0].seconds:.2f}, collective × {row.points[1].seconds:.2f}", ""
    if row.name == POST:
        return f"{row.points[0].seconds * 1e6:.1f} µs a message", ""
    if row.name in ("launch", "issue"):
        return f"{row.points[0].seconds * 1e6:.1f} µs an operator", ""
    return f"{si(row.points[-1].work / row.points[-1].seconds)}B/s", ""


def _quiet(row: MeasuredRow) -> str:
    again = f", measured {row.attempts} times" if row.attempts > 1 else ""
    return ("yes" if row.unrest <= LIMIT else f"no: void ({row.unrest:.2f})") + again


def _note(machine: Mapping[str, Any]) -> str:
    over = f" on {machine['nodes']} machines" if machine.get("nodes", 1) > 1 else ""
    return (
        f"Measured by meshwright calibrate, {count(machine['ranks'], 'rank')} at once{over}: {machine['device']},\n"
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
