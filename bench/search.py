"""How long planning takes and how good it is: the rows of the design's goals, and recursion against the optimum.

python -m bench search [--rows llama recursion] [--markdown] [--skip-quality]

Each row runs in a process of its own, whose memory is measured; a row that fails says so, and the others go on.
Captures are kept on disk, so that a second run starts at once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.search_rows import ROWS, run_row

BUDGET_SECONDS = 660.0  # of a full run
console = Console(width=max(150, Console().width), highlight=False)


def child(arguments: list[str], seconds: float) -> dict[str, Any]:
    """What a process of this module prints as its last line; what went wrong under ``error``."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "bench.search", *arguments],
            capture_output=True,
            text=True,
            timeout=seconds,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done in {seconds:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"error": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1][:100]}
    return json.loads(lines[-1])


def main(arguments: list[str] | None = None) -> None:
    """Run the rows, then the table of quality; print as they come, then everything as tables."""
    from bench.quality import FAMILIES, summary

    parser = argparse.ArgumentParser(
        prog="python -m bench search",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", nargs="*", help="rows whose name has one of these words")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--skip-quality", action="store_true")
    parser.add_argument("--quality", nargs="*", help="the second table alone: of these families, or of all")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--family", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(run_row(options.one)))
        return
    if options.family:
        from bench.quality import run_family

        run_family(options.family)
        return
    ended = time.monotonic() + BUDGET_SECONDS
    alone = options.quality is not None
    families = [f for f in FAMILIES if not options.quality or any(word in f for word in options.quality)]
    chosen = [n for n in ROWS if not alone and (not options.rows or any(w in n for w in options.rows))]
    late = [n for n in chosen if n.startswith("recursion-distinct")]  # minutes: whatever is left
    quality = alone or (not options.skip_quality and not options.rows)
    found: dict[str, dict[str, Any]] = {}
    run_rows([n for n in chosen if n not in late], ended - (360 if quality else 0), found)
    if quality:
        cells: list[dict[str, Any]] = []
        for number, family in enumerate(families):
            left = ended - 60 - time.monotonic()
            share = left / (len(families) - number)
            console.print(f"[dim]{family} …[/]", end=" ")
            cells += family_cells(family, max(10.0, share))
            console.print(f"{sum(c['family'] == family for c in cells)} cells")
        for table in summary(cells):
            show(table, options.markdown)
        found["quality"] = {"cells": cells}
    run_rows(late, ended, found)
    if chosen:
        show(rows_table({n: found[n] for n in chosen}), options.markdown)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def run_rows(names: list[str], ended: float, found: dict[str, dict[str, Any]]) -> None:
    """Run rows one after the other, with what they measure into `found`; none starts that cannot end in time."""
    for name in names:
        left = ended - time.monotonic()
        if left < 15:
            found[name] = {"error": "no time left"}
            continue
        console.print(f"[dim]{name} (load {os.getloadavg()[0]:.1f}) …[/]", end=" ")
        found[name] = child(["--one", name], min(left, ROWS[name].limit_seconds))
        console.print(found[name].get("error") or f"{found[name]['wall_s']:.2f} s")


def family_cells(family: str, seconds: float) -> list[dict[str, Any]]:
    """The cells of one family that are done in time: one line of output each."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.search", "--family", family],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        text, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
    return [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]


HEADINGS = (
    "search", "model", "ranks", "nodes", "capture", "fold", "factors", "codes", "space", "solve", "total wall", "cpu",
    "goal", "memory", "price", "bound", "gap",
)  # fmt: skip


def rows_table(found: Mapping[str, Mapping[str, Any]]) -> tuple[str, tuple[str, ...], list[list[str]]]:
    """Title, headings and cells."""
    lines = []
    for name, took in found.items():
        row = ROWS[name]
        head = [row.title, row.model, f"{row.ranks:,}"]
        if "error" in took:
            lines.append([*head, took["error"], *[""] * 13])
            continue
        goal = f"{row.goal:g} s" if row.goal else ""
        if row.goal:
            goal += " ✓" if took["wall_s"] <= row.goal else " ✗"
        price = took.get("price")
        lines.append([
            *head, f"{took['nodes']:,}",
            *(_s(took.get(f"{k}_s")) for k in ("capture", "fold", "factors", "codes", "space", "solve", "wall", "cpu")),
            goal, f"{took['peak_bytes'] / 1e6:.0f} MB",
            f"{price * 1e3:.2f} ms" if price else "",
            f"{took['bound'] * 1e3:.2f} ms" if took.get("bound") else "",
            f"{took['gap']:.2%}" if took.get("gap") is not None else f"file {took['file_bytes'] / 1e3:.0f} kB"
            if "file_bytes" in took else "",
        ])  # fmt: skip
    return "Planning", HEADINGS, lines


def _s(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value < 1 else f"{value:.2f}"


def show(table: tuple[str, tuple[str, ...], list[list[str]]], markdown: bool) -> None:
    """Print a table, in colour or as markdown."""
    title, headings, lines = table
    if markdown:
        print(f"\n**{title}**\n")
        print("| " + " | ".join(headings) + " |")
        print("|" + "|".join("---" if n < 2 else "---:" for n in range(len(headings))) + "|")
        for line in lines:
            print("| " + " | ".join(line) + " |")
        print(flush=True)
        return
    shown = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for number, heading in enumerate(headings):
        shown.add_column(heading, justify="left" if number < 2 else "right")
    for line in lines:
        shown.add_row(*line)
    console.print(shown)


if __name__ == "__main__":
    main()
