"""What each technique costs and saves: a step with it beside the step without, on real ranks, and what was predicted.

    python -m bench techniques [--markdown] [--rounds N] [--only NAME]

All steps of a model run in turn, in one job; the ratio of times is taken within a round, the slowest rank counts. Bytes
are the most that live at once on rank 0, by the allocator's own events (`bench/memory.py`), held against the peak that
the planner predicts for the same program.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import meshwright as mw
from bench.memory import peak_bytes
from bench.ranks import on_ranks
from bench.steps import Case, Step, adamw, cycled, timed
from meshwright.partition.judged import peak_on

RANKS = 2
WARM_UP = 2
CASES = {"GPT": Case("GPT", 256, 12, 128, 8), "Llama": Case("Llama", 512, 4, 128, 8)}
DP: dict[str, Any] = {"mesh": {"dp": 2}, "mode": "data_parallel"}
TP: dict[str, Any] = {
    "mesh": {"tp": 2},
    "mode": "sharding_propagation",
    "pins": {
        "blocks.*.mlp.up": {"n": "tp"},
        "blocks.*.mlp.gate": {"n": "tp"},
        **{f"blocks.*.attention.{part}": {"n": "tp"} for part in "qkv"},
    },
}


@dataclass(frozen=True)
class Row:
    """A technique on a model: what is asked for, beside the plan that is asked for without it."""

    model: str
    base: str
    options: dict[str, Any]

    def __str__(self) -> str:
        return ", ".join(f"{k}={v!r}" for k, v in self.options.items()) or "nothing"


def rows() -> list[Row]:
    """Every technique alone, and some together."""
    alone: list[dict[str, Any]] = [
        {},
        {"optimizer_parallel": 1},
        {"optimizer_parallel": 2},
        {"optimizer_parallel": 3},
        {"micro_batches": 4},
        {"recompute": "full"},
        {"recompute": "selective"},
        {"fusion": 0},
        {"fusion": 1 << 20},
        {"offload": ("optimizer",)},
        {"offload": ("activations",)},
        {"offload": ("activations",), "recompute": "full"},
        {"offload": ("parameters", "optimizer")},
        {"reduce_dtype": "bf16"},
        {"interleave": 2},
        {"optimizer_parallel": 3, "recompute": "full", "micro_batches": 2},
        {"optimizer_parallel": 2, "micro_batches": 4, "gradient_accumulation_shard": True},
    ]
    across: list[dict[str, Any]] = [
        {},
        {"interleave": 2},
        {"recompute": "full"},
        {"recompute": "full", "recompute_communication": False},
        {"recompute": "full", "slice_activation": True},
    ]
    return [Row("GPT", "dp", o) for o in alone] + [Row("Llama", "tp", o) for o in across]


@dataclass(frozen=True)
class Found:
    """Seconds of each round, measured and predicted bytes of one row; why there are none, where it cannot be built."""

    row: str
    model: str
    seconds: list[float]
    measured_bytes: int
    predicted_bytes: int
    failed: str = ""


def measure(wanted: list[Row], rounds: int, threads: int) -> list[Found]:
    """All rows, in one job."""
    plain = [dataclasses.asdict(row) for row in wanted]
    return [Found(**f) for f in on_ranks(RANKS, threads, _measure, plain, rounds)]


def _measure(plain: list[dict[str, Any]], rounds: int) -> list[dict[str, Any]]:
    found: list[Found] = []
    wanted = [Row(**row) for row in plain]
    for name in dict.fromkeys(row.model for row in wanted):
        here = [row for row in wanted if row.model == name]
        steps: dict[int, Step] = {}
        failed: dict[int, str] = {}
        for number, row in enumerate(here):
            try:
                steps[number] = _built(row)[0]
            except (
                mw.MeshwrightError
            ) as error:  # refused alike on every rank, before any of them communicates
                failed[number] = str(error).partition("\n")[0]
        seconds: dict[int, list[float]] = {n: [] for n in steps}
        for _ in range(WARM_UP):
            for step in steps.values():
                step()
        for number in range(rounds):
            for n in sorted(steps, reverse=bool(number % 2)):
                seconds[n].append(timed(steps[n]))
        steps.clear()
        for number, row in enumerate(here):
            if number in failed:
                found.append(Found(str(row), row.model, [], 0, 0, failed[number]))
                continue
            predicted = _built(row)[1]
            measured = peak_bytes(lambda row=row: _built(row)[0], steps=3)
            found.append(Found(str(row), row.model, seconds[number], measured, predicted))
    return [dataclasses.asdict(f) for f in found]


def _built(row: Row) -> tuple[Step, int]:
    """The step, and the peak that is predicted for it."""
    model, batches, loss = CASES[row.model].build()
    how = {"dp": DP, "tp": TP}[row.base]
    step = mw.train_step(model, adamw, batches[0], loss=loss, **how, **row.options)
    predicted = peak_on(step.parts, mw.Cluster.local(RANKS), 2).bytes
    return cycled(step, batches), predicted


# ---------------------------------------------------------------- the table


HEADINGS = ("model", "technique", "time", "quartiles", "measured MiB", "of plain", "predicted", "error")


def cells(found: list[Found]) -> list[tuple[str, ...]]:
    """The lines of the table: each beside the first of its model, which has no technique."""
    lines: list[tuple[str, ...]] = []
    plain: dict[str, Found] = {}
    for one in found:
        if one.failed:
            lines.append((one.model, one.row, one.failed, *[""] * (len(HEADINGS) - 3)))
            continue
        base = plain.setdefault(one.model, one)
        ratios = [a / b for a, b in zip(one.seconds, base.seconds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios * 3)[:3]
        error = one.predicted_bytes / one.measured_bytes - 1
        lines.append(
            (
                one.model,
                one.row,
                f"{middle:.2f}×",
                f"{low:.2f}–{high:.2f}",
                f"{one.measured_bytes / 2**20:.1f}",
                f"{one.measured_bytes / base.measured_bytes:.2f}×",
                f"{one.predicted_bytes / 2**20:.1f}",
                f"{100 * error:+.1f} %",
            )
        )
    return lines


def main(arguments: list[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        "bench techniques", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="rows whose text has this, and the plain ones")
    parser.add_argument("--json", type=Path, help="also write what was measured to this file")
    options = parser.parse_args(arguments)
    wanted = [row for row in rows() if not row.options or options.only in str(row)]
    found = measure(wanted, options.rounds, options.threads)
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(f) for f in found], indent=1))
    lines = cells(found)
    if options.markdown:
        print("| " + " | ".join(HEADINGS) + " |")
        print("|" + "---|" * len(HEADINGS))
        for line in lines:
            print("| " + " | ".join(line) + " |")
        return
    shown = Table(*HEADINGS, box=box.SIMPLE_HEAD, title="Techniques on 2 gloo ranks", title_justify="left")
    for line in lines:
        shown.add_row(*line)
    Console(width=130, highlight=False).print(shown)
