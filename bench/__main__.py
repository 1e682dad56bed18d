"""Run the benchmarks and print their tables.

python -m bench                       those of the next line and collectives
python -m bench dp tp zero1 zero3 one steps against the same scheme by hand
python -m bench start                 a script to its first step, and a small step, against DDP
python -m bench collectives           gloo on this machine
python -m bench search [--markdown]   how long planning takes, and how good recursion is
python -m bench joint [--markdown]    how long the search over stages, meshes and techniques takes, and its gap
python -m bench planned [--markdown]  how long planning published models takes on 8 to 2,048 ranks, and what is refused
python -m bench published             steps that others have published, against what is predicted for their plans
python -m bench one-rank --rows 405b  a plan for thousands of ranks, one of them run here and counted
python -m bench techniques            what each technique costs and saves, and what was predicted
python -m bench interleave            copies that take turns on a slow link; has options of its own: --help
python -m bench recompute             layers computed again, against torch.utils.checkpoint
python -m bench pipeline              stages on two and four ranks, against torch.distributed.pipelining, and predicted
python -m bench guards                what is looked at before each step, and its share of the step
python -m bench state                 saving and loading, against torch.distributed.checkpoint
python -m bench recovery              ranks killed at 20 random moments, and losses equal to the last bit
python -m bench recovery --events     what else breaks: seconds until the next step, steps lost, weights equal
python -m bench recovery --random 30  random events in a row over three machines, of which the others go on
python -m bench ps                    parameter servers: pull, push, rows, a slow worker, memory; against rpc and Ray
python -m bench ps-prefetch           steps with tables on servers, with rows of the next batch read ahead or not
python -m bench ps-tables             tables on servers, data parallel and as auto plans them, with what is predicted
python -m bench gpu                   what a CUDA device shows (`make gpu`); has options of its own: --help
python -m bench predict               predicted against measured steps; has options of its own: --help
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.steps import RANKS, TITLES, Measured, measure

# Those that are modules with options of their own.
OWN = (
    "gpu", "guards", "interleave", "joint", "one-rank", "pipeline", "planned", "predict", "ps", "ps-prefetch",
    "ps-tables", "published", "recompute", "recovery", "search", "start", "state", "techniques",
)  # fmt: skip
console = Console(width=max(118, Console().width), highlight=False)


def main() -> None:
    # jobs that a benchmark has started end with it, as by Ctrl-C
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if sys.argv[1:] and sys.argv[1] in OWN:
        own = importlib.import_module(f"bench.{sys.argv[1].replace('-', '_')}")
        sys.exit(own.main(sys.argv[2:]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=(*TITLES, "collectives", []), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, help="per rank; by default the cores divided by the ranks")
    parser.add_argument("--json", type=Path, help="also write what was measured to this file")
    options = parser.parse_args()
    names = options.names or [*TITLES, "collectives"]
    found: dict[str, list[Measured]] = {}
    for name in names:
        if name == "collectives":
            subprocess.run([sys.executable, Path(__file__).with_name("collectives.py")], check=True)
            continue
        threads = options.threads or max(1, cores() // RANKS[name])
        busy = os.getloadavg()[0]
        found[name] = measure(name, options.rounds, threads)
        console.print(table(name, found[name], threads, options.rounds))
        if busy > 0.5:
            console.print(f"  [yellow]the machine was not quiet: load {busy:.1f} before this table[/]\n")
    if options.json:
        text = {name: [dataclasses.asdict(m) for m in rows] for name, rows in found.items()}
        options.json.write_text(json.dumps(text, indent=1))


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def table(name: str, rows: list[Measured], threads: int, rounds: int) -> Table:
    """Times and memory of ours and theirs, and ours over theirs."""
    shown = Table(
        title=f"{TITLES[name]}  ({threads} thread{'s' if threads > 1 else ''} a rank, {rounds} rounds)",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
    )
    shown.add_column("model, width × layers")
    for heading in ("ours", "theirs", "time", "quartiles", "ours", "theirs", "memory"):
        shown.add_column(heading, justify="right")
    for row in rows:
        low, middle, high = row.quartiles
        shown.add_row(
            row.case,
            f"{milliseconds(row.ours_s)} ms",
            f"{milliseconds(row.theirs_s)} ms",
            ratio(middle),
            f"{low:.2f} – {high:.2f}",
            f"{row.ours_bytes / 1e6:.1f} MB",
            f"{row.theirs_bytes / 1e6:.1f} MB",
            ratio(row.ours_bytes / row.theirs_bytes),
        )
    return shown


def milliseconds(seconds: list[float]) -> str:
    """The median."""
    return f"{sorted(seconds)[len(seconds) // 2] * 1e3:.0f}"


def ratio(value: float) -> Text:
    """Ours over theirs: green when it is not above 1.00."""
    return Text(
        f"{value:.2f}", style="green" if round(value, 2) <= 1.0 else "yellow" if value <= 1.05 else "red"
    )


if __name__ == "__main__":
    main()
