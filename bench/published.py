"""Predictions against what others have published: each run becomes a plan that is predicted, not searched.

python -m bench published [--rows FILE] [--device a100 h100] [--source torchtitan] [--execution eager] [--left-out]

The rows are those of `published_runs.jsonl`, or of any file of that form. A plan has the run's mesh, Megatron's pins,
the ZeRO level, schedule, micro-batches and recompute; what a plan cannot express is skipped, with the reason. The
cluster is the device's preset with the execution of the run's software (`meshwright/cost/execution.py`). Errors are
predicted over measured seconds of a step; runs of a rank group that differ by more than 2 % are a pair to order.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec.structs import asdict
from rich.console import Console

from bench.published_fit import Slopes, left_out, slopes
from bench.published_plan import STATES, Skipped, accumulated_bytes, cluster_of, execution_of, partition_of
from bench.published_rows import RUNS, Run, read
from meshwright.cost.execution import EXECUTIONS
from meshwright.errors import MeshwrightError
from meshwright.report.estimate import estimate

TIE = 0.02  # two runs closer than this are not a pair to order
TIERS = ("A", "B")
console = Console(width=max(150, Console().width), highlight=False)


@dataclass(frozen=True)
class Outcome:
    """A run beside its prediction; `skipped` says why there is none."""

    run: Run
    step_seconds: float | None = None
    peak_bytes: float | None = None
    limit_bytes: float | None = None
    skipped: str = ""
    slopes: Slopes | None = None

    @property
    def error(self) -> float | None:
        """Predicted over measured seconds, less one."""
        measured = self.run.step_seconds
        return self.step_seconds / measured - 1 if self.step_seconds and measured else None

    @property
    def memory_error(self) -> float | None:
        """Predicted over published bytes, less one."""
        measured = self.run.memory_bytes
        return self.peak_bytes / measured - 1 if self.peak_bytes and measured else None

    @property
    def fits(self) -> bool | None:
        """Whether the prediction fits into the device."""
        return (
            None
            if self.peak_bytes is None or self.limit_bytes is None
            else self.peak_bytes <= self.limit_bytes
        )

    def rate(self, seconds: float | None) -> float:
        """Tokens per second and device at so many seconds a step."""
        return (self.run.gbs_seqs or 0) * self.run.seq / self.run.n_gpus / seconds if seconds else 0.0


def predicted(run: Run, execution: str | None = None, sloping: bool = False) -> Outcome:
    """The prediction of a run, or why there is none.

    `execution`: by default that of the run's software. `sloping`: also the seconds of each class of work.
    """
    how = execution_of(run) if execution is None else execution
    if run.tier not in TIERS:
        return Outcome(run, skipped=f"tier {run.tier}")
    try:
        parts = partition_of(run)
        cluster = cluster_of(run, how)
        found = estimate(parts, cluster, STATES)
    except Skipped as reason:
        return Outcome(run, skipped=str(reason))
    except MeshwrightError as error:
        return Outcome(run, skipped=f"{type(error).__name__}: {error.what}")
    peak = found.peak_bytes + accumulated_bytes(run, parts)
    seconds = run.step_seconds
    slope = slopes(run, how, parts, cluster, seconds) if sloping and how and seconds else None
    return Outcome(run, found.step_seconds, peak, cluster.device.memory_bytes, slopes=slope)


def without_their_sources(found: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes with steps predicted by constants that were fitted to all sources but their own."""
    known = [(one, one.slopes) for one in found if one.slopes is not None]
    errors = left_out([slope for _, slope in known])
    return [
        replace(one, step_seconds=(1 + error) * slope.measured)
        for (one, slope), error in zip(known, errors, strict=True)
    ]


# ---------------------------------------------------------------- tables

HEADINGS = (
    "run", "source", "device", "model", "tokens", "dp·tp·pp", "measured s", "predicted s", "tokens/s", "predicted",
    "error", "GB", "predicted GB",
)  # fmt: skip


def line_of(one: Outcome) -> list[str]:
    """The cells of a run that has a prediction."""
    run, error = one.run, one.error
    memory = (
        "out of memory" if run.out_of_memory else f"{run.memory_bytes / 1e9:.1f}" if run.memory_bytes else ""
    )
    return [
        run.id, run.source.title[:28], f"{run.n_gpus} {run.device.split(' ')[0]}", run.model.name[:20],
        f"{run.gbs_seqs} × {run.seq}", f"{run.dp}·{run.tp or 1}·{run.pp or 1}",
        f"{run.step_seconds:.3f}" if run.step_seconds else "", f"{one.step_seconds:.3f}",
        f"{one.rate(run.step_seconds):,.0f}" if run.step_seconds else "", f"{one.rate(one.step_seconds):,.0f}",
        "" if error is None else f"{error:+.1%}", memory, f"{(one.peak_bytes or 0) / 1e9:.1f}",
    ]  # fmt: skip


SUMMARY = ("", "runs", "mean error", "mean |error|", "worst", "pairs in order", "memory |error|")


def summary(found: Sequence[Outcome]) -> list[list[str]]:
    """Errors in all, and by device, framework and source."""
    lines = [_summed("all", found)]
    kinds: dict[str, Callable[[Run], str]] = {
        "device": lambda run: run.device,
        "framework": lambda run: run.framework,
        "source": lambda run: run.source.title,
    }
    for kind, key in kinds.items():
        for name in sorted({key(one.run) for one in found}):
            lines.append(_summed(f"{kind}: {name[:60]}", [one for one in found if key(one.run) == name]))
    return lines


def _summed(name: str, found: Sequence[Outcome]) -> list[str]:
    errors = [one.error for one in found if one.error is not None]
    memory = [abs(one.memory_error) for one in found if one.memory_error is not None]
    right, pairs = ordered(found)
    return [
        name, str(len(errors)),
        f"{statistics.fmean(errors):+.1%}" if errors else "",
        f"{statistics.fmean(map(abs, errors)):.1%}" if errors else "",
        f"{max(errors, key=abs):+.1%}" if errors else "",
        f"{right} of {pairs}" if pairs else "",
        f"{statistics.fmean(memory):.1%} of {len(memory)}" if memory else "",
    ]  # fmt: skip


def ordered(found: Iterable[Outcome]) -> tuple[int, int]:
    """How many pairs of a rank group the predictions order as measured, and of how many."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for one in found:
        if one.run.rank_group and one.error is not None:
            rates = one.rate(one.run.step_seconds), one.rate(one.step_seconds)
            groups.setdefault(one.run.rank_group, []).append(rates)
    pairs = [pair for group in groups.values() for pair in itertools.combinations(group, 2)]
    pairs = [(one, two) for one, two in pairs if abs(one[0] - two[0]) > TIE * max(one[0], two[0])]
    return sum((one[0] > two[0]) == (one[1] > two[1]) for one, two in pairs), len(pairs)


def fitting(found: Iterable[Outcome]) -> str:
    """How many runs that went out of memory are predicted to, and how many of those that fit."""
    known = [one for one in found if one.fits is not None]
    out = [one for one in known if one.run.out_of_memory]
    fit = [one for one in known if not one.run.out_of_memory]
    return (
        f"out of memory: {sum(not one.fits for one in out)} of {len(out)} predicted so; "
        f"fits: {sum(bool(one.fits) for one in fit)} of {len(fit)} predicted so"
    )


def as_data(one: Outcome) -> dict[str, Any]:
    """An outcome as plain data."""
    return {
        "id": one.run.id, "device": one.run.device, "framework": one.run.framework, "source": asdict(one.run.source),
        "measured_seconds": one.run.step_seconds, "predicted_seconds": one.step_seconds, "error": one.error,
        "measured_bytes": one.run.memory_bytes, "predicted_bytes": one.peak_bytes, "fits": one.fits,
        "out_of_memory": one.run.out_of_memory, "skipped": one.skipped,
    }  # fmt: skip


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m bench published",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=Path, default=RUNS, help="a file of runs, one JSON object a line")
    parser.add_argument("--device", nargs="*", default=[""], help="runs on devices with one of these words")
    parser.add_argument("--source", nargs="*", default=[""], help="runs of sources with one of these words")
    parser.add_argument(
        "--execution",
        choices=("", *EXECUTIONS),
        help="of all runs: eager, compiled, fused, or '' for the data sheets; by default as each source says",
    )
    parser.add_argument(
        "--left-out",
        action="store_true",
        help="also evaluate each source with constants fitted to the others",
    )
    parser.add_argument("--json", type=Path, help="also write the outcomes to this file")
    parser.add_argument("--markdown", action="store_true")
    return parser.parse_args(arguments)


def chosen(options: argparse.Namespace) -> list[Run]:
    """The runs of the file that are asked for, those of one model side by side."""

    def among(text: str, words: Sequence[str]) -> bool:
        return any(word.lower() in text.lower() for word in words)

    runs = [
        run
        for run in read(options.rows)
        if among(run.device, options.device) and among(run.source.title, options.source)
    ]
    return sorted(runs, key=lambda run: (run.model.name, run.seq, run.gbs_seqs or 0))


def main(arguments: list[str] | None = None) -> None:
    """Predict the runs one after the other, print each when it is done, then the summary."""
    from bench.search import show

    options = parsed(arguments)
    found: list[Outcome] = []
    for run in chosen(options):
        found.append(predicted(run, options.execution, options.left_out))
        one = found[-1]
        console.print(
            " | ".join(line_of(one)) if not one.skipped else f"[dim]{run.id} skipped: {one.skipped}[/]"
        )
        if options.json:  # after each row: a table of minutes may be interrupted
            options.json.write_text(json.dumps([as_data(o) for o in found], indent=1))
    known = [one for one in found if not one.skipped]
    skipped = Counter(one.skipped for one in found if one.skipped)
    if options.markdown:
        show(("Published runs", HEADINGS, [line_of(one) for one in known]), True)
    show(("Predicted against published steps", SUMMARY, summary(known)), options.markdown)
    if options.left_out:
        title = "The same, by constants fitted to all other sources"
        show((title, SUMMARY, summary(without_their_sources(known))), options.markdown)
    console.print(fitting(known))
    console.print(
        f"{sum(skipped.values())} skipped: " + "; ".join(f"{n} {why}" for why, n in skipped.most_common())
    )


__all__ = ["Outcome", "main", "ordered", "predicted", "summary"]
