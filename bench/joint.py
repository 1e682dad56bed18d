"""How long the search over everything takes (stages, meshes, techniques), when it has its first answer, and its gap.

python -m bench joint [--rows 8b 405b] [--markdown] [--profile FOLDER]

What is timed is what `mw.plan` does with a cluster after capture, with nothing else asked for. Each row runs in a
process of its own. Captures are kept on disk. `--profile` writes a profile of each row beside its events.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

NEAR = 1.05  # of the step at the end: whatever is within it is reported as nearly the answer
console = Console(width=max(150, Console().width), highlight=False)


@dataclass(frozen=True)
class Row:
    """A model on a cluster of H100 nodes of eight. `goal`: seconds of planning."""

    model: str
    ranks: int
    batch: int
    sequence: int
    goal: float


ROWS = {
    "8b-64": Row("Llama-8B bf16", 64, 128, 8192, 5.0),
    "8b-1024": Row("Llama-8B bf16", 1024, 1024, 8192, 5.0),
    "70b-64": Row("Llama-70B", 64, 128, 8192, 5.0),
    "70b-1024": Row("Llama-70B", 1024, 1024, 8192, 5.0),
    "405b-16384": Row("Llama-405B", 16384, 2048, 8192, 30.0),
    "mixtral-2048": Row("Mixtral bf16", 2048, 2048, 4096, 30.0),
}


def run_row(name: str, profile: Path | None) -> dict[str, Any]:
    """What a row measures, as plain data."""
    from bench.models import opened
    from bench.search_rows import warm
    from meshwright.compile import plan_captured
    from meshwright.cost.cluster import Cluster
    from meshwright.planning.search_request import request_for

    row = ROWS[name]
    found = opened(row.model, batch=row.batch, sequence=row.sequence)
    cluster = Cluster.preset("h100", nodes=row.ranks // 8)
    warm(cluster)
    before, started = _peak_bytes(), time.perf_counter()
    events: list[tuple[float, str, float | None, float | None]] = []

    def told(stage: str, price: float | None, bound: float | None) -> None:
        events.append((time.perf_counter() - started, stage, price, bound))

    watch = cProfile.Profile()
    if profile is not None:
        watch.enable()
    cpu = time.process_time()
    plan = plan_captured(found.captured, None, None, None, request_for(cluster, progress=told))
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    if profile is not None:
        watch.disable()
        watch.dump_stats(profile / f"{name}.prof")
        (profile / f"{name}.json").write_text(json.dumps(events))
    priced = [(at, price) for at, _, price, _ in events if price is not None]
    claims = plan.claims
    return {
        "capture": found.seconds,
        "first": priced[0][0] if priced else None,
        "near": next((at for at, price in priced if price <= NEAR * claims["step_seconds"]), None),
        "wall": wall,
        "cpu": cpu,
        "bytes": _peak_bytes(),
        "planner_bytes": _peak_bytes() - before,
        "step": claims["step_seconds"],
        "bound": claims.get("bound_seconds"),
        "gaps": claims.get("gaps", {}),
        "peak": claims["peak_bytes"],
        "plan": f"{plan.ranks}; {plan.techniques or 'no techniques'}",
        "notes": [note for note in plan.notes if note.startswith(("auto", "pipeline", "over"))],
    }


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


HEADINGS = (
    "model", "ranks", "batch", "capture", "first answer", "within 5 %", "all", "cpu", "goal", "memory", "step",
    "bound", "gap", "the plan",
)  # fmt: skip


def line_of(row: Row, took: dict[str, Any]) -> list[str]:
    """The cells of a row."""
    head = [row.model, f"{row.ranks:,}", f"{row.batch:,} × {row.sequence:,}"]
    if "error" in took:
        return [*head, took["error"], *[""] * (len(HEADINGS) - 4)]
    seconds = [
        f"{took[k]:.2f}" if took[k] is not None else "" for k in ("capture", "first", "near", "wall", "cpu")
    ]
    met = "✓" if took["wall"] <= row.goal else "✗"
    gap = ", ".join(f"{name} {100 * value:.1f} %" for name, value in took["gaps"].items())
    return [
        *head, *seconds, f"{row.goal:g} {met}", f"{took['bytes'] / 1e6:.0f} MB", f"{took['step']:.4g} s",
        f"{took['bound']:.4g} s" if took["bound"] else "", gap, took["plan"],
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Run rows one after the other, and print them."""
    from bench.search import show

    parser = argparse.ArgumentParser(
        prog="python -m bench joint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", nargs="*", help="rows whose name has one of these words")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--profile", type=Path, help="a folder for a profile of each row")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(run_row(options.one, options.profile)))
        return
    lines = []
    for name, row in ROWS.items():
        if options.rows and not any(word in name for word in options.rows):
            continue
        console.print(f"[dim]{name} (load {os.getloadavg()[0]:.1f}) …[/]")
        profile = ["--profile", str(options.profile)] if options.profile else []
        done = subprocess.run(
            [sys.executable, "-m", "bench.joint", "--one", name, *profile],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        told = done.stdout.strip().splitlines()
        took = json.loads(told[-1]) if told and not done.returncode else {"error": f"exit {done.returncode}"}
        lines.append(line_of(row, took))
        for note in took.get("notes", ()):
            console.print(f"  {note}")
    show(("Planning over everything", HEADINGS, lines), options.markdown)


if __name__ == "__main__":
    main()
