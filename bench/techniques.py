"""What each technique costs and saves: a step with it beside the step without, on real ranks, and what was predicted.

    python -m bench techniques [--markdown] [--rounds N] [--only TEXT …] [--memory]

All steps of a model run in turn, in one job; the ratio of times is taken within a round, the slowest rank counts. Bytes
are the most that live at once on rank 0, by the allocator's own events (`bench/memory.py`), held against the peak that
the planner predicts for the same program. Here the host's memory is the device's; `apart` is the peak that is predicted
for the device where it is not.

Each row is printed as soon as its bytes are known. `--memory` leaves out the times: bytes are the same at any load.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

import meshwright as mw
from bench.memory import peak_bytes
from bench.ranks import on_ranks
from bench.steps import Case, Step, adamw, cycled, timed
from meshwright.predict.memory.allocator import ADAMW_FUSED
from meshwright.predict.memory.step import peak

RANKS = 2
WARM_UP = 2
CASES = {
    "GPT": Case("GPT", 256, 12, 128, 8),
    "Llama": Case("Llama", 512, 4, 128, 8),
    "table": Case("GPT", 256, 2, 64, 2, 65536),
    "four": Case("Llama", 512, 4, 128, 8),
}
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


ON_FOUR: dict[
    str, dict[str, Any]
] = {  # both products of a layer's second half over four ranks, in one dim and in two
    "1d": {"mesh": {"x": 4}, "pins": {"*.mlp.up": {"n": "x"}, "*.mlp.gate": {"n": "x"}}},
    "2d": {
        "mesh": {"x": 2, "y": 2},
        "pins": {
            "*.mlp.up": {"k": "x", "n": "y"},
            "*.mlp.gate": {"k": "x", "n": "y"},
            "*.mlp.down": {"k": "y", "n": "x"},
        },
    },
}


@dataclass(frozen=True)
class Row:
    """A technique on a model: what is asked for, beside the plan that is asked for without it. `hosted`: the module
    that the host runs."""

    model: str
    base: str
    options: dict[str, Any]
    hosted: str = ""

    def __str__(self) -> str:
        asked = [f"{k}={v!r}" for k, v in self.options.items()]
        asked += [f"on_host({self.hosted})"] if self.hosted else []
        asked += ["2D"] if self.base == "2d" else []
        return ", ".join(asked) or "nothing"


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
        {"recompute": 30e6},
        {"fusion": 0},
        {"fusion": 1 << 20},
        {"offload": ("optimizer",)},
        {"offload": ("activations",)},
        {"offload": ("activations",), "recompute": "full"},
        {"offload": ("parameters", "optimizer")},
        {"offload": ("parameters", "activations", "optimizer"), "recompute": "full"},
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
        {"slice_activation": True},
        {"recompute": "selective"},
        {"recompute": "selective", "slice_activation": True},
        {"recompute": "full", "slice_activation": True},
        {"recompute": "full", "slice_activation": True, "offload": ("activations",)},
        {"optimizer_parallel": 3, "recompute": "full", "interleave": 2},
    ]
    return [
        *(Row("GPT", "dp", o) for o in alone),
        *(Row("Llama", "tp", o) for o in across),
        *(Row("table", "dp", {}, hosted) for hosted in ("", "tokens")),
        *(Row("four", base, {}) for base in ON_FOUR),
    ]


@dataclass(frozen=True)
class Found:
    """Seconds of each round, measured and predicted bytes of one row; `apart`: those of the device where the host has a
    memory of its own. `failed`: why there are none, where it cannot be built."""

    row: str
    model: str
    seconds: list[float]
    measured_bytes: int = 0
    predicted_bytes: int = 0
    apart_bytes: int = 0
    failed: str = ""


def measure(wanted: list[Row], rounds: int, threads: int, markdown: bool) -> list[Found]:
    """All rows, those on as many ranks in one job; none is timed in 0 rounds."""
    found: list[Found] = []
    for count in (RANKS, 2 * RANKS):
        plain = [
            dataclasses.asdict(row)
            for row in wanted
            if count == (2 * RANKS if row.base in ON_FOUR else RANKS)
        ]
        if plain:
            found += [Found(**f) for f in on_ranks(count, threads, _measure, plain, rounds, markdown)]
    return found


def _measure(plain: list[dict[str, Any]], rounds: int, markdown: bool) -> list[dict[str, Any]]:
    found: list[Found] = []
    wanted = [Row(**row) for row in plain]
    for name in dict.fromkeys(row.model for row in wanted):
        here = [row for row in wanted if row.model == name]
        seconds, failed = _timed(here, rounds) if rounds else ({}, {})
        for number, row in enumerate(here):
            if number not in failed:
                found.append(_weighed(row, seconds.get(number, [])))
            else:
                found.append(Found(str(row), row.model, [], failed=failed[number]))
            if dist.get_rank() == 0:  # who ends it early has the rows until then
                print(_text(cells(found)[-1], markdown), flush=True)
    return [dataclasses.asdict(f) for f in found]


def _timed(rows: list[Row], rounds: int) -> tuple[dict[int, list[float]], dict[int, str]]:
    """Seconds of each round of some rows, by their number, and why others cannot be built."""
    steps: dict[int, Step] = {}
    failed: dict[int, str] = {}
    for number, row in enumerate(rows):
        try:
            steps[number] = _built(row)[0]
        except mw.MeshwrightError as error:  # refused on every rank, before any of them communicates
            failed[number] = str(error).partition("\n")[0]
    seconds: dict[int, list[float]] = {n: [] for n in steps}
    for _ in range(WARM_UP):
        for step in steps.values():
            step()
    for number in range(rounds):
        for n in sorted(steps, reverse=bool(number % 2)):
            seconds[n].append(timed(steps[n]))
    return seconds, failed


def _weighed(row: Row, seconds: list[float]) -> Found:
    peak = apart = 0

    def make() -> Step:
        nonlocal peak, apart
        step, peak, apart = _built(row)
        return step

    try:
        measured = peak_bytes(make, steps=3)
    except mw.MeshwrightError as error:
        return Found(str(row), row.model, [], failed=str(error).partition("\n")[0])
    return Found(str(row), row.model, seconds, measured, peak, apart)


def _built(row: Row) -> tuple[Step, int, int]:
    """The step, and the peak that is predicted for it; and that of the device where the host has a memory of its
    own."""
    model, batches, loss = CASES[row.model].build()
    how = {"dp": DP, "tp": TP, **{k: {"mode": TP["mode"], **v} for k, v in ON_FOUR.items()}}[row.base]
    if row.hosted:
        mw.on_host(model.get_submodule(row.hosted))
    step = mw.train_step(model, adamw, batches[0], loss=loss, **how, **row.options)
    here, apart = (peak(step.parts, optimizer=ADAMW_FUSED, apart=way).bytes for way in (None, True))
    return cycled(step, batches), here, apart


# ---------------------------------------------------------------- the table


HEADINGS = (
    "model",
    "technique",
    "time",
    "quartiles",
    "measured MiB",
    "of plain",
    "predicted",
    "error",
    "apart",
)


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
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios or [0.0]) * 3
        error = one.predicted_bytes / one.measured_bytes - 1
        lines.append(
            (
                one.model,
                one.row,
                f"{middle:.2f}×" if ratios else "",
                f"{low:.2f}–{high:.2f}" if ratios else "",
                f"{one.measured_bytes / 2**20:.1f}",
                f"{one.measured_bytes / base.measured_bytes:.2f}×",
                f"{one.predicted_bytes / 2**20:.1f}",
                f"{100 * error:+.1f} %",
                f"{one.apart_bytes / 2**20:.1f}" if "offload" in one.row or "on_host" in one.row else "",
            )
        )
    return lines


def _text(line: tuple[str, ...], markdown: bool) -> str:
    return "| " + " | ".join(line) + " |" if markdown else "   ".join(filter(None, line))


def main(arguments: list[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        "bench techniques", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[""], help="rows with one of these, and the plain ones")
    parser.add_argument("--memory", action="store_true", help="bytes alone")
    parser.add_argument("--json", type=Path, help="also write what was measured to this file")
    options = parser.parse_args(arguments)
    wanted = [
        row
        for row in rows()
        if str(row) == "nothing" or any(text in f"{row.model} {row}" for text in options.only)
    ]
    models = {row.model for row in wanted if str(row) != "nothing"}
    wanted = [row for row in wanted if row.model in models]
    if options.markdown:
        print(_text(HEADINGS, markdown=True))
        print("|" + "---|" * len(HEADINGS), flush=True)
    found = measure(wanted, 0 if options.memory else options.rounds, options.threads, options.markdown)
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(f) for f in found], indent=1))
    if options.markdown:
        return
    shown = Table(*HEADINGS, box=box.SIMPLE_HEAD, title="Techniques on 2 gloo ranks", title_justify="left")
    for line in cells(found):
        shown.add_row(*line)
    Console(width=140, highlight=False).print(shown)
