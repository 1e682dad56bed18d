"""Rows of `bench.predict` and what they add up to: errors, order of pairs, regret."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from meshwright.calibrate import fit
from meshwright.calibrate.quiet import LIMIT
from meshwright.calibrate.step_rows import Prediction

LEAST_QUIET = 5  # samples between quiet probes, for a row that counts
TUNED = "tuned"  # the way of plans that `tune=True` kept


@dataclass
class Row:
    """A plan of a model on so many ranks; `plans` are the ways that led to it. `samples`: seconds of the slowest rank,
    with the worse of the probes before and after. `fitted`: seconds predicted with factors from the other models.
    `tuned`: the plan that `tune=True` kept for the model, as text, where that was asked of this row."""

    model: str
    ranks: int
    plans: tuple[str, ...]
    text: str
    prediction: Prediction
    samples: list[tuple[float, float]] = field(default_factory=list)
    failed: str = ""
    fitted: float = math.nan
    predicted_bytes: int = 0
    measured_bytes: int = 0
    tuned: str = ""

    @property
    def label(self) -> str:
        """For readers."""
        return " = ".join(self.plans)

    @property
    def quiet_samples(self) -> list[float]:
        """Seconds between two quiet probes."""
        return [s for s, unrest in self.samples if unrest <= LIMIT]

    @property
    def quiet(self) -> bool:
        """Whether enough samples are."""
        return len(self.quiet_samples) >= LEAST_QUIET

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Of the measured seconds: those of quiet samples where there are enough."""
        used = self.quiet_samples if self.quiet else [s for s, _ in self.samples]
        if len(used) < 2:
            return math.nan, math.nan, math.nan
        low, middle, high = statistics.quantiles(used, n=4, method="inclusive")
        return low, middle, high

    @property
    def measured(self) -> float:
        """The median."""
        return self.quartiles[1]

    @property
    def calibrated(self) -> float:
        """Seconds predicted from the cluster file alone."""
        return self.prediction.seconds()

    @property
    def memory_error(self) -> float:
        """Predicted over measured bytes, less 1."""
        return self.predicted_bytes / self.measured_bytes - 1

    def data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "model": self.model,
            "ranks": self.ranks,
            "plans": self.plans,
            "predicted_s": self.calibrated,
            "predicted_left_out_s": self.fitted,
            "measured_s": self.measured,
            "quartiles_s": self.quartiles,
            "quiet": self.quiet,
            "samples": self.samples,
            "shares_s": self.prediction.shares(),
            "predicted_bytes": self.predicted_bytes,
            "measured_bytes": self.measured_bytes,
            "failed": self.failed,
        }


def fit_left_out(rows: Sequence[Row]) -> dict[int, dict[str, float]]:
    """Predict every model with factors from the quiet rows of the other models on as many ranks. What is returned, by
    ranks, are the factors from all of them, for readers."""
    everything: dict[int, dict[str, float]] = {}
    for ranks in sorted({r.ranks for r in rows}):
        here = [r for r in rows if r.ranks == ranks]
        for name in {r.model for r in here}:
            found = _factors(r for r in here if r.quiet and r.model != name)
            for row in here:
                if row.model == name and found:
                    row.fitted = row.prediction.seconds(found)
        everything[ranks] = _factors(r for r in here if r.quiet)
    return everything


def _factors(rows: Iterable[Row]) -> dict[str, float]:
    used = list(rows)
    return fit.corrected([r.prediction for r in used], [r.measured for r in used])


def errors(rows: Iterable[Row], predicted: str) -> list[float]:
    """Relative errors of ``calibrated`` or ``fitted``, of the quiet rows."""
    found = [getattr(r, predicted) / r.measured - 1 for r in rows if r.quiet]
    return [e for e in found if math.isfinite(e)]


def order(rows: Sequence[Row], predicted: str) -> tuple[int, int]:
    """Pairs of plans of one model and number of ranks whose measured difference is more than twice the larger of their
    interquartile ranges: how many are in the predicted order, and how many there are."""
    right = count = 0
    for a, b in itertools.combinations([r for r in rows if r.quiet], 2):
        if (a.model, a.ranks) != (b.model, b.ranks):
            continue
        spread = max(a.quartiles[2] - a.quartiles[0], b.quartiles[2] - b.quartiles[0])
        if abs(a.measured - b.measured) > 2 * spread:
            count += 1
            said = getattr(a, predicted) - getattr(b, predicted)
            right += said * (a.measured - b.measured) > 0  # a tie is no answer
    return right, count


@dataclass(frozen=True)
class Regret:
    """What `auto` picked, or what `tune=True` kept, against the best of all that were tried, measured in the same
    rounds. `way`: which of the two."""

    model: str
    ranks: int
    way: str
    picked: float
    best: float
    best_plan: str
    quiet: bool

    @property
    def ratio(self) -> float:
        """1 when nothing was better."""
        return self.picked / self.best


def regrets(rows: Sequence[Row], way: str = "auto") -> list[Regret]:
    """For each model and number of ranks. Where rows are not quiet, it says so."""
    found: list[Regret] = []
    for model, ranks in dict.fromkeys((r.model, r.ranks) for r in rows):
        here = [r for r in rows if (r.model, r.ranks) == (model, ranks) and math.isfinite(r.measured)]
        picked = next((r for r in here if way in r.plans), None)
        if picked is not None:
            best = min(here, key=lambda r: r.measured)
            quiet = picked.quiet and best.quiet
            found.append(Regret(model, ranks, way, picked.measured, best.measured, best.label, quiet))
    return found


# ---------------------------------------------------------------- tables


def time_table(rows: Sequence[Row]) -> Table:
    """A line for each pair."""
    shown = _table(
        "predicted and measured seconds of a step",
        "model",
        "ranks",
        "plan",
        "calibrated",
        "left out",
        "measured",
        "quartiles",
        "error",
        "left out",
        "quiet",
    )
    for row in rows:
        if row.failed or not row.samples:
            failed = row.failed or "not measured: no time was left"
            shown.add_row(row.model, str(row.ranks), row.label, *[""] * 6, Text(failed[:60], style="red"))
            continue
        low, middle, high = row.quartiles
        shown.add_row(
            row.model,
            str(row.ranks),
            row.label,
            ms(row.calibrated),
            ms(row.fitted),
            ms(middle),
            f"{ms(low)} – {ms(high)}",
            _error(row.calibrated / middle - 1),
            _error(row.fitted / middle - 1),
            f"{len(row.quiet_samples)} of {len(row.samples)}"
            if row.quiet
            else Text(f"no: {len(row.quiet_samples)} of {len(row.samples)}", style="yellow"),
        )
    return shown


def regret_table(found: Sequence[Regret]) -> Table:
    """A line for each model."""
    headings = ("model", "ranks", "plan", "its step", "best", "regret", "which was best", "quiet")
    shown = _table("the plan of auto, and what tune=True kept, against the best tried", *headings)
    for one in found:
        style = "green" if one.ratio <= 1.05 else "red"
        quiet = "yes" if one.quiet else Text("no", style="yellow")
        shown.add_row(
            one.model,
            str(one.ranks),
            one.way,
            ms(one.picked),
            ms(one.best),
            Text(f"{one.ratio:.2f}", style=style),
            one.best_plan,
            quiet,
        )
    return shown


def memory_table(rows: Sequence[Row]) -> Table:
    """A line for each pair."""
    shown = _table(
        "predicted and measured peak of live tensor bytes on rank 0",
        "model",
        "ranks",
        "plan",
        "predicted",
        "measured",
        "error",
    )
    for row in rows:
        measured = f"{row.measured_bytes / 1e6:.1f} MB" if row.measured_bytes else row.failed[:60] or "failed"
        error = _error(row.memory_error, 0.03) if row.measured_bytes else ""
        predicted = f"{row.predicted_bytes / 1e6:.1f} MB"
        shown.add_row(row.model, str(row.ranks), row.label, predicted, measured, error)
    return shown


def summary(rows: Sequence[Row]) -> list[str]:
    """What the rows of times add up to, a line for each number of ranks."""
    lines: list[str] = []
    for ranks in sorted({r.ranks for r in rows}):
        here = [r for r in rows if r.ranks == ranks]
        quiet = sum(r.quiet for r in here)
        said = [f"{ranks} ranks: {quiet} of {len(here)} pairs quiet"]
        for name, what in (("calibrated", "as calibrated"), ("fitted", "model left out")):
            missed, (right, count) = errors(here, name), order(here, name)
            if missed:
                worst = max(missed, key=abs)
                said.append(
                    f"{what}: mean error {statistics.fmean(map(abs, missed)):.1%}, worst {worst:+.0%}, "
                    f"mean signed {statistics.fmean(missed):+.1%}, order right in {right} of {count} separable pairs"
                )
        for way in ("auto", TUNED):
            found = [r.ratio for r in regrets(here, way)]
            if found:
                said.append(
                    f"regret of {way}: mean {statistics.fmean(found):.3f}, median {statistics.median(found):.2f}, "
                    f"worst {max(found):.2f}"
                )
        lines.append("; ".join(said))
    return lines


def memory_summary(rows: Sequence[Row]) -> str:
    """Mean and worst error of the peaks."""
    missed = [r.memory_error for r in rows if r.measured_bytes]
    if not missed:
        return "no peak was measured"
    return (
        f"{len(missed)} peaks: mean error {statistics.fmean(map(abs, missed)):.1%}, "
        f"worst over {max(missed):+.1%}, worst under {min(missed):+.1%}"
    )


def markdown(table: Table) -> str:
    """A table as text for a document."""
    cells = [[_plain(c) for c in column.cells] for column in table.columns]
    head = [_plain(column.header) for column in table.columns]
    rule = ["---:" if column.justify == "right" else "---" for column in table.columns]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *zip(*cells, strict=True)])


def ms(seconds: float) -> str:
    """Milliseconds."""
    return f"{seconds * 1e3:.0f} ms" if math.isfinite(seconds) else "–"


def _plain(cell: Any) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)


def _error(value: float, good: float = 0.08) -> Text:
    if not math.isfinite(value):
        return Text("–")
    size = abs(value)
    return Text(f"{value:+.1%}", style="green" if size <= good else "yellow" if size <= 2 * good else "red")


WORDS = ("model", "plan", "which was best")


def _table(title: str, *headings: str) -> Table:
    shown = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for heading in headings:
        shown.add_column(heading, justify="left" if heading in WORDS else "right", overflow="fold")
    return shown
